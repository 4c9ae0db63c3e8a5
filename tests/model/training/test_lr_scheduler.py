"""Learning-rate schedules against their formulas."""

import math

import pytest

from hal.model.config.schema import Config
from hal.model.training.lr_scheduler import LRScheduler, weight_decay

P, F, W, D = 1.0, 0.1, 10, 110


@pytest.mark.parametrize(
    "style, formula",
    [
        ("constant", lambda t: P),
        ("linear", lambda t: P - (P - F) * (t - W) / (D - W)),
        ("cosine", lambda t: F + (P - F) * (1 + math.cos(math.pi * (t - W) / (D - W))) / 2),
        ("inverse-square-root", lambda t: max(F, P * math.sqrt(W / t))),
    ],
)
def test_decays(style, formula):
    schedule = LRScheduler(P, F, style, W, D)
    for t in range(W + 1, D + 1):
        assert schedule.lr(t) == pytest.approx(formula(t), abs=1e-12)
    if style in ("linear", "cosine"):
        assert schedule.lr(D) == pytest.approx(F) and schedule.lr(D + 50) == F


def test_warm_up_is_linear_and_meets_the_decay():
    schedule = LRScheduler(P, F, "cosine", W, D, initial=0.2)
    assert [schedule.lr(t) for t in (0, 5, 10)] == pytest.approx([0.2, 0.6, 1.0])
    assert schedule.lr(W + 1) < P


@pytest.mark.parametrize(
    "style, left",
    [
        ("linear", lambda r: 1 - r),
        ("cosine", lambda r: (1 + math.cos(math.pi * r)) / 2),
        ("exponential", lambda r: 2 * 0.5**r - 1),
        ("minus_sqrt", lambda r: 1 - math.sqrt(r)),
    ],
)
def test_wsd_is_flat_then_falls(style, left):
    schedule = LRScheduler(P, F, "WSD", W, D, wsd_style=style, wsd_decay=20)
    assert {schedule.lr(t) for t in range(W, D - 20 + 1)} == {P}
    for t in range(D - 20, D + 1):
        assert schedule.lr(t) == pytest.approx(F + (P - F) * left((t - (D - 20)) / 20))


def deepspeed(kind, step, shape, initial):
    """The learning rate of a step by lr_schedules.py and engine.py of DeepSpeed 0.16 and later, of rates P and F."""
    last = step - 1  # the engine steps the schedule after each step of the optimizer
    if last < 0:
        return 0.0 if kind == "WarmupCosineLR" else initial
    if last < W:
        return initial + (P - initial) * (last / W if shape == "linear" else math.log(last + 1) / math.log(W))
    if kind == "WarmupLR":
        return P
    if kind == "WarmupDecayLR":
        return initial + (P - initial) * max(0.0, (D - last) / (D - W))
    return F + (P - F) * (1 + math.cos(math.pi * min(1.0, (last - W + 1) / (D - W)))) / 2


@pytest.mark.parametrize("initial", [0.0, 0.25])
@pytest.mark.parametrize("shape", ["linear", "log"])
@pytest.mark.parametrize(
    "kind, style", [("WarmupLR", "constant"), ("WarmupDecayLR", "linear"), ("WarmupCosineLR", "cosine")]
)
def test_schedules_of_deepspeed(kind, style, shape, initial):
    final = initial if kind == "WarmupDecayLR" else F
    schedule = LRScheduler(P, final, style, 8 * W, 8 * D, initial, warmup_style=f"deepspeed_{shape}", step_size=8)
    for step in range(D + 5):
        assert schedule.lr(8 * step) == pytest.approx(deepspeed(kind, step, shape, initial), abs=1e-12), step


def test_deepspeeds_warm_up_has_two_steps_at_least():
    config = Config(lr=1e-3, lr_warmup_iters=1, lr_warmup_style="deepspeed_log", lr_decay_style="constant")
    size = config.global_batch_size
    schedule = LRScheduler.of(config)
    assert [schedule.lr(n * size) for n in range(4)] == [0.0, 0.0, 1e-3, 1e-3]


def test_a_warm_up_of_one_step_and_none():
    assert [LRScheduler(P, F, "linear", 1, D, initial=0.2).lr(t) for t in (0, 1)] == [0.2, P]
    for style in ("constant", "linear", "cosine", "inverse-square-root", "WSD"):
        assert LRScheduler(P, F, style, 0, D, wsd_decay=20).lr(0) == pytest.approx(P), style
    # Counted from the first step, which has the peak rate, as has the second; there is no division by sqrt(0).
    assert [LRScheduler(P, F, "inverse-square-root", 0, D).lr(t) for t in (1, 4, 25)] == pytest.approx(
        [P, P / 2, P / 5]
    )


