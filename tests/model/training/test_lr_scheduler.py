"""Learning-rate schedules against their formulas, and the loss scaler against its rules."""

import math

import pytest

from hal.model.optimizer import LossScaler
from hal.model.schedule import Schedule

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
    schedule = Schedule(P, F, style, W, D)
    for t in range(W + 1, D + 1):
        assert schedule.lr(t) == pytest.approx(formula(t), abs=1e-12)
    if style in ("linear", "cosine"):
        assert schedule.lr(D) == pytest.approx(F) and schedule.lr(D + 50) == F


def test_warm_up_is_linear_and_meets_the_decay():
    schedule = Schedule(P, F, "cosine", W, D, initial=0.2)
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
    schedule = Schedule(P, F, "WSD", W, D, wsd_style=style, wsd_decay=20)
    assert {schedule.lr(t) for t in range(W, D - 20 + 1)} == {P}
    for t in range(D - 20, D + 1):
        assert schedule.lr(t) == pytest.approx(F + (P - F) * left((t - (D - 20)) / 20))


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
    ours = Schedule(P, F, style, warmup, D, 0.05, wsd, 20)
    for step in range(D + 10):
        assert ours.lr(step) == pytest.approx(theirs.get_lr(group), rel=1e-12), step
        theirs.step(1)


def test_the_loss_scale_halves_after_hysteresis_and_doubles_after_the_window():
    scaler = LossScaler(64.0, True, minimum=16.0, window=3, hysteresis=2, hysteresis_left=2)
    scales = []
    for overflow in [1, 1, 1, 1, 0, 0, 0, 1, 0, 0, 0]:
        scaler.update(bool(overflow))
        scales.append(scaler.scale)
    # two overflows to the first halving, then each one, never below 16; three good steps double and restore patience
    assert scales == [64, 32, 16, 16, 16, 16, 32, 32, 32, 32, 64]
