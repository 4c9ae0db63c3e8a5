"""The GPT model and its trainer. Everything device-specific goes through `hal` and `hal.ops`."""

if __name__ != "hal.model":
    raise ImportError(f"import this package as 'hal.model', not as '{__name__}' (install it with: pip install -e .)")
