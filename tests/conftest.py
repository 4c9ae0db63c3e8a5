"""Settings for the whole test suite."""

import gc

from hypothesis import settings

pytest_plugins = ["seeded_sample"]

# No assertion depends on time: a loaded machine may take seconds for a call.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# The modules and tests that are collected are 700,000 objects, and none of them becomes garbage. Searching them for
# garbage takes a third of the time of collecting them, and then 0.6 s in every full search during the tests.
gc.disable()


def pytest_collection_finish():
    gc.freeze()
    gc.enable()
