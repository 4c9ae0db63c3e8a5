"""hal_device() replaces exactly the names megatron-core needs, only while active, and never over another patch."""

import functools
import json
import logging
import subprocess
import sys

import numpy as np
import pytest
import torch
import torch._refs
import torch.mps
from routing_needs import NEEDED_BY
from small_models import LENGTH, chunks, config

import hal
from hal import HalError
from hal.model.megatron import CORE, hal_device
from hal.model.megatron.cuda_patches import NAMES

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has an NVIDIA device")


def owner_of(path):
    *owners, name = path.split(".")[1:]
    return functools.reduce(getattr, owners, torch), name


def snapshot():
    attributes = {}
    for path in (*NAMES, "torch.cuda._lazy_init"):
        owner, name = owner_of(path)
        attributes[path] = (getattr(owner, name), name in vars(owner))
    return attributes


@pytest.mark.parametrize("name", CORE)
def test_what_needs_a_name_works_while_it_is_routed(name, world):
    with hal_device():
        NEEDED_BY[name]()


@without_cuda
@pytest.mark.parametrize("name", CORE)
def test_what_needs_a_name_breaks_without_it(name, world):
    others = {n: make for n, make in CORE.items() if n != name}
    with hal_device(others), pytest.raises((AssertionError, TypeError, RuntimeError)):
        NEEDED_BY[name]()


def test_megatrons_clipping_by_the_largest_gradient(world):
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32, get_grad_norm_fp32

    parameter = torch.nn.Parameter(torch.zeros(4))
    with hal_device():
        parameter.grad = torch.tensor([3.0, -7.0, 1.0, 0.0])
        norm = get_grad_norm_fp32([parameter.grad], float("inf"), torch.distributed.group.WORLD)
        clip_grad_by_total_norm_fp32([parameter], 3.5, norm)
    assert norm == 7.0 and parameter.grad.tolist() == pytest.approx([1.5, -3.5, 0.5, 0.0], rel=1e-5)


def test_names_are_torchs_own_before_and_after_and_one_is_never_touched(cpu_ref):
    import megatron.core.tensor_parallel.random as core_random
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    before, copied, default = snapshot(), core_random._lazy_call, ShardedTensor.init_data.__defaults__
    with hal_device():
        during = snapshot()
        assert core_random._lazy_call is not copied
        assert ShardedTensor.init_data.__defaults__ != default
    assert snapshot() == before
    assert (core_random._lazy_call, ShardedTensor.init_data.__defaults__) == (copied, default)
    assert {n for n in before if during[n][0] is not before[n][0]} == set(NAMES)


WAYS = {
    "Tensor.to": lambda: torch.ones(1).to("cuda").device,
    "Tensor.to with a dtype": lambda: torch.ones(1).to(torch.device("cuda", 0), torch.float64).device,
    "Tensor.to by keyword": lambda: torch.ones(1).to(device="cuda:0").device,
    "Module.to": lambda: torch.nn.Linear(2, 2).to(torch.device("cuda")).weight.device,
    "Module.to_empty": lambda: torch.nn.Linear(2, 2, device="meta").to_empty(device="cuda").weight.device,
    "Module.cuda": lambda: torch.nn.Linear(2, 2).cuda(0).weight.device,
    "a factory": lambda: torch.randint(0, 5, (3,), device="cuda").device,
    "a factory like": lambda: torch.full_like(torch.ones(2), 3, device="cuda").device,
    "a factory of a module": lambda: torch.nn.Linear(2, 2, device="cuda").weight.device,
    "new_tensor": lambda: torch.ones(2).new_tensor([1.0], device="cuda").device,
    "counted devices": lambda: torch.zeros(1, device=f"cuda:{torch.cuda.device_count() - 1}").device,
    "if available": lambda: torch.zeros(1, device="cuda" if torch.cuda.is_available() else "meta").device,
    "a tensor type of values": lambda: torch.cuda.LongTensor([3]).device,
    "a tensor type of a size": lambda: torch.cuda.FloatTensor(2, 3).device,
    "set_device": lambda: torch.cuda.set_device("cuda:0") or torch.zeros(1).cuda().device,
}


@without_cuda
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_naming_the_device_reaches_the_backends(way, cpu_ref):
    with hal_device():
        assert WAYS[way]().type == "cpu"
    if way != "if available":
        with pytest.raises((AssertionError, RuntimeError, AttributeError, TypeError)):
            WAYS[way]()


