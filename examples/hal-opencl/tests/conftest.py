import pytest

import hal


@pytest.fixture
def use():
    """`use(**options)` activates the backend; afterwards its default options are restored."""
    yield lambda **options: hal.use("opencl", **options)
    hal.use("opencl")


@pytest.fixture(scope="session", autouse=True)
def opencl():
    """The backend. Without an OpenCL driver the tests fail instead of being skipped, because all of them need it."""
    return hal.use("opencl")
