"""Every layout trains like one process: losses of 10 steps within 1e-5, gradient norms within 1e-4."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from parallel_runs import (
    CP2,
    DISTRIBUTED_OPTIMIZER,
    DOCUMENTS,
    DROPOUT,
    GPT2,
    HYBRID,
    INTERLEAVED,
    LATENT_DENSE,
    LLAMA,
    PP2,
    PP4,
    RECOMPUTE,
    SCALED,
    SP,
    TP2,
    TP4,
    ULYSSES,
    ZBV,
    close,
    on,
    trainer,
)

import hal
from hal.testing import Spy
from hal.testing.processes import run_processes

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, TP2),
    "tp2-sp": (2, {**TP2, **SP}),
    "tp4": (4, TP4),
    "pp2": (2, PP2),
    "pp2-interleaved": (2, INTERLEAVED),
    "pp2-zero-bubble": (2, ZBV),
    "pp2-uneven": (2, {**PP2, "num_layer_list": ("1", "3")}),
    "pp2-interleaved-uneven": (2, {**PP2, "num_layer_list": ("0", "2", "1", "1")}),
    "pp4": (4, PP4),
    "dp2": (2, {}),
    "dp2-overlap": (2, {"overlap_grad_reduce": True, "ddp_bucket_size": 3000}),
    "dp2-distributed-optimizer": (2, DISTRIBUTED_OPTIMIZER),
    "dp2-zero2": (2, {"zero_stage": 2}),
    "dp2-zero3": (2, {"zero_stage": 3}),
    "cp2-ring": (2, CP2),
    "cp2-ulysses": (2, ULYSSES),
    "cp4-hybrid": (4, HYBRID),
    "tp2-pp2": (4, {**TP2, **PP2}),
    "tp2-dp2": (4, TP2),
    "tp2-sp-pp2-interleaved": (4, {**TP2, **SP, **INTERLEAVED}),
    "tp2-sp-cp2": (4, {**TP2, **SP, **CP2}),
    "cp2-zero3-dp2": (4, {**CP2, "zero_stage": 3}),
    "pp2-zero-bubble-zero2": (4, {**ZBV, "zero_stage": 2}),
    "cp2-pp2": (4, {**CP2, **PP2}),
    "tp2-pp2-dp2": (8, {**TP2, **PP2}),
}
QUICK = {"pp2-interleaved", "dp2-zero3"}
SHAPES = (("gpt2", GPT2), ("llama", LLAMA))
NIGHTLY = pytest.mark.nightly


def _one_shape_each(names: Iterable[str]) -> dict[str, str]:
    """The shape in which CI runs a layout: the shapes alternate, and the other one runs every night."""
    return {name: SHAPES[i % 2][0] for i, name in enumerate(names)}


@functools.cache
def _one(options: str, count: int) -> list[Any]:
    return on(1, json.loads(options), count)


def one_process(options: dict[str, Any], count: int = 10) -> list[Any]:
    return _one(json.dumps(options), count)


def _cases() -> list[Any]:
    cases = []
    shape_in_ci = {**_one_shape_each(LAYOUTS), **dict.fromkeys(QUICK, "gpt2")}
    for shape, base in (*SHAPES, ("latent", LATENT_DENSE)):
        for dropout in (False, True):
            for name, (world, layout) in LAYOUTS.items():
                label = f"{shape}-{name}" + ("-dropout" if dropout else "")
                # With dropout, the same code paths run and also generate masks; the remaining cases run every night.
                in_ci = dropout and (shape == shape_in_ci[name] or (shape, name) == ("latent", "tp2"))
                marks = NIGHTLY if not in_ci else () if name in QUICK and shape != "latent" else pytest.mark.slow
                cases.append(pytest.param(base | (DROPOUT if dropout else {}), world, layout, id=label, marks=marks))
    return cases


@pytest.mark.parametrize("base, world, layout", _cases())
def test_a_layout_trains_as_one_process(base: dict[str, Any], world: int, layout: dict[str, Any]) -> None:
    close(on(world, {**base, **layout}), one_process(base), 1e-5, 1e-4)


FUSED_LOSS = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}


FUSED = ("tp2", "tp2-sp", "pp2", "pp2-zero-bubble", "dp2-zero2", "dp2-zero3", "cp2-ring", "tp2-pp2-dp2")


def _both_shapes(names: Sequence[str], quick: str) -> list[Any]:
    """(options of the model, ranks, options of the layout) of both model shapes; only "gpt2-" + quick is not slow."""
    cases = []
    shape_in_ci = {**_one_shape_each(names), quick: "gpt2"}
    for shape, base in SHAPES:
        for name in names:
            marks = NIGHTLY if shape != shape_in_ci[name] else () if name == quick else pytest.mark.slow
            cases.append(pytest.param(base, *LAYOUTS[name], id=f"{shape}-{name}", marks=marks))
    return cases


@pytest.mark.parametrize("base, world, layout", _both_shapes(FUSED, "tp2"))
def test_with_the_output_layer_fused_into_the_loss_it_trains_as_one_process_without(
    base: dict[str, Any], world: int, layout: dict[str, Any]
) -> None:
    documents = {**base, **DOCUMENTS}
    close(on(world, {**documents, **FUSED_LOSS, **layout}, 5), one_process(documents, 5), 1e-5, 1e-4)


def _loss_ops(options: dict[str, Any]) -> set[str]:
    """The ops with cross entropy in their names that a step and an evaluation call on this rank."""
    run = trainer(options)
    with hal.activated(Spy(hal.backend())) as spy:
        run.step()
        run.evaluate()
    return {name for name in spy.counts() if "cross_entropy" in name}


@pytest.mark.parametrize("options, op", [({}, "cross_entropy"), (FUSED_LOSS, "linear_cross_entropy")])
def test_the_option_decides_which_op_computes_the_loss(options: dict[str, Any], op: str) -> None:
    assert _loss_ops({**GPT2, "eval_interval": 1, "eval_iters": 1, **options}) == {op}


def _evaluations(options: dict[str, Any]) -> list[float]:
    """The validation loss before and after a step: torch's pipelines switch between evaluation and training."""
    run = trainer(options)
    first = run.evaluate()
    run.step()
    return [first, run.evaluate()]


