"""The life of tensors: when they are made and freed, of what kind they are, and the file for torch's viewer."""

import pickle
import time

import torch

from hal.profiling.memory import REST, MemoryHistory
from hal.spans import Span


def test_a_storage_counts_from_its_operation_until_nothing_refers_to_it():
    with MemoryHistory() as memory:
        x = torch.zeros(1000)
        view = x[10:]
        y = x + 1
        del x
        z = view * 2  # the storage of x is still alive
        del view, y, z
    times, curves = memory.curve()
    assert times == sorted(times) and set(curves) == {REST}
    assert curves[REST] == [4000, 8000, 11960, *curves[REST][3:]] and curves[REST][-1] == 0
    assert memory.peak() == {REST: 11960}


def test_a_storage_that_no_operation_made_counts_once_it_is_resized():
    with MemoryHistory() as memory:
        x = torch.frombuffer(bytearray(4000), dtype=torch.float32).resize_(10, 100)
        x.resize_(1000)
        del x
    assert memory.peak() == {REST: 4000} and memory.curve()[1][REST][-1] == 0


def test_a_kind_holds_for_the_whole_life_and_for_storages_of_before():
    weight = torch.ones(100, requires_grad=True)
    with MemoryHistory() as memory:
        memory.mark("weights", [weight.detach()])
        (weight * 2).sum().backward()
        memory.mark("gradients", [weight.grad])
        weight.grad = None
    _, curves = memory.curve()
    assert curves["weights"] == [400] * len(curves["weights"])
    assert max(curves["gradients"]) == 400 and curves["gradients"][-1] == 0


def test_the_snapshot_has_the_form_of_torchs(tmp_path):
    with MemoryHistory() as memory:
        begin = time.perf_counter_ns()
        x = torch.zeros(8)
        recorded = [Span("phase", "forward", begin, time.perf_counter_ns(), 1)]
        kept = torch.zeros(4)
        del x
    memory.save_snapshot(tmp_path / "snapshot.pickle", recorded)
    snapshot = pickle.loads((tmp_path / "snapshot.pickle").read_bytes())
    (events,) = snapshot["device_traces"]
    actions = [(e["action"], e["size"]) for e in events]
    assert actions == [("alloc", 32), ("alloc", 16), ("free_requested", 32), ("free_completed", 32)]
    assert [f["name"] for f in events[0]["frames"]][-1] == "forward" and len(events[1]["frames"]) == 1
    assert kept.nbytes == 16 and snapshot["segments"] == []


def test_what_is_kept_by_the_graph_only_is_alive_and_sizes_may_change():
    weight = torch.ones(100, requires_grad=True)
    with MemoryHistory() as memory:
        loss = (weight * 2).exp().sum()  # exp keeps its result, to which no Python object refers
        resized = torch.zeros(10)
        resized.untyped_storage().resize_(4000)
        held = torch.zeros(1)
        loss.backward()
        del held, resized, loss
    _, curves = memory.curve()
    assert memory.peak()[REST] >= 400 + 4000 + 4
    assert max(curves[REST][:3]) < 4000


def test_a_storage_that_replaces_another_counts():
    """As for the large results of cpu_ref, whose memory is not torch's."""
    with MemoryHistory() as memory:
        storage = torch.frombuffer(bytearray(4000), dtype=torch.float32).untyped_storage()
        kept = torch.empty(0).set_(storage, 0, (1000,))
    assert memory.peak()[REST] == kept.nbytes == 4000


def test_views_and_changes_of_what_existed_before_are_no_allocations():
    old = torch.zeros(1000)
    with MemoryHistory() as memory:
        view = old[10:]
        view.add_(1)
        old.mul_(2)
    assert memory.peak() == {} and memory.curve() == ([], {})
