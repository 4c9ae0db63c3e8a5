"""The backend without a device: importing and probing are safe, and each missing requirement has its own reason."""

from __future__ import annotations

import pytest
import torch
from cuda_helpers import run_python

import hal
from hal import ops
from hal.backends.cuda import Cuda, compile, device, launch, order
from hal.backends.cuda.comm import NCCL
from hal.profiling import Recorder


def probe_of(monkeypatch, *, cuda="13.0", driver=True, count=1, cupy=True):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(device, "_has_driver", lambda: driver)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(compile, "missing", lambda: "" if cupy else "CuPy is not installed")
    return Cuda(simulate=False).probe()


@pytest.mark.parametrize(
    ("setup", "reason"),
    [
        ({"cuda": None}, "built without CUDA"),
        ({"driver": False}, "no NVIDIA driver"),
        ({"count": 0}, "shows no device"),
        ({"cupy": False}, "CuPy is not installed"),
    ],
)
def test_each_missing_thing_has_its_own_reason(monkeypatch, setup, reason):
    probe = probe_of(monkeypatch, **setup)
    assert (probe.ok, probe.count) == (False, 0)
    assert reason in probe.reason


def test_the_probe_counts_devices_and_says_whether_the_order_was_measured(monkeypatch):
    probe = probe_of(monkeypatch, count=2)
    assert (probe.ok, probe.count) == (True, 2)
    assert "an estimate for sm_80" in probe.facts["attention order"]


def test_a_probe_that_meets_a_broken_installation_does_not_raise(monkeypatch):
    def broken():
        raise OSError("libcuda.so.1: file too short")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device, "_has_driver", broken)
    assert "file too short" in Cuda(simulate=False).probe().reason


