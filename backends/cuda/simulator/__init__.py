"""The CUDA execution model on a CPU: see docs/cuda-simulator.md."""
