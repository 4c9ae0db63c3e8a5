"""Documents within a sequence, delimited by the end-of-document id: their positions and their attention mask.

As in Megatron's get_ltor_masks_and_position_ids, an end-of-document token belongs to the document that it ends.
Everything derives from `starts`, one number per token, which a rank has for full sequences even if it computes only a
part of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

IGNORED = -1
"""The label of a token that is not trained on."""


def starts(tokens: Tensor, eod: int) -> Tensor:
    """Position of the first token of each token's document, int64 [b, s]. tokens: ids [b, s]."""
    after = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    # A document starts after the last end-of-document token before it; cummax carries that position forward.
    begins = torch.where(tokens == eod, after, 0)[:, :-1]
    return torch.nn.functional.pad(begins, (1, 0)).cummax(1).values


def positions(starts: Tensor) -> Tensor:
    """Position of each token within its document, int64 [b, s]."""
    return torch.arange(starts.shape[1], device=starts.device) - starts


def mask(starts: Tensor) -> Tensor:
    """bool [b, 1, s, s], True where a key belongs to an earlier document than the query. Later documents are hidden by
    the causal window."""
    keys = torch.arange(starts.shape[1], device=starts.device)
    return (keys < starts[:, :, None])[:, None]
