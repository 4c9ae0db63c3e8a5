import pytest

import hal


@pytest.fixture
def use():
    """`use(**options)` takes the backend into use; afterwards it is as hal.use makes it by default."""
    yield lambda **options: hal.use("opencl", **options)
    hal.use("opencl")


@pytest.fixture(scope="session", autouse=True)
def opencl():
    """The backend; a machine without an OpenCL driver fails, because these tests are about nothing else."""
    return hal.use("opencl")
