"""The loss on the validation or test split, computed as in training: same samples, padding ids in the softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...data.gpt_dataset import Split
from ...inference.engine import Engine
from ...parallel import document_mask
from .scoring import per_token, perplexity


def validation(engine: Engine, split: Split, samples: int, *, batch: int) -> dict[str, Any]:
    """Mean loss per token of the split's first `samples` samples, and its standard error over samples."""
    padding = engine.config.predicts_padding  # as in GPT.loss
    scores = torch.zeros(samples, 3, device=engine.device)
    for number, first in enumerate(range(0, samples, batch)):
        if number % engine.replicas != engine.replica:
            continue
        tokens, labels = split.fetch(first, min(batch, samples - first))
        counted: Tensor = labels != document_mask.IGNORED
        starts = split.starts(first, tokens) if engine.config.has_documents else None
        scores[first : first + batch] = engine.score(tokens, labels * counted, counted, padding=padding, starts=starts)
    loss = per_token(engine.total(scores).double())
    ppl = perplexity(loss)
    return {
        "lm loss value": loss.value,
        "lm loss value_stderr": loss.stderr,
        "lm loss PPL": ppl.value,
        "lm loss PPL_stderr": ppl.stderr,
        "samples": samples,
    }
