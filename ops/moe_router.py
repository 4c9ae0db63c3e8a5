"""Routing of tokens to experts: moe_router chooses experts, moe_balance_sums computes the terms of auxiliary losses,
moe_drop enforces a capacity. The semantics are megatron-core 0.16.1's
(megatron/core/transformer/moe/{router,moe_utils}.py).

Shapes: t tokens, e experts, k experts per token, g groups of experts, s sequences. An assignment is one of the t * k
pairs of a token and an expert; the index of a dropped assignment is -1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import hal
from hal import Call, Choice, Sample, TensorSpec, Tol, require

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

SCORE_FUNCTIONS = ("softmax", "sigmoid", "sinkhorn")
_SMALLEST_SUM = 1e-20
"""Added to a sum of sigmoids before the division, as in megatron-core."""

_SINKHORN_TOLERANCE = 1e-4
_SINKHORN_EPSILON = 1e-8


def _check_router(call: Call) -> None:
    op = "moe_router"
    logits, topk, groups, chosen = call.logits, call.topk, call.num_groups, call.group_topk
    require(logits.ndim == 2, op, "logits of shape [tokens, experts]", tuple(logits.shape))
    experts = logits.shape[1]
    require(1 <= topk <= experts, op, f"topk from 1 to the number of experts, {experts}", topk)
    require(call.score_function in SCORE_FUNCTIONS, op, f"a score_function of {SCORE_FUNCTIONS}", call.score_function)
    softmax = call.score_function == "softmax"
    require(softmax or not call.pre_softmax, op, "score_function='softmax', because pre_softmax", call.score_function)
    require((groups is None) == (chosen is None), op, "num_groups and group_topk together", (groups, chosen))
    if groups is not None:
        require(call.score_function != "sinkhorn", op, "no groups of experts with sinkhorn", groups)
        require(groups >= 1 and experts % groups == 0, op, f"num_groups that divides {experts} experts", groups)
        require(
            1 <= chosen <= groups and topk % chosen == 0, op, f"group_topk up to {groups} that divides topk", chosen
        )
        each = experts // groups
        require(topk // chosen <= each, op, f"at most {each} experts of each group", topk // chosen)
    if call.expert_bias is not None:
        require(call.score_function == "sigmoid", op, "score_function='sigmoid', because expert_bias", "another")
        require(call.expert_bias.shape == (experts,), op, f"expert_bias [{experts}]", tuple(call.expert_bias.shape))
        accumulated = torch.promote_types(logits.dtype, torch.float32)
        require(call.expert_bias.dtype == accumulated, op, f"expert_bias of {accumulated}", call.expert_bias.dtype)
    if call.indices is not None:
        shape = (logits.shape[0], topk)
        require(call.indices.shape == shape, op, f"indices of shape {shape}", tuple(call.indices.shape))
        require(call.indices.dtype == torch.int64, op, "int64 indices", call.indices.dtype)


def _first(values: Tensor, count: int) -> Tensor:
    """Indices of the `count` largest values of every row, the largest first; of equal ones, the lowest index first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def _group_scores(selection: Tensor, groups: int, each: int) -> Tensor:
    """The sum of the `each` largest values in every group of experts: [t, e] -> [t, g]."""
    return selection.view(len(selection), groups, selection.shape[1] // groups).topk(each, dim=-1).values.sum(-1)


def _only(selection: Tensor, groups: Tensor, count: int) -> Tensor:
    """`selection` [t, e] with -inf outside of the groups [t, m] out of `count`."""
    chosen = (groups[..., None] == torch.arange(count, device=groups.device)).any(1)
    by_group = selection.view(len(selection), count, selection.shape[1] // count)
    return by_group.masked_fill(~chosen[..., None], -torch.inf).view(selection.shape)


def _sinkhorn_bias(logits: Tensor) -> Tensor:
    """log of the factor by which Sinkhorn's algorithm scales every expert's exp(logits): [t, e] -> [e].

    The factor of a token does not change the order of its experts. The iteration and its end are megatron-core's.
    """
    cost = logits.exp()
    tokens, experts = cost.shape
    by_expert, error = cost.new_ones(experts), torch.inf
    while error > _SINKHORN_TOLERANCE and tokens:
        by_token = 1.0 / (tokens * ((by_expert * cost).sum(1) + _SINKHORN_EPSILON))
        before, by_expert = by_expert, 1.0 / (experts * ((by_token[:, None] * cost).sum(0) + _SINKHORN_EPSILON))
        error = float((before - by_expert).abs().mean())
    return by_expert.log()


def _selection(logits: Tensor, score_function: str, pre_softmax: bool, grouped: bool, bias: Tensor | None) -> Tensor:
    """The values [t, e] whose largest are selected. Without groups, softmax keeps the order of the logits."""
    if score_function == "sinkhorn":
        return logits + _sinkhorn_bias(logits)
    if score_function == "sigmoid":
        return torch.sigmoid(logits) if bias is None else torch.sigmoid(logits) + bias
    return torch.softmax(logits, -1) if pre_softmax and grouped else logits


def _follows(selection: Tensor, indices: Tensor, slack: float) -> Tensor:
    """Whether rows of `indices` [t, k] are the largest of `selection` [t, e], where values within `slack` of each other
    may change places, and equal values must be in the order of their indices: bool [t].
    """
    experts = selection.shape[1]
    inside = (indices >= 0) & (indices < experts)
    indices = indices.clamp(0, experts - 1)
    values, right = selection.gather(1, indices), selection.gather(1, _first(selection, indices.shape[1]))
    near = (values == right) | ((values - right).abs() <= slack)
    # [t, k, e]: experts that the choice had taken before, and those with the same value and a lower index.
    taken = torch.nn.functional.one_hot(indices, experts).cumsum(1)
    before = (taken - torch.nn.functional.one_hot(indices, experts)).bool()
    lower = torch.arange(experts) < indices[..., None]
    skipped = (selection[:, None, :] == values[..., None]) & lower & ~before
    return (inside & near & ~skipped.any(-1)).all(-1) & (taken <= 1).all(-1).all(-1)


def _router_shapes(call: Call) -> tuple[Tensor, Tensor]:
    """The number of iterations of Sinkhorn's algorithm depends on the values."""
    shape = (call.logits.shape[0], call.topk)
    return call.logits.new_empty(shape), call.logits.new_empty(shape, dtype=torch.int64)


def _right_choice(call: Call, indices: Tensor) -> Tensor:
    """Whether the router may choose these experts, for every token. The scores of a backend are rounded to float32."""
    groups, slack = call.num_groups, 1e-2 if call.score_function == "sinkhorn" else 1e-5
    selection = _selection(call.logits, call.score_function, call.pre_softmax, groups is not None, call.expert_bias)
    if groups is None or call.group_topk == groups:
        return _follows(selection, indices, slack)
    scores = _group_scores(selection, groups, call.topk // call.group_topk)
    order = _first(scores, call.group_topk + 1)
    last, next_ = scores.gather(1, order[:, -2:]).unbind(1)
    right = _follows(_only(selection, order[:, :-1], groups), indices, slack)
    # The last group that is chosen and the first that is not may change places if their scores are almost equal.
    exchanged = torch.cat([order[:, :-2], order[:, -1:]], dim=1)
    almost = (last != next_) & ((last - next_).abs() <= slack)
    return right | (almost & _follows(_only(selection, exchanged, groups), indices, slack))


def _logits(tokens: int, experts: int, **how: Any) -> TensorSpec:
    return TensorSpec((tokens, experts), **how)


def _bias(experts: int) -> TensorSpec:
    return TensorSpec((experts,), dtype=torch.float32)


_TIES = (1.0, 2.0, 2.0, 0.5, 2.0, 1.0, 1.0, 1.0, -3.0, -3.0, -3.0, -3.0)


def _edge_cases_router() -> list[Sample]:
    # Small changes of equal logits change the choice, so there is no gradient to compare.
    ties = TensorSpec((2, 6), "values", values=_TIES)
    sigmoid: dict[str, Any] = {"score_function": "sigmoid"}
    return [
        Sample((_logits(5, 8), 2)),
        Sample((_logits(5, 8), 2), {"pre_softmax": True}),
        Sample((_logits(4, 6), 3), sigmoid),
        Sample((_logits(4, 6), 1), sigmoid),
        Sample((_logits(7, 5), 5), {"scaling_factor": 2.5}),
        Sample((_logits(4, 8), 4), {**sigmoid, "num_groups": 4, "group_topk": 2, "scaling_factor": 2.5}),
        Sample((_logits(6, 12), 2), {"num_groups": 3, "group_topk": 2}),
        Sample((_logits(6, 12), 4), {"num_groups": 3, "group_topk": 2, "pre_softmax": True}),
        # Biases of the size of the scores, so that they decide the choice.
        Sample(
            (
                _logits(9, 16),
                4,
            ),
            {**sigmoid, "expert_bias": _bias(16)},
        ),
        Sample(
            (_logits(5, 32), 8),
            {**sigmoid, "expert_bias": _bias(32), "num_groups": 8, "group_topk": 4, "scaling_factor": 2.5},
        ),
        Sample((ties, 1), grad=False),
        Sample((ties, 2), grad=False),
        Sample((ties, 4), {"pre_softmax": True}, grad=False),
        Sample((ties, 3), sigmoid, grad=False),
        Sample((ties, 2), {**sigmoid, "num_groups": 3, "group_topk": 1}, grad=False),
        Sample((_logits(0, 4), 2)),
        Sample((_logits(1, 1), 1)),
        Sample((_logits(3, 7, strided="last"), 2)),
        Sample((_logits(3, 7, strided="rows"), 2), sigmoid),
        Sample((_logits(3, 130, scale=30.0), 6), {"pre_softmax": True}),
        Sample((_logits(70, 64), 8), {"scaling_factor": 0.5}),
        Sample((_logits(33, 8), 2), {"score_function": "sinkhorn"}),
        Sample((_logits(9, 4), 1), {"score_function": "sinkhorn"}),
        Sample(
            (
                _logits(6, 8),
                3,
            ),
            {**sigmoid, "indices": _experts(6, 3, 8)},
        ),
        Sample((_logits(6, 8), 2), {"indices": _experts(6, 2, 8)}),
    ]


def _experts(tokens: int, topk: int, experts: int) -> TensorSpec:
    """Different experts for every token, in no order."""
    values = tuple(float((5 * i + 3 * j) % experts) for i in range(tokens) for j in range(topk))
    return TensorSpec((tokens, topk), "values", values=values, dtype=torch.int64)


def _samples_router() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    @st.composite
    def call(draw: st.DrawFn) -> Sample:
        groups, each = draw(st.sampled_from([1, 2, 4])), draw(st.integers(2, 9))
        chosen = draw(st.integers(1, groups))
        topk = chosen * draw(st.integers(1, min(each, 3)))
        kw: dict[str, Any] = {"score_function": draw(st.sampled_from(["softmax", "sigmoid"]))}
        if draw(st.booleans()):
            kw |= {"num_groups": groups, "group_topk": chosen}
        if kw["score_function"] == "sigmoid" and draw(st.booleans()):
            kw["expert_bias"] = _bias(groups * each)
        if kw["score_function"] == "softmax":
            kw["pre_softmax"] = draw(st.booleans())
        kw["scaling_factor"] = draw(st.sampled_from([1.0, 2.5]))
        strided = draw(st.sampled_from(["", "rows", "last"]))
        return Sample((_logits(draw(st.integers(1, 20)), groups * each, strided=strided), topk), kw)

    return call()


@hal.op(
    check=_check_router,
    tol={
        torch.float32: Tol(1e-6, 1e-5),  # a sum of exponentials, and a division by it
        torch.bfloat16: Tol(4e-3, 1.6e-2),  # probabilities are rounded to 8 bits
        torch.float16: Tol(5e-4, 2e-3),
    },
    samples=_samples_router,
    edge_cases=_edge_cases_router,
    grads=("logits",),
    nondiff_outputs=(1,),
    choice=Choice(output=1, parameter="indices", right=_right_choice),
    shapes=_router_shapes,
)
def moe_router(
    logits: Tensor,
    topk: int,
    *,
    score_function: str = "softmax",
    pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    scaling_factor: float = 1.0,
    expert_bias: Tensor | None = None,
    indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(probabilities [t, k] in logits' dtype, experts [t, k] int64) of logits [t, e], each token's largest score first.

    Of equal scores, the lowest expert comes first. Scores are computed in float32 and not rounded before the choice.
    The probabilities, each times scaling_factor:

    - "softmax": the softmax of the chosen logits; with pre_softmax that of all logits, not normalised again.
    - "sigmoid": sigmoid(logits), divided by their sum over the chosen experts if there are several. expert_bias [e]
      (float32) is added for the choice only (Wang et al., "Auxiliary-Loss-Free Load Balancing", arXiv 2408.15664).
    - "sinkhorn": Sinkhorn's algorithm over all tokens makes the choice; the probabilities are sigmoid(logits) for
      topk = 1, otherwise the softmax of all logits. For training: evaluation uses "sigmoid", or "softmax" with
      pre_softmax. Its number of iterations depends on the values, so it synchronises the device.

    With num_groups, experts come from the group_topk groups (of adjacent experts) whose topk / group_topk largest
    scores have the largest sum (DeepSeek-AI, arXiv 2412.19437, section 2.1.2).

    indices [t, k] prescribes the experts (megatron-core's routing replay); then nothing is chosen.
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if indices is None:
        selection = _selection(x.detach(), score_function, pre_softmax, num_groups is not None, expert_bias)
        if num_groups is not None and group_topk is not None:
            scores = _group_scores(selection, num_groups, topk // group_topk)
            selection = _only(selection, _first(scores, group_topk), num_groups)
        indices = _first(selection, topk)
    if score_function == "softmax" and not pre_softmax:
        probs = torch.softmax(x.gather(1, indices), -1)
    elif score_function == "sigmoid" or (score_function == "sinkhorn" and topk == 1):
        probs = torch.sigmoid(x.gather(1, indices))
        if score_function == "sigmoid" and topk > 1:
            probs = probs / (probs.sum(-1, keepdim=True) + _SMALLEST_SUM)
    else:
        probs = torch.softmax(x, -1).gather(1, indices)
    return (probs * scaling_factor).to(logits.dtype), indices.clone()


def _check_sums(call: Call) -> None:
    op, logits, indices = "moe_balance_sums", call.logits, call.indices
    require(logits.ndim == 2, op, "logits of shape [tokens, experts]", tuple(logits.shape))
    require(indices.ndim == 2 and len(indices) == len(logits), op, f"indices [{len(logits)}, k]", tuple(indices.shape))
    require(indices.dtype == torch.int64, op, "int64 indices", indices.dtype)
    functions = SCORE_FUNCTIONS[:2]
    require(call.score_function in functions, op, f"a score_function of {functions}", call.score_function)
    divides = call.sequences >= 1 and len(logits) % call.sequences == 0
    require(divides, op, f"sequences that divide {len(logits)} tokens", call.sequences)


def _sums_sample(tokens: int, experts: int, topk: int, function: str, sequences: int = 1, **how: Any) -> Sample:
    indices = TensorSpec((tokens, topk), "int", low=0, high=experts, dtype=torch.int64)
    kw: dict[str, Any] = {"score_function": function, "sequences": sequences}
    return Sample((_logits(tokens, experts, **how), indices), kw)


def _edge_cases_sums() -> list[Sample]:
    dropped = TensorSpec((3, 2), "values", values=(0, -1, 2, 0, -1, -1), dtype=torch.int64)
    return [
        _sums_sample(6, 4, 2, "softmax"),
        _sums_sample(6, 4, 2, "sigmoid"),
        _sums_sample(12, 5, 2, "softmax", 3),
        _sums_sample(12, 5, 1, "sigmoid", 12),
        Sample((_logits(3, 3), dropped)),
        _sums_sample(0, 3, 2, "softmax"),
        _sums_sample(130, 67, 3, "softmax", strided="rows"),
        _sums_sample(9, 8, 2, "sigmoid", strided="last"),
        _sums_sample(5, 8, 2, "softmax", scale=30.0),
    ]


def _samples_sums() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    return st.builds(
        lambda tokens, experts, topk, function, sequences: _sums_sample(
            tokens * sequences, experts, min(topk, experts), function, sequences
        ),
        st.integers(1, 9),
        st.integers(1, 40),
        st.integers(1, 4),
        st.sampled_from(["softmax", "sigmoid"]),
        st.integers(1, 4),
    )


@hal.op(
    check=_check_sums,
    tol={
        torch.float32: Tol(2e-6, 1e-5),  # sums of up to ~130 probabilities
        torch.bfloat16: Tol(4e-3, 1.6e-2),  # sums are float32; the gradient is rounded to 8 bits
        torch.float16: Tol(5e-4, 2e-3),
    },
    samples=_samples_sums,
    edge_cases=_edge_cases_sums,
    grads=("logits",),
    nondiff_outputs=(1,),
)
def moe_balance_sums(
    logits: Tensor, indices: Tensor, *, score_function: str = "softmax", sequences: int = 1
) -> tuple[Tensor, Tensor, Tensor]:
    """The terms of the auxiliary losses: (score sums [s, e], assignments [s, e] int64, z [s]), summed over tokens.

    logits [t, e], indices [t, k]. Token i belongs to sequence i % sequences (the layout [s, b] of Megatron). The scores
    are softmax(logits) or sigmoid(logits) / their sum; z is the sum of squared log-sum-exps of the logits (Zoph et al.,
    "ST-MoE", arXiv 2202.08906). The sums are float32, float64 for float64 logits. All three are sums, so that ranks
    with parts of a sequence add them. With T tokens per sequence in all, megatron-core's losses are, per sequence,
    load balancing: e / (k T^2) * (score sums * assignments).sum(), z-loss: z / T.
    """
    x = logits.to(torch.promote_types(logits.dtype, torch.float32))
    experts = x.shape[1]
    if score_function == "softmax":
        scores = torch.softmax(x, -1)
    else:
        scores = torch.sigmoid(x)
        scores = scores / (scores.sum(-1, keepdim=True) + _SMALLEST_SUM)
    assigned = (indices[..., None] == torch.arange(experts, device=indices.device)).sum(1)
    z = x.logsumexp(-1).square()
    steps = len(x) // sequences
    by_sequence = scores.view(steps, sequences, experts), assigned.view(steps, sequences, experts)
    return by_sequence[0].sum(0), by_sequence[1].sum(0), z.view(steps, sequences).sum(0)


def _check_drop(call: Call) -> None:
    op, probs, indices = "moe_drop", call.probs, call.indices
    require(indices.ndim == 2 and indices.dtype == torch.int64, op, "int64 indices [tokens, k]", tuple(indices.shape))
    require(probs.shape == indices.shape, op, f"probs of shape {tuple(indices.shape)}", tuple(probs.shape))
    require(call.num_experts >= 1, op, "num_experts >= 1", call.num_experts)
    require(call.capacity >= 0, op, "capacity >= 0", call.capacity)
    require(call.policy in ("probs", "position"), op, "policy 'probs' or 'position'", call.policy)


def _drop_sample(tokens: int, topk: int, experts: int, capacity: int, policy: str, **how: Any) -> Sample:
    indices = TensorSpec((tokens, topk), "int", low=-1, high=experts, dtype=torch.int64)
    return Sample((TensorSpec((tokens, topk), **how), indices, experts, capacity), {"policy": policy})


def _edge_cases_drop() -> list[Sample]:
    equal = TensorSpec((6, 1), "values", values=(0.5, 0.75, 0.5, 0.75, 0.5, 0.5))
    one = TensorSpec((6, 1), "int", low=0, high=1, dtype=torch.int64)
    return [
        _drop_sample(9, 2, 4, 3, "probs"),
        _drop_sample(9, 2, 4, 3, "position"),
        _drop_sample(9, 2, 4, 0, "probs"),
        _drop_sample(9, 2, 4, 18, "position"),
        _drop_sample(0, 2, 4, 2, "probs"),
        Sample((equal, one, 1, 4)),
        Sample((equal, one, 1, 1)),
        _drop_sample(40, 3, 5, 7, "probs", strided="last"),
        _drop_sample(300, 2, 3, 100, "probs"),
    ]


def _samples_drop() -> SearchStrategy[Sample]:
    from hypothesis import strategies as st

    return st.builds(
        _drop_sample,
        st.integers(0, 30),
        st.integers(1, 4),
        st.integers(1, 6),
        st.integers(0, 12),
        st.sampled_from(["probs", "position"]),
    )


@hal.op(
    check=_check_drop,
    tol={  # integers: there is nothing to round
        torch.float32: Tol(0.0, 0.0),
        torch.bfloat16: Tol(0.0, 0.0),
        torch.float16: Tol(0.0, 0.0),
    },
    samples=_samples_drop,
    edge_cases=_edge_cases_drop,
)
def moe_drop(probs: Tensor, indices: Tensor, num_experts: int, capacity: int, *, policy: str = "probs") -> Tensor:
    """indices [t, k] with -1 in place of the assignments that exceed the capacity of their expert.

    An expert keeps `capacity` assignments: those with the largest probs [t, k] ("probs"), or the first ("position"); of
    equal ones the first, in the order of tokens. megatron-core's capacity is ceil(t * k / e * factor).
    """
    expert = torch.where(indices < 0, num_experts, indices).flatten()
    order = torch.arange(expert.numel(), device=expert.device)
    if policy == "probs":
        order = probs.detach().flatten().sort(descending=True, stable=True).indices
    order = order.gather(0, expert.gather(0, order).sort(stable=True).indices)
    sizes = torch.zeros(num_experts + 1, dtype=torch.int64, device=expert.device)
    sizes = sizes.scatter_add(0, expert, torch.ones_like(expert))
    starts = sizes.cumsum(0) - sizes
    position = torch.empty_like(order).scatter(0, order, torch.arange(order.numel(), device=order.device))
    rank = position - starts.gather(0, expert)
    return torch.where((rank < capacity).view(indices.shape), indices, -1)
