"""The kit detects errors of mixture-of-experts kernels, and accepts a choice that rounding alone decides."""

import pytest
import torch
from planted import Faults, plant, verdict

from hal import Sample, TensorSpec, ops
from hal.ops.moe_router import _right_choice
from hal.testing.checks import check_sample
from hal.testing.subject import Failure, Subject

pytestmark = pytest.mark.slow
faults = Faults()

OPS = (
    ops.moe_router,
    ops.moe_balance_sums,
    ops.moe_drop,
    ops.permute,
    ops.unpermute,
    ops.grouped_linear,
    ops.grouped_linear_wgrad,
    ops.grouped_swiglu,
)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_the_reference_passes(op):
    report, messages = verdict(plant(op, op.reference), op)
    assert report.ok, messages


def shifted_groups(group_sizes):
    """The end of the first group that another follows, one row too far."""
    sizes = group_sizes.tolist()
    for i in range(len(sizes) - 1):
        if sizes[i + 1]:
            sizes[i], sizes[i + 1] = sizes[i] + 1, sizes[i + 1] - 1
            break
    return torch.tensor(sizes)


@faults(ops.grouped_linear, "the output: error")
def group_offset_is_one_off(x, weight, group_sizes):
    return ops.grouped_linear.reference(x, weight, shifted_groups(group_sizes))


@faults(ops.grouped_linear_wgrad, "main_grad, written in place: error")
def group_offset_of_gradients_is_one_off(x, dy, group_sizes, main_grad):
    ops.grouped_linear_wgrad.reference(x, dy, shifted_groups(group_sizes), main_grad)


@faults(ops.grouped_linear, "the output: error")
def experts_exchanged(x, weight, group_sizes):
    return ops.grouped_linear.reference(x, weight.flip(0), group_sizes)


@faults(ops.grouped_linear, "the output: error")
def empty_group_takes_the_next_rows(x, weight, group_sizes):
    filled = torch.cat([group_sizes[group_sizes > 0], group_sizes[group_sizes == 0]])
    return ops.grouped_linear.reference(x, weight, filled)


@faults(ops.grouped_linear_wgrad, "main_grad, written in place: error")
def empty_group_overwrites_its_sum(x, dy, group_sizes, main_grad):
    ops.grouped_linear_wgrad.reference(x, dy, group_sizes, main_grad)
    main_grad.mul_((group_sizes > 0)[:, None, None])


@faults(ops.permute, "output 0: error")
def last_token_is_lost(x, indices, num_experts, probs, capacity):
    rows, *rest = ops.permute.reference(x, indices, num_experts, probs=probs, capacity=capacity)
    lost = rest[0][-1:].flatten()
    mask = torch.ones(len(rows), 1, dtype=rows.dtype).index_fill(0, lost[lost >= 0], 0.0)
    return rows * mask, *rest


@faults(ops.permute, "output 0: error")
def not_in_the_order_of_tokens(x, indices, num_experts, probs, capacity):
    probs = None if probs is None else probs.flip(0)
    rows, row_map, *rest = ops.permute.reference(
        x.flip(0), indices.flip(0), num_experts, probs=probs, capacity=capacity
    )
    return rows, row_map.flip(0), *rest


@faults(ops.permute, "output 2: error")
def sizes_with_dropped(x, indices, num_experts, probs, capacity):
    rows, row_map, sizes, *rest = ops.permute.reference(x, indices, num_experts, probs=probs, capacity=capacity)
    return rows, row_map, sizes + (indices < 0).any(), *rest


@faults(ops.unpermute, "the output: error")
def last_choice_is_lost(rows, row_map, probs):
    return ops.unpermute.reference(rows, row_map[:, :-1], probs=None if probs is None else probs[:, :-1])


@faults(ops.unpermute, "the output: error")
def without_probabilities(rows, row_map, probs):
    return ops.unpermute.reference(rows, row_map)


@faults(ops.unpermute, "the output: error")
def dropped_take_the_last_row(rows, row_map, probs):
    return (
        ops.unpermute.reference(rows, row_map % max(1, len(rows)), probs=probs)
        if len(rows)
        else rows.new_zeros(len(row_map), rows.shape[1])
    )


@faults(ops.grouped_swiglu, "the output: error")
def activation_without_probabilities(x, probs):
    return ops.grouped_swiglu.reference(x, torch.ones_like(probs))


@faults(ops.moe_router, "float64 reference")
def highest_of_equal_scores(logits, indices, **rest):
    flipped = logits.flip(1)
    bias = rest.pop("expert_bias")
    last = logits.shape[1] - 1
    given = None if indices is None else last - indices
    probs, chosen = ops.moe_router.reference(
        flipped, expert_bias=None if bias is None else bias.flip(0), indices=given, **rest
    )
    return probs, last - chosen


@faults(ops.moe_router, "output 0: error")
def without_scaling(scaling_factor, **rest):
    return ops.moe_router.reference(**rest)


@faults(ops.moe_router, "output 0: error")
def bias_in_the_weights(logits, expert_bias, scaling_factor, topk, **rest):
    probs, chosen = ops.moe_router.reference(
        logits, topk, expert_bias=expert_bias, scaling_factor=scaling_factor, **rest
    )
    if expert_bias is None:
        return probs, chosen
    scores = (torch.sigmoid(logits.float()) + expert_bias).gather(1, chosen)
    return (scores / scores.sum(-1, keepdim=True) * scaling_factor).to(logits.dtype), chosen


