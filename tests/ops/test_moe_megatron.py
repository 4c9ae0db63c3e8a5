"""The references of the mixture-of-experts ops have megatron-core's values and gradients."""

import pytest
import torch

from hal import ops

TOKENS, EXPERTS = 48, 16


@pytest.fixture(scope="module")
def moe_utils():
    name = "megatron.core.transformer.moe.moe_utils"  # takes 3 s to import, hence not at the top of the file
    return pytest.importorskip(name, reason="megatron-core is not installed")


def logits(seed=1, tokens=TOKENS):
    return torch.randn(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def dense(values, indices):
    """[t, k] as megatron-core's [t, e]."""
    return torch.zeros(len(values), EXPERTS, dtype=values.dtype).scatter(1, indices, values)


@pytest.mark.parametrize(
    "topk, kw",
    [
        (2, {}),
        (1, {}),
        (2, {"pre_softmax": True}),
        (4, {"score_function": "sigmoid"}),
        (1, {"score_function": "sigmoid"}),
        (4, {"score_function": "sigmoid", "num_groups": 4, "group_topk": 2, "scaling_factor": 2.5}),
        (4, {"score_function": "sigmoid", "expert_bias": torch.linspace(-0.5, 0.5, EXPERTS)}),
        (4, {"num_groups": 8, "group_topk": 4, "pre_softmax": True}),
    ],
    ids=str,
)
def test_router(topk, kw, moe_utils):
    mine, theirs = logits(), logits()
    probs, indices = ops.moe_router.reference(mine, topk, **kw)
    renamed = {"use_pre_softmax" if name == "pre_softmax" else name: value for name, value in kw.items()}
    right, routing_map = moe_utils.topk_routing_with_score_function(theirs, topk, **renamed)
    assert torch.equal(dense(torch.ones_like(probs), indices).bool(), routing_map)
    torch.testing.assert_close(dense(probs, indices), right)
    weights = torch.randn(right.shape)
    torch.testing.assert_close(*(torch.autograd.grad((p * weights).sum(), x)[0] for p, x in
                                 ((dense(probs, indices), mine), (right, theirs))))  # fmt: skip


@pytest.mark.parametrize("topk", [1, 2])
def test_sinkhorn(topk, moe_utils):
    x = logits()
    norm = moe_utils.sinkhorn(x.detach())
    _, right = torch.topk(norm, k=topk, dim=1)
    probs, indices = ops.moe_router.reference(x, topk, score_function="sinkhorn")
    assert torch.equal(indices, right)
    scores = torch.sigmoid(x) if topk == 1 else torch.softmax(x, -1)
    torch.testing.assert_close(probs, scores.gather(1, right))


@pytest.mark.parametrize("function", ["softmax", "sigmoid"])
@pytest.mark.parametrize("sequences", [1, 3])
def test_auxiliary_losses(function, sequences, moe_utils):
    topk, mine, theirs = 2, logits(), logits()
    routing_map, scores = moe_utils.compute_routing_scores_for_aux_loss(theirs, topk, function)
    by_sequence = (TOKENS // sequences, sequences * EXPERTS)
    scores, routing_map = scores.reshape(by_sequence), routing_map.reshape(by_sequence)
    length = TOKENS // sequences
    right = moe_utils.switch_load_balancing_loss_func(scores, routing_map.sum(0), length, topk, EXPERTS, 0.01)
    _, indices = ops.moe_router.reference(mine, topk)
    sums, counts, z = ops.moe_balance_sums.reference(mine, indices, score_function=function, sequences=sequences)
    loss = 0.01 * EXPERTS / (topk * length**2) * (sums * counts).sum()
    torch.testing.assert_close(loss, right)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, retain_graph=True)[0] for y, x in
                                 ((loss, mine), (right, theirs))))  # fmt: skip
    torch.testing.assert_close(z.sum() / TOKENS * 0.001, moe_utils.z_loss_func(theirs, 0.001))


@pytest.mark.parametrize("pad", [False, True])
def test_capacity_and_permutation(pad, moe_utils):
    topk, factor = 2, 0.75
    probs, indices = ops.moe_router.reference(logits().detach(), topk)
    capacity = moe_utils.get_capacity(TOKENS * topk, EXPERTS, factor)
    routing_probs, routing_map = moe_utils.apply_router_token_dropping(
        dense(probs, indices), dense(torch.ones_like(probs), indices).bool(), topk, factor, "probs", pad
    )
    kept = ops.moe_drop.reference(probs, indices, EXPERTS, capacity)
    assert (kept < 0).any()
    x = torch.randn(TOKENS, 6)
    rows, row_map, sizes, permuted = ops.permute.reference(
        x, kept, EXPERTS, probs=probs, capacity=capacity if pad else None
    )
    if pad:  # megatron-core pads with tokens of probability 0, HAL with rows of zeros
        right, right_probs, order = moe_utils.permute(
            x, routing_map, routing_probs, num_out_tokens=EXPERTS * capacity, drop_and_pad=True
        )
        torch.testing.assert_close(
            permuted.view(EXPERTS, -1).sort().values, right_probs.view(EXPERTS, -1).sort().values
        )
        filled = permuted != 0
        weighted = torch.zeros(TOKENS, 6).index_add(0, order, right * right_probs[:, None])
        assert filled.sum() == (kept >= 0).sum()
    else:
        right, right_probs, order = moe_utils.permute(x, routing_map, routing_probs)
        filled = len(right)
        torch.testing.assert_close(rows[:filled], right)
        torch.testing.assert_close(permuted[:filled], right_probs)
        assert torch.equal(sizes, routing_map.sum(0)) and not rows[filled:].any()
        weighted = moe_utils.unpermute(right * right_probs[:, None], order, x.shape)
    torch.testing.assert_close(ops.unpermute.reference(rows * permuted[:, None], row_map), weighted)
    torch.testing.assert_close(ops.unpermute.reference(rows, row_map, probs=probs), weighted)
