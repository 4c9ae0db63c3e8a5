"""Documents within a sequence: where they begin, their positions, and what keeps attention within them.

Everything derives from `starts`, one number per token, which a rank has for full sequences even if it computes only a
part of them. In pretraining an end-of-document id ends a document, and as in Megatron's
get_ltor_masks_and_position_ids belongs to it; in finetuning every example is a document.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

import hal

IGNORED = -1
"""The label of a token that is not trained on."""


@dataclass(frozen=True)
class Documents:
    """What attention needs to know about the documents of a microbatch of b sequences of s tokens, on the device.

    starts: int64 [b, s], the position of the first token of each token's document. cu_seqlens: int32 [documents + 1],
    where the documents begin in all b*s tokens of the sequences one after the other, and b*s at the end.
    """

    starts: Tensor
    cu_seqlens: Tensor

    @staticmethod
    def of(starts: Tensor, device: torch.device) -> Documents:
        """starts: on the CPU, so that counting the documents does not wait for the device."""
        first = (starts == torch.arange(starts.shape[1])).flatten().nonzero().flatten()
        cu_seqlens = torch.nn.functional.pad(first, (0, 1), value=starts.numel()).int()
        return Documents(hal.to_device(starts, device), hal.to_device(cu_seqlens, device, known=True))

    def mask(self, queries: slice = slice(None), keys: slice = slice(None)) -> Tensor:
        """bool [b, 1, queries, keys], True where a key belongs to an earlier document than the query. Later documents
        are hidden by the causal window."""
        positions = torch.arange(self.starts.shape[1], device=self.starts.device)[keys]
        return (positions < self.starts[:, queries, None])[:, None]


def starts(tokens: Tensor, eod: int) -> Tensor:
    """Position of the first token of each token's document, int64 [b, s]. tokens: ids [b, s]."""
    after = torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    # A document starts after the last end-of-document token before it; cummax carries that position forward.
    begins = torch.where(tokens == eod, after, 0)[:, :-1]
    return torch.nn.functional.pad(begins, (1, 0)).cummax(1).values


def positions(starts: Tensor) -> Tensor:
    """Position of each token within its document, int64 [b, s]."""
    return torch.arange(starts.shape[1], device=starts.device) - starts
