"""hal why: calls written on the command line, on meta tensors, without the device."""

import pytest
import torch

import hal
from hal.cli.arguments import Parser
from hal.cli.meta_calls import add_call, call


def arguments(op, *options):
    parser = Parser("why")
    add_call(parser)
    args, kwargs = call(op, parser.parse_args(options))
    op.check(op.Call(*args, **kwargs))
    return op.signature.bind(*args, **kwargs).arguments


def test_it_names_the_choice_and_every_refusal(run):
    code, out, _ = run("why", "rms_norm", "--backend", "healthy", "--dtype", "bf16", "--seq-length", "4096")
    assert code == 0
    assert out == (
        "rms_norm(bfloat16[4096, 1, 1024], bfloat16[1024])\n"
        "rms_norm on backend 'healthy':\n"
        "  healthy/fast: refuses: 3 dimensions (the kernel has 2)\n"
        "  healthy/slow: chosen\n"
    )


def test_nobody_accepts(run):
    code, out, _ = run("why", "swiglu", "--backend", "wrong")
    assert code == 1
    assert "wrong/shy: refuses: it is Friday" in out
    assert "reference: not allowed (fallback policy 'error')" in out
    assert run("why", "swiglu", "--backend", "wrong", "--fallback", "reference")[0] == 0


def test_a_pin_is_the_only_candidate(run):
    code, out, _ = run("why", "rms_norm", "--backend", "healthy", "--pin", "healthy/fast")
    assert code == 1
    assert "healthy/slow" not in out


def test_it_answers_where_the_device_is_absent(run):
    code, out, err = run("why", "rms_norm", "--backend", "absent")
    assert code == 0
    assert "healthy/slow: chosen" in out
    assert "cannot run here: no such card in this machine" in err


def test_two_backends_stand_side_by_side(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = run("why", "rms_norm", "--backends", "healthy,absent,wrong")
    assert code == 0
    call_line, head, first, *_ = out.splitlines()
    assert call_line.startswith("rms_norm(float32[")
    names = ("healthy", "absent", "wrong")
    assert [c.strip() for c in head.split("|")] == [f"{name}: runs on healthy/slow" for name in names]
    assert first.count("|") == 2
    assert all(len(line) <= 100 for line in out.splitlines()[1:])
    assert "absent' cannot run here: no such card" in err


def test_a_backend_that_refuses_is_seen_beside_one_that_does_not(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    code, out, _ = run("why", "swiglu", "--backends", "wrong,cpu_ref")
    assert code == 1
    rows = [[cell.strip() for cell in line.split("|")] for line in out.splitlines()[1:]]
    assert rows[0] == ["wrong: refused", "cpu_ref: runs on cpu_ref/c"]
    assert rows[1] == ["wrong/shy: refuses: it is Friday", "cpu_ref/c: chosen"]


def test_simulate_is_for_those_that_have_a_simulator(run):
    assert run("why", "swiglu", "--backends", "cuda,cpu_ref", "--simulate")[0] == 0


@pytest.mark.parametrize("backends", ["healthy", "healthy,healthy", ""])
def test_one_backend_is_no_comparison(run, backends):
    code, _, err = run("why", "rms_norm", "--backends", backends)
    assert code == 2
    assert "compares two or more" in err


@pytest.mark.parametrize("op", list(hal.OPS.values()), ids=lambda op: op.name)
def test_every_op_has_a_valid_default_call_on_meta_tensors(op):
    bound = arguments(op, "--dtype", "bf16")
    tensors = [v for v in bound.values() if isinstance(v, torch.Tensor)]
    assert all(t.is_meta for t in tensors)


@pytest.mark.parametrize("layout", ["SBH", "BSH", "SBND", "BSND", "BNSD", "TND"])
def test_attention_in_every_layout(layout):
    options = ("--layout", layout, "--micro-batch-size", "2", "--seq-length", "8", "--kv-length", "16",
               "--num-attention-heads", "4", "--num-query-groups", "2", "--head-dim", "32")  # fmt: skip
    latent = arguments(hal.ops.flash_attention, *options, "--v-head-dim", "16")
    assert latent["k"].numel() == 2 * latent["v"].numel() == 2 * 16 * 2 * 32
    bound = arguments(hal.ops.flash_attention, *options)
    assert bound["v"].shape == bound["k"].shape
    assert bound["q"].numel() == 2 * 8 * 4 * 32
    assert bound["k"].numel() == 2 * 16 * 2 * 32


def test_any_parameter_can_be_given():
    bound = arguments(
        hal.ops.scale_mask_softmax, "--arg", "x=2x3x4x5", "--arg", "mask=4x5:bool", "--arg", "causal=True"
    )
    assert tuple(bound["x"].shape) == (2, 3, 4, 5)
    assert bound["mask"].dtype == torch.bool
    assert bound["causal"] is True
    bound = arguments(hal.ops.dropout, "--arg", "rng=7:8", "--arg", "p=0.5")
    assert (bound["rng"], bound["p"]) == (hal.Rng(7, 8), 0.5)
    bound = arguments(hal.ops.l2norm, "--arg", "tensors=3,4x5:bf16")
    assert [(tuple(t.shape), t.dtype) for t in bound["tensors"]] == [((3,), torch.float32), ((4, 5), torch.bfloat16)]
    assert arguments(hal.ops.bias_gelu, "--arg", "approximate=fast", "--arg", "bias=None")["bias"] is None


@pytest.mark.parametrize(
    "argv, text",
    [
        (["softmax"], "no op is called 'softmax'"),
        (["rms_norm", "--arg", "x"], "write NAME=VALUE with NAME among x, weight, eps"),
        (["rms_norm", "--arg", "scale=2"], "write NAME=VALUE with NAME among x, weight, eps"),
        (["rms_norm", "--arg", "x=2y3"], "a tensor is 2x16x64 or 4x4:bool"),
        (["rms_norm", "--arg", "x=2:float"], "a tensor is 2x16x64 or 4x4:bool"),
        (["rms_norm", "--hidden-size", "-5"], "sizes must be at least 0"),
        (["rms_norm", "--seq-length", "9" * 20], "sizes must be at least 0, and the total below 2**63"),
        (["rms_norm", "--arg", "eps=small"], "rms_norm: expected eps: float; found str"),
        (["embedding", "--arg", "comm=3"], "embedding: expected comm: Comm | None; found int"),
        (["philox_uniform", "--arg", "shape=3"], "philox_uniform: expected shape: Sequence[int]; found int"),
        (["dropout", "--arg", "rng=a"], "an Rng is SEED or SEED:OFFSET"),
        (["rms_norm", "--arg", "weight=3"], "rms_norm: expected weight of shape"),
        (["flash_attention", "--layout", "XYZ"], "use the letters of"),
        (["rms_norm", "--pin", "nobody"], "backend 'healthy' has healthy/fast, healthy/slow, reference"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(run, argv, text):
    code, _, err = run("why", *argv, "--backend", "healthy")
    assert code == 2
    assert text in err
    assert err.count("\n") == 1
