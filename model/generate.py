"""Text from a model, one token at a time, sampled with HAL's random numbers: the same seed gives the same text."""

from __future__ import annotations

import torch

from hal import Rng, ops

from .gpt import GPT
from .tokenizer import Tokenizer


@torch.no_grad()
def generate(
    model: GPT, tokenizer: Tokenizer, prompt: list[int], count: int, *, temperature: float, rng: Rng
) -> list[int]:
    """Up to `count` ids that continue `prompt` (ids, not empty); stops at the end-of-document id.

    The model sees the last `seq_length` tokens. temperature 0 takes the likeliest token.
    """
    device, ids = next(model.parameters()).device, list(prompt)
    for step in range(count):
        context = torch.tensor([ids[-model.config.seq_length :]], device=device)
        logits = model(context)[-1, 0, : tokenizer.vocab_size].float()
        if temperature == 0.0:
            chosen = int(logits.argmax())
        else:
            # Inverse transform sampling: the first id whose cumulative probability exceeds a uniform number.
            cumulative = torch.softmax(logits / temperature, dim=-1).double().cumsum(0)
            uniform = ops.philox_uniform((1,), rng.fork(step), device=device).double() * cumulative[-1]
            chosen = min(int(torch.searchsorted(cumulative, uniform, right=True)), tokenizer.vocab_size - 1)
        if chosen == tokenizer.eod:
            break
        ids.append(chosen)
    return ids[len(prompt) :]