def _marked(slow: Sequence[str], nightly: Sequence[str]) -> list[Any]:
    """Names as parameters of slow and of nightly tests."""
    return [pytest.param(n, marks=pytest.mark.slow) for n in slow] + [pytest.param(n, marks=NIGHTLY) for n in nightly]


@pytest.mark.parametrize(
    "name",
    [
        "pp2-zero-bubble",
        *_marked(["tp2-sp", "dp2-zero3", "cp2-ring"], ["pp2", "pp2-interleaved", "pp2-zero-bubble-zero2"]),
    ],
)
def test_a_layout_evaluates_as_one_process(name: str) -> None:
    world, layout = LAYOUTS[name]
    base = {**GPT2, **DROPOUT, "eval_interval": 1, "eval_iters": 2}
    one = _evaluations(base)
    for values in run_processes(world, _evaluations, {**base, **layout}):
        assert values == pytest.approx(one, rel=1e-5)


def _sums(options: dict[str, Any]) -> int:
    """How many products of one step are accumulated into earlier gradients on this rank."""
    run = trainer(options)
    with hal.activated(Spy(hal.backend())) as spy:
        run.forward_backward()
    return spy.counts().get("linear_wgrad", 0)


@pytest.mark.parametrize("name", ["dp2", "tp2-sp", *_marked(["dp2-overlap", "pp2"], ["dp2-distributed-optimizer"])])
def test_where_products_add_to_the_gradients_of_the_microbatches_before(name: str) -> None:
    world, layout = LAYOUTS[name]
    microbatches = GPT2["global_batch_size"] // (2 if name.startswith("dp2") else 1)
    products = 4 * GPT2["num_layers"] + 1
    expected = products * (microbatches - 1) if name in ("dp2", "tp2-sp") else 0
    assert run_processes(world, _sums, {**GPT2, **layout}) == [expected] * world


@functools.cache
def _with_dropout(name: str, count: int) -> list[Any]:
    world, layout = LAYOUTS[name]
    return on(world, {**GPT2, **DROPOUT, **layout}, count)


