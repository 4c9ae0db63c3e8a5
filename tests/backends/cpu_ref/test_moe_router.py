"""The router beyond the kit's sizes, and values that are not numbers."""

import pytest
import torch

import hal
from hal import ops


@pytest.fixture(autouse=True)
def backend():
    with hal.activated(hal.use("cpu_ref")):
        yield


GROUPS = {"num_groups": 8, "group_topk": 4}


@pytest.mark.parametrize(
    "kw",
    [
        {},
        {"pre_softmax": True, **GROUPS},
        {"score_function": "sigmoid", "scaling_factor": 2.5, **GROUPS},
        {"score_function": "sigmoid", "expert_bias": torch.linspace(-1, 1, 256), **GROUPS},
    ],
    ids=str,
)
def test_many_experts_are_chosen_as_by_the_reference(kw):
    logits = torch.randn(3000, 256, generator=torch.Generator().manual_seed(5))
    probs, indices = ops.moe_router(logits, 8, **kw)
    right, chosen = ops.moe_router.reference(logits, 8, **kw)
    # Rounding may exchange close scores: a few in 24,000.
    assert (indices != chosen).sum() <= 20
    torch.testing.assert_close(probs.sort().values, right.sort().values, rtol=1e-5, atol=1e-6)


def test_nan_is_never_preferred_and_never_read_beyond_the_row():
    logits = torch.full((2, 5), torch.nan)
    logits[0, 3], logits[0, 1] = -torch.inf, 2.0
    indices = ops.moe_router(logits, 3)[1]
    assert indices[0].tolist()[:2] == [1, 3]
    assert ((indices >= 0) & (indices < 5)).all()


def test_prescribed_experts_that_do_not_exist_are_refused():
    with pytest.raises(hal.ContractError, match="expected indices of 4 experts; found others"):
        ops.moe_router(torch.randn(1, 4), 2, indices=torch.tensor([[0, 4]]))
