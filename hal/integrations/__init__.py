"""HAL inside third-party frameworks. Each module imports its framework, so nothing in HAL imports these modules."""
