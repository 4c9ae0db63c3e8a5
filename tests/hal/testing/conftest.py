import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Planted backends are torch on tiny tensors, which sharing among threads only slows down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
