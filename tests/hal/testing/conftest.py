import pytest
import torch

from hal.testing import kit


@pytest.fixture(autouse=True)
def one_thread():
    """Planted backends use torch on tiny tensors, which several threads only slow down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def unshrunk(request, monkeypatch):
    """Planted faults are found in less time than their calls are made smaller, which test_shrinking.py tests."""
    if request.path.name != "test_shrinking.py":
        monkeypatch.setattr(kit, "shrink", lambda op, sample, dtype, fails: sample)
