"""Names of hal.testing that are imported on first access."""

import pytest

import hal.testing


@pytest.mark.parametrize("name", hal.testing.__all__)
def test_every_public_name_exists(name):
    assert getattr(hal.testing, name) is not None
