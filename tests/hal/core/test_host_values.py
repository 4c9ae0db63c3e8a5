"""hal.to_device copies, and keeps the content of a copy for backends only as long as it is that of the copy."""

import gc

import torch

import hal
from hal.core import host_values


def test_the_copy_has_the_values_and_the_hosts_are_not_remembered():
    x = torch.arange(4)
    assert hal.to_device(x, torch.device("cpu"), known=True).tolist() == [0, 1, 2, 3]
    assert not [y for y in host_values._known if y is x]


class _OnDevice(torch.Tensor):
    """A tensor that is somewhere else than it says, and cannot be read."""

    device = torch.device("xpu", 0)

    def tolist(self):
        raise AssertionError("the tensor was read")

    def is_inference(self):
        return False


def test_a_known_content_is_not_read_until_the_tensor_changes(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "to", lambda x, device: x.clone().as_subclass(_OnDevice))
    y = hal.to_device(torch.tensor([0, 3, 5]), torch.device("xpu", 0), known=True)
    assert host_values.host_value(y) == [0, 3, 5]
    y.add_(1)
    try:
        host_values.host_value(y)
    except AssertionError as error:
        assert "was read" in str(error)
    else:
        raise AssertionError("a changed tensor must be read again")
    count = len(host_values._known)
    del y
    gc.collect()
    assert len(host_values._known) == count - 1
