"""Text to Megatron's indexed datasets: the implementation of `hal data`, which starts in preprocess.py."""
