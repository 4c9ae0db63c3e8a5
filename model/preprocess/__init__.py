"""From text to Megatron's indexed datasets: what `hal data` does. See run.py."""
