"""The backends that ship with HAL. `hal.use` imports only the one that is named."""

if __name__ != "hal.backends":
    raise ImportError(f"import this package as 'hal.backends', not as '{__name__}' (install it with: pip install -e .)")
