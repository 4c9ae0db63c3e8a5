"""HAL inside frameworks that others maintain. Each module imports its framework, and is imported only by its user."""
