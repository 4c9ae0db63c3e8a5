"""Settings for the whole test suite."""

from hypothesis import settings

pytest_plugins = ["seeded_sample"]

# No assertion depends on time: a loaded machine may take seconds for a call.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