def _recomputed() -> list[Any]:
    """Both kinds of recomputation on every layout, of which CI runs one each."""
    in_ci = {
        "tp2-sp": "full",
        "pp2": "selective",
        "pp2-zero-bubble": "full",
        "dp2-zero3": "selective",
        "cp2-ring": "full",
    }
    return [
        pytest.param(name, how, marks=pytest.mark.slow if how == chosen else NIGHTLY)
        for name, chosen in in_ci.items()
        for how in ("full", "selective")
    ]


@pytest.mark.parametrize("name, how", _recomputed())
def test_recomputation_changes_nothing_bit_for_bit(name: str, how: str) -> None:
    world, layout = LAYOUTS[name]
    again = RECOMPUTE if how == "full" else {"recompute_granularity": "selective"}
    assert on(world, {**GPT2, **DROPOUT, **layout, **again}, 4) == _with_dropout(name, 4)


@pytest.mark.parametrize(
    "name", _marked(["tp2", "pp2-zero-bubble", "dp2-zero3"], ["pp2", "dp2-overlap", "cp2-ring", "tp2-pp2"])
)
def test_bfloat16_within_its_own_tolerance(name: str) -> None:
    """Partial sums of a sharded matrix product are each rounded to 8 bits: 2^-8 relative, averaged by the losses."""
    world, layout = LAYOUTS[name]
    base = {**GPT2, "bf16": True, "lr": 1e-3}
    close(on(world, {**base, **layout}), one_process(base), 2**-8, 2**-5)


@pytest.mark.parametrize("name", _marked(["pp2-interleaved"], ["tp2-sp", "pp2-zero-bubble", "dp2-zero3", "cp2-ring"]))
def test_a_float32_residual_stream_within_the_same_tolerance(name: str) -> None:
    world, layout = LAYOUTS[name]
    base = {**LLAMA, "bf16": True, "fp32_residual_connection": True, "lr": 1e-3, **DROPOUT}
    close(on(world, {**base, **layout}, 5), one_process(base, 5), 2**-8, 2**-5)


@pytest.mark.nightly
@pytest.mark.parametrize("precision", [{}, {"bf16": True}, {"fp16": True, "initial_loss_scale": 2.0**10}])
@pytest.mark.parametrize("name", ["dp2", "tp2-dp2", "pp2-interleaved", "cp2-ring", "tp2-sp"])
def test_the_distributed_optimizer_has_the_losses_of_one_process_in_every_dtype(
    name: str, precision: dict[str, Any]
) -> None:
    world, layout = LAYOUTS[name]
    world *= 1 if "dp2" in name or "cp2" in name else 2  # two ranks that share the optimizer's state
    base = {**LLAMA, **precision, "lr": 1e-3}
    losses, norms = (2**-8, 2**-5) if precision else (1e-5, 1e-4)
    close(on(world, {**base, **layout, **DISTRIBUTED_OPTIMIZER}, 5), one_process(base, 5), losses, norms)


@pytest.mark.parametrize("name", _marked(["dp2-zero2", "pp2-zero-bubble"], ["dp2", "tp2-pp2"]))
def test_every_rank_skips_the_step_that_overflows(name: str) -> None:
    """The initial scale is a few powers of two too large, so the first steps are skipped on all ranks."""
    world, layout = LAYOUTS[name]
    base = {**GPT2, "fp16": True, "initial_loss_scale": 2.0**21, "hysteresis": 1, "lr": 1e-3}
    want = one_process(base)
    assert [n is None for _, n in want].count(True) in range(1, 9), "the test needs skipped and taken steps"
    close(on(world, {**base, **layout}), want, 2**-8, 2**-5)


@pytest.mark.slow
def test_noop_layers_fill_a_place_in_the_pipeline() -> None:
    """Five layers on two stages of three slots: the last slot is empty."""
    base = {**GPT2, "num_layers": 6, "noop_layers": ("5",)}
    close(on(2, {**base, **PP2}), one_process(base), 1e-5, 1e-4)


