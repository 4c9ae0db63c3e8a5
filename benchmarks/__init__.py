"""`hal bench`: every figure is a ratio against a named peer, with both measured alternately in the same run.

Each folder imports only from itself and from folders above it in this list:

    harness    running, timing and reporting of cases
    peers      the GPT of the training step, in HAL, plain torch and megatron-core
    parallel   trainers under any parallel layout, one process per rank
    suites     the cases of `hal bench`, one file per suite
    gpu        `make gpu`: everything that needs an NVIDIA GPU
"""

if __name__ != "hal.bench":
    raise ImportError(f"import this package as 'hal.bench', not as '{__name__}' (install it with: pip install -e .)")