def test_questions_about_the_device_are_answered_to_scripts_and_truthfully_to_torch(cpu_ref, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    with hal_device():
        assert torch.cuda.is_available() and torch.cuda.device_count() == 3
        assert torch.cuda.get_device_capability() == (10, 0) and torch.cuda.get_device_name() == "cpu_ref"
        asked = {"__name__": "torch._inductor.anything", "torch": torch}
        exec("answers = torch.cuda.is_available(), torch.cuda.device_count()", asked)
    assert asked["answers"] == (torch.cuda.is_available(), torch.cuda.device_count())


def test_tensor_types_are_those_of_the_device(cpu_ref):
    with hal_device():
        values = torch.cuda.LongTensor([3, 5])
        assert values.tolist() == [3, 5] and isinstance(values, torch.cuda.LongTensor)
        assert not isinstance(values, torch.cuda.IntTensor) and not isinstance([3], torch.cuda.LongTensor)
        shapes = [torch.cuda.HalfTensor(*size).shape for size in ((2, 3), (torch.Size([4]),), ())]
        assert shapes == [(2, 3), (4,), (0,)] and torch.cuda.HalfTensor(2).dtype == torch.float16


def test_events_and_streams_of_a_synchronous_device(cpu_ref):
    with hal_device():
        stream = torch.cuda.Stream()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        with pytest.raises(RuntimeError, match="must be recorded"):
            start.elapsed_time(end)
        start.record()
        torch.cuda.current_stream().wait_event(stream.record_event(end))
        assert end.query() and stream.query() and start.elapsed_time(end) >= 0
        assert isinstance(stream.record_event(), torch.cuda.Event)


def test_compiled_code_still_compiles_for_the_device_that_is_there(cpu_ref):
    with hal_device():
        double = torch.compile(lambda x: torch.zeros(3, device="cuda") + 2 * x, backend="eager")
        assert torch.equal(double(torch.ones(3)), torch.full((3,), 2.0))


def test_split_sizes_may_be_tensors_as_for_nccl(world):
    with hal_device():
        out, sizes = torch.empty(3), torch.tensor([3])
        torch.distributed.all_to_all_single(out, torch.arange(3.0), sizes, sizes)
    assert out.tolist() == [0, 1, 2]


def test_names_are_restored_after_an_error(cpu_ref):
    before = snapshot()
    with pytest.raises(KeyError), hal_device():
        raise KeyError
    assert snapshot() == before


@pytest.mark.parametrize("name", ["torch.cuda.current_device", "torch.zeros", "torch.Tensor.type"])
def test_someone_elses_patch_is_refused_by_name_and_left_alone(name, cpu_ref, monkeypatch):
    owner, attribute = owner_of(name)
    monkeypatch.setattr(owner, attribute, lambda *args: None, raising=False)
    before = snapshot()
    with pytest.raises(HalError, match=rf"{name} is already replaced, by .*test_routing.py:\d+"), hal_device():
        pass
    assert snapshot() == before


def current_device():
    """Its name is torch's, but it wraps a function from one of torch's own files."""


@pytest.mark.parametrize(
    "name, patch, whose",
    [
        ("torch.zeros", len, "builtins.len"),
        ("torch.zeros", torch.ones, "torch._VariableFunctionsClass.ones"),
        ("torch.zeros", np.zeros, "numpy.zeros"),
        ("torch.zeros", torch._refs.zeros, r"torch.*\.py:\d+"),
        ("torch.zeros", functools.partial(torch.zeros, device="cpu"), "a partial"),
        ("torch.zeros", functools.wraps(torch.zeros)(lambda *args: None), r"test_routing.py:\d+"),
        ("torch.Tensor.type", torch.Tensor.cuda, "TensorBase.cuda"),
        ("torch.Tensor.type", str.upper, "str.upper"),
        ("torch.cuda.current_device", torch.cuda.device_count, r"cuda.__init__\.py:\d+"),
        ("torch.cuda.current_device", torch.no_grad()(current_device), r"test_routing.py:\d+"),
        ("torch.cuda.synchronize", torch.mps.synchronize, r"mps.__init__\.py:\d+"),
        ("torch.cuda.default_generators", (torch.default_generator,), "a tuple: "),
        ("torch.cuda.default_generators", [], "a list: "),
        ("torch.cuda.default_generators", ("cuda",), "a tuple: "),
    ],
)
def test_a_patch_that_looks_like_torchs_own_is_refused_too(name, patch, whose, cpu_ref, monkeypatch):
    owner, attribute = owner_of(name)
    monkeypatch.setattr(owner, attribute, patch, raising=False)
    before = snapshot()
    with pytest.raises(HalError, match=f"{name} is already replaced, by .*{whose}"), hal_device():
        pass
    assert snapshot() == before


def test_everything_that_is_routed_is_recognised_as_torchs(cpu_ref):
    with hal_device():
        assert torch.zeros(1, device="cuda").device.type == "cpu"


def test_a_patch_put_over_ours_is_reported_and_left(cpu_ref):
    before = torch.zeros

    def mine(*args):
        return None

    pattern = r"replaced by others in the meantime.*torch.zeros by .*test_routing.py"
    try:
        with pytest.raises(HalError, match=pattern), hal_device():
            torch.zeros = mine
        assert torch.zeros is mine
    finally:
        torch.zeros = before
    assert torch.tensor(1).item() == 1 and "tensor" in repr(torch.tensor)


def test_inside_itself_it_changes_nothing(cpu_ref):
    with hal_device():
        during = snapshot()
        with hal_device():
            assert snapshot() == during
        assert snapshot() == during


def test_an_inner_block_adds_the_names_that_are_missing(cpu_ref):
    own = torch.nn.Module.cuda
    with hal_device(CORE):
        assert torch.nn.Module.cuda is own
        with hal_device():
            assert torch.nn.Module.cuda is not own
    assert torch.nn.Module.cuda is own


def test_blocks_may_overlap_and_the_last_one_restores(cpu_ref):
    before, first, second = snapshot(), hal_device(), hal_device()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.zeros(1, device="cuda").device.type == "cpu"
    second.__exit__(None, None, None)
    assert snapshot() == before


def test_choosing_the_same_backend_again_inside_is_no_other_backend(cpu_ref):
    with hal_device():
        hal.use("cpu_ref")
        with hal_device():
            assert torch.zeros(1, device="cuda").device.type == "cpu"


def test_a_patch_put_over_ours_is_reported_inside_an_except_block_too(cpu_ref):
    before = torch.zeros
    try:
        raise KeyError
    except KeyError:
        with pytest.raises(HalError, match="replaced by others"), hal_device():
            torch.zeros = len
    finally:
        torch.zeros = before


def test_nothing_is_routed_when_a_guard_refuses(cpu_ref, monkeypatch):
    before = snapshot()
    monkeypatch.setattr("hal.model.megatron.guards.importlib.util.find_spec", lambda name: None)
    with pytest.raises(HalError, match="psutil"), hal_device():
        pass
    assert snapshot() == before


class Nvidia(hal.Backend):
    """A backend that reports an NVIDIA device."""

    name = "cuda"

    def probe(self):
        return hal.Probe(True, 1, "pretended")

    def device(self, index=0):
        return torch.device("cuda", index)

    def synchronize(self):
        pass

    def comm(self, ranks=None, *, timeout=600.0):
        return hal.SingleRankComm()


def test_on_an_nvidia_device_nothing_is_routed():
    before = snapshot()
    with hal.activated(Nvidia()), hal_device():
        assert snapshot() == before


def test_tensors_say_what_megatron_core_compares_with_and_casts_still_work(cpu_ref):
    with hal_device():
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1).type(torch.int64).dtype == torch.int64
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_the_trackers_false_alarm_on_the_host_is_dropped(world, caplog):
    with hal_device(), caplog.at_level(logging.WARNING, "megatron.core.tensor_parallel.random"):
        NEEDED_BY["torch.cuda._lazy_call"]()
        logging.getLogger("megatron.core.tensor_parallel.random").warning("another")
    assert [r.getMessage() for r in caplog.records] == ["another"]