@pytest.mark.parametrize("name", ["pp2", *_marked(["dp2-overlap"], ["dp2-zero2"])])
def test_a_growing_batch_trains_as_one_process(name: str) -> None:
    """One to four microbatches: fewer than stages at first, and a number that changes under overlapped reduction."""
    world, layout = LAYOUTS[name]
    ramp = ("1", "1", "8") if name == "pp2" else ("2", "2", "12")
    base = {**GPT2, "rampup_batch_size": ramp, "global_batch_size": 4 if name == "pp2" else 8}
    close(on(world, {**base, **layout}, 6), one_process(base, 6), 1e-5, 1e-4)


@pytest.mark.parametrize("name", ["tp2", pytest.param("tp2-sp", marks=pytest.mark.slow)])
def test_norms_of_queries_and_keys_train_as_one_process(name: str) -> None:
    world, layout = LAYOUTS[name]
    base = {**LLAMA, "qk_layernorm": True, "lr": 1e-3}
    close(on(world, {**base, **layout}, 5), one_process(base, 5), 1e-5, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["tp2", *_marked(["cp2-ulysses"], ["cp2-ring", "tp2-sp", "pp2-interleaved", "dp2-zero3"])]
)
def test_caps_factors_and_layers_of_two_kinds_train_as_one_process(name: str) -> None:
    world, layout = LAYOUTS[name]
    # A ring cannot backpropagate through a cap, which is refused.
    base = {**SCALED, "attn_logit_softcapping": None} if name == "cp2-ring" else SCALED
    close(on(world, {**base, **layout}, 5), one_process(base, 5), 1e-5, 1e-4)


SEPARATED = ("tp2-sp", "pp2", "pp2-interleaved", "dp2-zero3", "cp2-ring", "cp2-ulysses", "tp2-sp-cp2")


@pytest.mark.slow
@pytest.mark.parametrize("base, world, layout", _both_shapes(SEPARATED, "cp2-ring"))
def test_documents_within_a_sequence_are_told_apart_on_every_layout(
    base: dict[str, Any], world: int, layout: dict[str, Any]
) -> None:
    """The mean is over the unmasked tokens of the whole batch, independent of their distribution over ranks."""
    separate = {**base, **DROPOUT, **DOCUMENTS, "micro_batch_size": 2}
    close(on(world, {**separate, **layout}, 5), one_process(separate, 5), 1e-5, 1e-4)


TOGETHER: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "tp2-sp-zero3-block": (
        4,
        {**LLAMA, "num_query_groups": 2},
        {**TP2, **SP, "zero_stage": 3, **RECOMPUTE, "recompute_method": "block", "recompute_num_layers": 2},
    ),
    "pp3-list-noop-selective": (
        3,
        {**GPT2, "num_layers": 8, "noop_layers": ("4",), "pre_tokens": 5},
        {"pipeline_model_parallel_size": 3, "num_layer_list": ("3", "3", "2"), "recompute_granularity": "selective"},
    ),
    "tp2-sp-pp2-zero-bubble-recompute": (
        4,
        {**LLAMA, "untie_embeddings_and_output_weights": False, "micro_batch_size": 2},
        {**TP2, **SP, **ZBV, **RECOMPUTE},
    ),
    "cp2-pp2-interleaved-uniform": (
        4,
        {**GPT2, "num_layers": 8, "use_sandwich_norm": True},
        {**ULYSSES, **PP2, "num_layers_per_virtual_pipeline_stage": 2, **RECOMPUTE, "recompute_num_layers": 2},
    ),
}


@pytest.mark.parametrize(
    "name",
    _marked(
        ["pp3-list-noop-selective", "tp2-sp-pp2-zero-bubble-recompute"],
        ["tp2-sp-zero3-block", "cp2-pp2-interleaved-uniform"],
    ),
)
def test_features_together_train_as_one_process(name: str) -> None:
    """The learning rate is smaller than in the table, because deep models amplify rounding differences."""
    world, base, layout = TOGETHER[name]
    base = {**base, **DROPOUT, "lr": 1e-3}
    close(on(world, {**base, **layout}, 5), one_process(base, 5), 1e-5, 1e-4)
