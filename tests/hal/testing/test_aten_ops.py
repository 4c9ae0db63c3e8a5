"""The list of torch's operations that the model calls on a device is complete, documented, and checked on a backend."""

from pathlib import Path

import pytest
import torch

import hal
from hal.model.training.optimizer import Optimizer
from hal.testing import Reference, aten_recorder, golden
from hal.testing.aten_device import DEVICE, AtenRecorder, RecordingBackend
from hal.testing.aten_ops import check_aten, listed

REGENERATE = "run: python -m hal.testing.aten_recorder docs/write-a-backend.md"
PAGE = Path(__file__).resolve().parents[3] / "docs" / "write-a-backend.md"


@pytest.fixture(scope="module")
def recorded():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield aten_recorder.record()
    torch.set_num_threads(threads)


def uses(operations):
    return {name: call["used by"] for name, call in operations.items()}


@pytest.mark.slow
def test_the_list_has_what_the_model_calls_and_nothing_else(recorded):
    assert uses(recorded) == uses(listed()), REGENERATE


def test_the_page_for_authors_of_backends_shows_the_list():
    text = PAGE.read_text()
    assert aten_recorder.put_table(text, listed()) == text, REGENERATE


def recording_of(run):
    recording = aten_recorder.Recording()
    with hal.activated(RecordingBackend()), AtenRecorder(recording.note):
        result = run()
    return result, set(recording.operations)


def test_a_new_call_of_the_trainer_is_noticed(monkeypatch):
    norm = Optimizer.grad_norm
    monkeypatch.setattr(Optimizer, "grad_norm", lambda self: norm(self) + float(torch.erf(self.main_grad())) * 0.0)
    monkeypatch.setattr(Optimizer, "main_grad", lambda self: next(iter(self.grads().values())).sum(), raising=False)
    _, operations = recording_of(lambda: golden.train("gpt2", torch.float32, 1))
    assert operations - set(listed()) == {"erf.default"}


@pytest.mark.parametrize("shape", golden.SHAPES)
def test_the_recording_device_trains_like_the_references(shape):
    """Not bit for bit: on Intel processors MKL's products differ in their last bits, unless MKL_CBWR=COMPATIBLE."""
    trace, operations = recording_of(lambda: golden.train(shape, torch.float32, 3))
    with hal.activated(Reference()):
        expected = golden.train(shape, torch.float32, 3)
    assert trace.losses == pytest.approx(expected.losses, rel=2e-6)
    assert trace.grad_norms == pytest.approx(expected.grad_norms, rel=2e-6)
    assert len(operations) > 15 and operations <= set(listed())


def test_work_on_the_host_is_not_recorded():
    def run():
        x = torch.ones(3, device=DEVICE)
        return (x + x).cpu().sort().values.tolist()

    result, operations = recording_of(run)
    assert result == [2.0] * 3 and operations == {"ones.default", "add.Tensor", "_to_copy.default"}


def test_a_tensor_of_the_host_among_the_devices_is_refused():
    with pytest.raises(hal.HalError, match="mixes tensors of the device and of the host"):
        recording_of(lambda: torch.ones(3, device=DEVICE) + torch.ones(3))


def test_every_operation_runs_on_the_host():
    findings = check_aten(Reference())
    assert [f.name for f in findings] == list(listed())
    assert [f for f in findings if not f.ok] == []


class Faulty(AtenRecorder):
    """A device without torch.cat, whose sums are wrong."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func is torch.ops.aten.sum.dim_IntList and result.device == DEVICE:
            result.on_host.add_(1.0)
        return result


def lacking_cat(func, args, kwargs):
    if func is torch.ops.aten.cat.default:
        raise NotImplementedError("no kernel of aten::cat for acme")


def test_a_device_that_lacks_an_operation_or_computes_it_wrongly_is_told_which():
    with Faulty(lacking_cat):
        wrong = {f.name: f.error for f in check_aten(RecordingBackend()) if not f.ok}
    assert set(wrong) == {"cat.default", "sum.dim_IntList"}
    assert "no kernel of aten::cat" in wrong["cat.default"] and "not close" in wrong["sum.dim_IntList"]


class OnlyFloats(Reference):
    def capabilities(self):
        return hal.Capabilities(dtypes=frozenset({torch.float32}))


def test_operations_on_a_dtype_that_the_device_lacks_are_left_out():
    names = {f.name for f in check_aten(OnlyFloats())}
    assert "cat.default" in names and names < set(listed()) and "ne.Scalar" not in names
