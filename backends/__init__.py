"""The backends that ship with HAL. Imported by name through `hal.use`, never all at once."""

if __name__ != "hal.backends":
    raise ImportError(f"import this package as 'hal.backends', not as '{__name__}' (install it with: pip install -e .)")