def test_after_the_decay():
    assert [LRScheduler(P, F, "cosine", W, W).lr(t) for t in (W, W + 1)] == [P, F], "a warm-up and no decay"
    for style in ("linear", "cosine", "inverse-square-root", "WSD"):
        assert LRScheduler(P, F, style, W, D, wsd_decay=20).lr(D + 1) == F
    assert LRScheduler(P, F, "constant", W, D).lr(D + 1) == P
    assert LRScheduler(P, F, "inverse-square-root", W, 10**6).lr(10**5) == F, "never below"
    assert [LRScheduler(P, F, "WSD", W, D).lr(t) for t in (D, D + 1)] == [P, F], "no steps to fall in"


def test_a_config_gives_each_number_its_place():
    options = {"lr_decay_style": "WSD", "lr_wsd_decay_style": "minus_sqrt", "lr_wsd_decay_iters": 30}
    options |= {"lr_warmup_style": "deepspeed_log"}
    config = Config(lr=3e-3, min_lr=2e-4, lr_decay_iters=90, lr_warmup_iters=7, lr_warmup_init=1e-5, **options)
    # In sequences: 4 per step by default.
    expected = LRScheduler(3e-3, 2e-4, "WSD", 28, 360, 1e-5, "minus_sqrt", 120, "deepspeed_log", 4)
    assert LRScheduler.of(config) == expected
    plain = LRScheduler.of(Config(lr=3e-3, lr_decay_iters=90))
    assert plain == LRScheduler(3e-3, 0.0, plain.style, 0, 360, initial=0.0, wsd_decay=0, step_size=4)
    assert (LRScheduler(P, F, "WSD", W, D).initial, LRScheduler(P, F, "WSD", W, D).wsd_decay) == (0.0, 0)


MEGATRON = [(style, "linear") for style in ("constant", "linear", "cosine", "inverse-square-root")]
MEGATRON += [("WSD", wsd) for wsd in ("exponential", "linear", "cosine", "minus_sqrt")]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("warmup", [0, 10])
@pytest.mark.parametrize("style, wsd", MEGATRON)
def test_every_step_has_megatrons_rate(style, wsd, warmup):
    module = pytest.importorskip("megatron.core.optimizer_param_scheduler", reason="megatron-core is missing")
    group = {"lr": 0.0, "weight_decay": 0.0}
    optimizer = type("Optimizer", (), {"param_groups": [group]})()
    theirs = module.OptimizerParamScheduler(
        optimizer, 0.05, P, F, warmup, D, style, 0.0, 0.0, 1, "constant", wsd_decay_steps=20, lr_wsd_decay_style=wsd
    )
    ours = LRScheduler(P, F, style, warmup, D, 0.05, wsd, 20)
    for step in range(D + 10):
        assert ours.lr(step) == pytest.approx(theirs.get_lr(group), rel=1e-12), step
        theirs.step(1)


def test_a_constant_weight_decay_has_no_ramp():
    assert weight_decay(Config(weight_decay=0.25, start_weight_decay=0.5, end_weight_decay=1.0), 4) == 0.25


@pytest.mark.parametrize("style", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("in_samples", [False, True])
def test_schedules_of_a_config_are_megatrons(style, in_samples):
    """Learning rates, also of the embedding, and weight decay, against megatron-core's OptimizerParamScheduler."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    c = Config(
        **({"train_samples": 103, "lr_decay_samples": 90} if in_samples else {"train_iters": 20, "lr_decay_iters": 18}),
        global_batch_size=5,
        micro_batch_size=5,
        lr=0.1,
        min_lr=0.01,
        lr_warmup_fraction=0.07,
        lr_decay_style="cosine",
        decoupled_lr=0.3,
        decoupled_min_lr=0.02,
        weight_decay=0.25,
        weight_decay_incr_style=style,
        **({} if style == "constant" else {"start_weight_decay": 0.25, "end_weight_decay": 1.0}),
    )
    group, own = {"wd_mult": 1.0}, {"wd_mult": 1.0, "max_lr": 0.3, "min_lr": 0.02}
    theirs = OptimizerParamScheduler(
        type("Optimizer", (), {"param_groups": [group, own]})(),
        init_lr=0.0,
        max_lr=0.1,
        min_lr=0.01,
        lr_warmup_steps=0.07 * 90,
        lr_decay_steps=90,
        lr_decay_style="cosine",
        start_wd=0.25,
        end_wd=0.25 if style == "constant" else 1.0,
        wd_incr_steps=103 if in_samples else 100,
        wd_incr_style=style,
    )
    ours, decoupled = LRScheduler.of(c), LRScheduler.of(c, decoupled=True)
    for done in range(0, 121, 5):
        assert (ours.lr(done), decoupled.lr(done)) == pytest.approx((group["lr"], own["lr"]), abs=1e-15)
        assert weight_decay(c, done) == pytest.approx(group["weight_decay"], abs=1e-15)
        theirs.step(5)