def test_using_it_without_a_device_says_why_and_what_helps(monkeypatch):
    monkeypatch.delenv("HAL_SIMULATE", raising=False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(hal.BackendUnavailable, match=r"built without CUDA.*simulate=True"):
        hal.use("cuda")


def test_importing_loads_no_vendor_package_and_initialises_nothing():
    code = (
        "import hal.autoload, sys, torch\n"
        "before = set(sys.modules)\n"
        "import hal.backends.cuda\n"
        "assert not {'cupy', 'triton', 'cuda'} & (set(sys.modules) - before), 'a vendor package was imported'\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    done = run_python(code)
    assert done.returncode == 0, done.stderr


def test_the_environment_chooses_the_simulator(monkeypatch):
    for value, simulated in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("HAL_SIMULATE", value)
        assert Cuda().simulated is simulated
    assert Cuda(simulate=False).simulated is False


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("dtype", "how", "chosen", "message"),
    [
        (torch.bfloat16, {"next_tokens": 0}, "cuda/flash", "accepts"),
        (torch.bfloat16, {"pre_tokens": 128, "next_tokens": 0}, "cuda/flash", "cudnn takes none, or causal squares"),
        (torch.float32, {"next_tokens": 0}, "cuda/sdpa", "flash takes bfloat16 and float16"),
        (torch.bfloat16, {"dropout_p": 0.1, "rng": hal.Rng(1)}, "cuda/fused", "HAL's are the same on every backend"),
        (torch.bfloat16, {"next_tokens": -1}, "cuda/sdpa", "reads a negative side as unbounded"),
    ],
)
def test_why_explains_its_choice_without_a_device(no_engine, dtype, how, chosen, message):
    q = meta(2, 256, 8, 64, dtype=dtype)
    with hal.activated(Cuda(simulate=False)):
        why = hal.why(ops.flash_attention, q, q, q, layout="BSND", **how)
    assert why.chosen == chosen
    assert message in str(why)


def test_a_tensor_elsewhere_is_refused_by_name(no_engine):
    x = torch.randn(4, 8)
    with hal.activated(Cuda(simulate=False)), pytest.raises(hal.ContractError, match="x is on cpu"):
        ops.swiglu(x)


IDS = {i.id for i in Cuda.impls["flash_attention"]}


def test_the_order_follows_a_measurement_of_this_device(measured):
    rows = order.orders("NVIDIA Test", "sm_80")
    assert rows["square"] == rows["window"] == ("cuda/sdpa", "cuda/flash") and rows["packed"] == ("cuda/unfused",)
    assert order.orders("NVIDIA Other", "sm_80") != rows


@pytest.fixture
def measured(monkeypatch):
    """The table with a measurement of "NVIDIA Test", in which classes without one have the order of squares."""
    table = dict(order._table())
    table["measured"] = {"NVIDIA Test": {"square": ["cuda/sdpa", "cuda/flash"], "packed": ["cuda/unfused"]}}
    monkeypatch.setattr(order, "_table", lambda: table)


@pytest.mark.parametrize(
    ("architecture", "known"),
    [
        ("sm_80", "sm_80"),
        ("sm_89", "sm_80"),
        ("sm_90", "sm_90"),
        ("sm_100", "sm_100"),
        ("sm_120", "sm_100"),
        ("", "sm_80"),
        ("sm_75", "sm_80"),
    ],
)
def test_an_architecture_has_the_estimate_of_the_newest_known_one_before_it(architecture, known):
    assert f"an estimate for {known}; X" in order.source_for("X", architecture)
    rows = order.orders("X", architecture)
    assert rows == order.orders("X", known) and rows.keys() == set(order.CLASSES)
    assert all(set(ids) == IDS and len(ids) == len(IDS) and ids[-1] not in ids[:-1] for ids in rows.values())


@pytest.mark.parametrize(("count", "listed", "index"), [(8, None, 3), (1, None, 0), (8, "4,5,6,7", 7)])
def test_a_communicator_is_on_the_device_of_this_process(monkeypatch, count, listed, index):
    """A launcher may make only one device visible to each process; process 3 then has no device 3."""
    probe_of(monkeypatch, count=count)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.delenv("HAL_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("HAL_DEVICES", listed)
    places = []
    monkeypatch.setattr(torch.cuda, "set_device", places.append)
    monkeypatch.setattr(hal, "torch_comm", lambda transport, ranks, *, timeout, device, kind: device)
    assert Cuda(simulate=False).comm() == torch.device("cuda", index)
    assert places == [torch.device("cuda", index)]


def test_nccl_declares_what_it_lacks():
    assert NCCL.backend == "nccl"
    assert not NCCL.refuse("all_reduce", torch.bfloat16, "avg")
    assert "rounds" in NCCL.refuse("all_reduce", torch.int64, "avg")[0]
    assert "complex" in NCCL.refuse("all_gather", torch.complex64, None)[0]
    assert NCCL.carry[torch.bool][0] is torch.int32


def test_memory_and_clocks_are_refused_on_the_simulator(simulated):
    assert not simulated.capabilities().memory_pools
    with pytest.raises(hal.HalError, match="has no memory pools"), simulated.memory_pool():
        pass
    assert simulated.event() is None and simulated.memory_stats() == {}
    with simulated.stream(), simulated.profile_range("work"):
        pass
    with pytest.raises(hal.HalError, match="one device"):
        simulated.device(1)


def test_limits_of_the_simulated_device(monkeypatch):
    """They are options, so that the code of a failed call repeats it on the same device."""
    monkeypatch.delenv("HAL_SIMULATE", raising=False)
    assert Cuda(simulate=True, grid=2, shared=0).options()["grid"] == 2
    with pytest.raises(hal.HalError, match="need simulate=True"):
        Cuda(grid=2)
    with pytest.raises(hal.HalError, match="must be 1 or more"):
        Cuda(simulate=True, grid=0)


def test_why_says_where_the_order_of_attention_comes_from(measured):
    q = torch.empty(2, 4, 8, 64, dtype=torch.bfloat16, device="meta")
    backend = Cuda(simulate=False)
    with hal.activated(backend):
        assert "estimate for sm_80; this device was not measured" in str(
            hal.why(ops.flash_attention, q, q, q, layout="BNSD")
        )
        backend.set_attention_order("NVIDIA Test", "sm_90")
        assert str(hal.why(ops.flash_attention, q, q, q, layout="BNSD")).endswith("order: measured on NVIDIA Test")
        assert "order:" not in str(hal.why(ops.swiglu, q))


class SeveralGpus:
    """An engine on a machine with several devices."""

    device_type, multiprocessors, max_blocks = "cuda", 1, 1 << 30


def test_draws_are_made_on_the_given_or_the_current_device(monkeypatch):
    monkeypatch.setattr(launch, "_engine", SeveralGpus())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    places, real = [], torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, dtype, device: places.append(str(device)) or real(shape))
    (impl,) = Cuda.impls["philox_uniform"]
    with hal.activated(Cuda(simulate=False)):
        for device in (None, torch.device("cuda:0"), torch.device("cuda:1")):
            assert not impl.refusals(impl.op.Call((0,), hal.Rng(1), device=device))
            impl.call((0,), hal.Rng(1), device=device)
    assert places == ["cuda:1", "cuda:0", "cuda:1"]


def test_draws_on_the_simulator_are_the_cpus(simulated):
    assert ops.philox_uniform((3,), hal.Rng(1)).device.type == "cpu"


def test_a_profile_times_the_backward_that_torch_makes(simulated):
    """cuda/torch has no backward of its own: autograd makes several nodes, which are one call."""
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((4, 8), (6, 8), (6,)))
    with Recorder(simulated) as recorder:
        hal.ops.linear(x, weight, bias).sum().backward()
    rows = {row["direction"]: row for row in recorder.rows()}
    assert rows["backward"]["implementation"] == "cuda/torch" and rows["backward"]["calls"] == 1
    assert rows["backward"]["flops"] == 2 * rows["forward"]["flops"] == 2 * 2 * 4 * 8 * 6
