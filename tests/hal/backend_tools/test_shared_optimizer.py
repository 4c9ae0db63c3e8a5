"""AdamW by members and scalars."""

from __future__ import annotations

import torch
from torch import Tensor

from hal import backend_tools, ops
from hal.backend_tools import with_signature_of


def test_adamw_by_members_and_scalars_is_the_reference() -> None:
    """A backend that uses only the helpers: their outputs must be sufficient for the formula."""

    @with_signature_of(ops.adamw, members=backend_tools.adamw_members, s=backend_tools.adamw_scalars)
    def adamw(members: list[backend_tools.AdamWMember], s: backend_tools.AdamWScalars) -> None:
        correction1, correction2 = s.corrections
        for p, g, m, v, copy in members:
            g = g.to(p.dtype) * s.grad_scale
            m.mul_(s.beta1).add_(g, alpha=1.0 - s.beta1)
            v.mul_(s.beta2).addcmul_(g, g, value=1.0 - s.beta2)
            p.mul_(s.decay).sub_(s.lr / correction1 * m / ((v / correction2).sqrt() + s.eps))
            if copy is not None:
                copy.copy_(p)

    for sample in ops.adamw.edge_cases():
        mine, reference = (sample.build(torch.float32) for _ in range(2))
        adamw(*mine[0], **mine[1])
        ops.adamw.reference(*reference[0], **reference[1])
        for ours, theirs in zip(mine[0], reference[0]):
            torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(mine[1].get("model_params"), reference[1].get("model_params"))


def test_members_are_grouped_by_the_dtypes_of_gradient_and_copy() -> None:
    p = torch.ones(2)

    def members(grads: list[Tensor], copies: list[Tensor] | None) -> list[backend_tools.AdamWMember]:
        same = [p] * len(grads)
        return backend_tools.adamw_members(ops.adamw.Call(same, grads, same, same, step=1, lr=0.1, model_params=copies))

    groups = backend_tools.adamw_groups(members([p, p.half(), p], [p.half(), p, p.half()]))
    assert {kinds: len(group) for kinds, group in groups.items()} == {
        (torch.float32, torch.float16): 2,
        (torch.float16, torch.float32): 1,
    }
    assert set(backend_tools.adamw_groups(members([p], None))) == {(torch.float32, torch.float32)}


def test_a_tensor_with_gaps_is_not_updated_in_place() -> None:
    whole, gaps = torch.ones(4), torch.ones(4, 2)[:, 0]
    written = backend_tools.adamw_written(
        ops.adamw.Call([whole], [gaps], [whole], [whole], step=1, lr=0.1, model_params=[gaps])
    )
    assert len(written) == 4 and written[3] is gaps
    assert "not contiguous" in backend_tools.in_place_reasons(written)[0]
    assert backend_tools.in_place_reasons(written[:3]) == ()
