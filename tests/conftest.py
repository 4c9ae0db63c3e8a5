"""Settings for the whole test suite."""

pytest_plugins = ["seeded_sample"]