@faults(ops.moe_router, "rounding does not explain it")
def without_the_bias(expert_bias, **rest):
    return ops.moe_router.reference(**rest)


@faults(ops.moe_router, "rounding does not explain it")
def without_groups(num_groups, group_topk, **rest):
    return ops.moe_router.reference(**rest)


@faults(ops.moe_router, "rounding does not explain it")
def groups_by_their_largest_score(logits, topk, num_groups, group_topk, **rest):
    if num_groups is None or rest["indices"] is not None:
        return ops.moe_router.reference(logits, topk, num_groups=num_groups, group_topk=group_topk, **rest)
    scores = torch.sigmoid(logits.float()) if rest["score_function"] == "sigmoid" else logits.float()
    scores = scores if rest["expert_bias"] is None else scores + rest["expert_bias"]
    best = scores.unflatten(1, (num_groups, -1)).amax(-1).topk(group_topk).indices
    keep = torch.zeros(len(logits), num_groups, dtype=torch.bool).scatter(1, best, True)
    kept = scores.masked_fill(~keep.repeat_interleave(logits.shape[1] // num_groups, 1), -torch.inf)
    return ops.moe_router.reference(logits, topk, **{**rest, "indices": kept.topk(topk).indices})


@faults(ops.moe_router, "rounding does not explain it")
def one_expert_twice(indices, **rest):
    probs, chosen = ops.moe_router.reference(indices=indices, **rest)
    return (probs, chosen) if indices is not None else (probs, chosen[:, :1].expand_as(chosen).clone())


@faults(ops.moe_router, "output 0: error")
def renormalised(pre_softmax, **rest):
    return ops.moe_router.reference(pre_softmax=False, **rest)


@faults(ops.moe_drop, "the output: error")
def keeps_one_too_many(probs, indices, num_experts, capacity, policy):
    return ops.moe_drop.reference(probs, indices, num_experts, capacity + 1, policy=policy)


@faults(ops.moe_drop, "the output: error")
def drops_the_first_of_equal_ones(probs, indices, num_experts, capacity, policy):
    return ops.moe_drop.reference(probs.flip(0), indices.flip(0), num_experts, capacity, policy=policy).flip(0)


@faults(ops.moe_balance_sums, ": error of")
def sequences_are_adjacent(logits, indices, score_function, sequences):
    order = torch.arange(len(logits)).view(sequences, -1).t().flatten()
    return ops.moe_balance_sums.reference(
        logits[order], indices[order], score_function=score_function, sequences=sequences
    )


@pytest.mark.parametrize("op, function, texts", faults.cases)
def test_a_fault_is_caught_and_named(op, function, texts):
    report, messages = verdict(plant(op, function), op, examples=0)
    assert not report.ok
    assert all(text in messages for text in texts), messages


def noisy_selection(logits, topk, indices, **rest):
    """Chooses by scores with the noise of float32, whose sign alternates."""
    if indices is not None or rest["num_groups"] is not None:
        return ops.moe_router.reference(logits, topk, indices=indices, **rest)
    noise = torch.arange(logits.shape[1]).remainder(2) * 4e-7
    _, indices = ops.moe_router.reference(logits.float() + noise, topk, **rest)
    return ops.moe_router.reference(logits, topk, indices=indices, **rest)


def close(second):
    logits = TensorSpec((1, 4), "values", values=(1.0, second, 0.5, 0.0))
    return Sample((logits, 1), {"pre_softmax": True})


def test_close_scores_may_be_exchanged_and_the_rest_is_compared_for_the_same_choice():
    backend = plant(ops.moe_router, noisy_selection)
    (impl,) = backend.impls["moe_router"]
    with Subject(backend, impl, torch.float32) as subject:
        assert check_sample(subject, close(1.0 - 1.2e-7)).tolerances <= 1.0  # the noise exchanges the experts 0 and 1
        with pytest.raises(Failure, match=r"row 0 is \[1\], float64 reference \[0\]"):
            check_sample(subject, close(1.0))  # of equal scores, the lowest expert


def test_a_gap_beyond_rounding_decides_the_choice():
    def right(logits, *chosen, **kw):
        call = ops.moe_router.Call(torch.tensor([logits], dtype=torch.float64), len(chosen), **kw)
        return bool(_right_choice(call, torch.tensor([chosen])))

    assert right([1.0, 2.0, 3.0, 0.0], 2, 1)
    assert not right([1.0, 2.0, 3.0, 0.0], 1, 2)
    assert not right([1.0, 2.0, 3.0, 0.0], 2, 2)
    assert not right([1.0, 2.0, 3.0, 0.0], 2, -1)
    assert right([1.0, 2.0 - 1e-7, 2.0, 0.0], 1, 2) and right([1.0, 2.0 - 1e-7, 2.0, 0.0], 2, 1)
    assert right([2.0, 2.0, 2.0], 0, 1) and not right([2.0, 2.0, 2.0], 1, 0) and not right([2.0, 2.0, 2.0], 0, 2)
    groups = {"num_groups": 2, "group_topk": 1}
    assert right([1.0, 1.0, 1.0 + 1e-7, 1.0], 0, 1, **groups) and right([1.0, 1.0, 1.0 + 1e-7, 1.0], 2, 3, **groups)
    assert not right([1.0, 1.0, 1.0 + 1e-7, 1.0], 2, 0, **groups)
    assert not right([1.0, 1.0, 1.0, 1.0], 2, 3, **groups)
