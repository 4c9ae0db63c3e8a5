"""The operations a GPT needs: `hal.ops.NAME(...)` runs on the active backend. One file per family."""
if __name__ != "hal.ops":
    raise ImportError(f"import this package as 'hal.ops', not as '{__name__}' (install it with: pip install -e .)")
