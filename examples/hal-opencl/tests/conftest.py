import pytest

import hal


@pytest.fixture
def use():
    """`use(**options)` takes the backend into use; afterwards it has its default options again."""
    yield lambda **options: hal.use("opencl", **options)
    hal.use("opencl")


@pytest.fixture(scope="session", autouse=True)
def opencl():
    """The backend. Without an OpenCL driver the tests fail instead of being skipped, because they test nothing else."""
    return hal.use("opencl")
