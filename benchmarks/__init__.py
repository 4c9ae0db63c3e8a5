"""`hal bench`: every figure is a ratio against a named peer, interleaved in one run. One file per suite."""

if __name__ != "hal.bench":
    raise ImportError(f"import this package as 'hal.bench', not as '{__name__}' (install it with: pip install -e .)")