def test_float16_module_sees_tensors_of_any_device_by_dtype(cpu_ref):
    from megatron.core.transformer import module

    with hal_device():
        meta = torch.zeros(2, device="meta", dtype=torch.float16)
        assert isinstance(meta, module._HALF_TYPES) and not isinstance(meta, module._FLOAT_TYPES)


def test_the_refusal_stands_before_the_schedule_while_routed(world, monkeypatch):
    """On megatron-core's model in its own wrapper; only the number of stages, two, is simulated."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.pipeline_parallel import schedules

    own = schedules.forward_backward_pipelining_with_interleaving
    with hal_device():
        model_config = config()
        ddp_config = DistributedDataParallelConfig()
        model = [DistributedDataParallel(model_config, ddp_config, chunk) for chunk in chunks(model_config)]
        monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda: 2)
        with pytest.raises(HalError, match="both go to the same process"):
            schedules.forward_backward_pipelining_with_interleaving(
                forward_step_func=None,
                data_iterator=[None],
                model=model,
                num_microbatches=1,
                seq_length=LENGTH,
                micro_batch_size=2,
            )
    assert schedules.forward_backward_pipelining_with_interleaving is own


def test_importing_the_package_imports_no_megatron_core():
    code = "import sys, json, hal.model.megatron\nprint(json.dumps([m for m in sys.modules if m[:8] == 'megatron']))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert json.loads(result.stdout) == []


COMPILED_INSIDE = """
import torch, hal
from hal.model.megatron.cuda_patches import hal_device
hal.use("cpu_ref")
with hal_device():
    torch.compile(lambda x: x + 1, backend="eager")(torch.zeros(2))
compiled = torch.compile(lambda x: x * torch.ones(2), backend="eager", fullgraph=True)
assert compiled(torch.full((2,), 3.0)).tolist() == [3.0, 3.0]
"""


@pytest.mark.slow
def test_functions_that_were_redirected_can_be_compiled_afterwards():
    done = subprocess.run([sys.executable, "-c", COMPILED_INSIDE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
