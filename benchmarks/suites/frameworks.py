"""Models of transformers, converted by hal.integrations.transformers, against the same models in eager and compiled
torch.

Forward and backward of the loss, float32, on full and on padded sequences. The peers use transformers' default
attention, torch's scaled_dot_product_attention. An absent transformers is reported by the cases, which then have no
figures.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..harness import target
from ..harness.case import OURS, Candidate, Case, Thunk

LAYERS, HIDDEN, HEADS, LENGTH, BATCH, VOCABULARY = 6, 384, 6, 1024, 2, 8192
_FFN = {"llama": 1024, "gpt2": 4 * HIDDEN}
"""The width of the MLP by family; a gated one has three matrices, the other two."""


def model(family: str, length: int = LENGTH, hidden: int = HIDDEN, layers: int = LAYERS) -> Any:
    """A Llama or GPT-2 of transformers on the measured device, without dropout; the same weights at each call."""
    import transformers

    models: Any = transformers  # its types do not describe the keywords and the devices that it takes
    common: dict[str, Any] = {"vocab_size": VOCABULARY, "use_cache": False, "tie_word_embeddings": True}
    torch.manual_seed(0)
    if family == "llama":
        config = models.LlamaConfig(
            hidden_size=hidden,
            intermediate_size=_FFN[family],
            num_hidden_layers=layers,
            num_attention_heads=HEADS,
            max_position_embeddings=length,
            **common,
        )
        return models.LlamaForCausalLM(config).to(target.device())
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    gpt2 = models.GPT2Config(
        n_embd=hidden, n_inner=_FFN[family], n_layer=layers, n_head=HEADS, n_positions=length, **common, **no_dropout
    )
    return models.GPT2LMHeadModel(gpt2).to(target.device())


def batch(padded: bool, length: int = LENGTH) -> dict[str, torch.Tensor]:
    """input_ids, attention_mask and labels [b, s]. No label is predicted from a padding token."""
    ids = torch.randint(VOCABULARY, (BATCH, length), generator=torch.Generator().manual_seed(1))
    mask, labels = torch.ones_like(ids), ids.clone()
    if padded:
        mask[0, : length // 4] = 0
        labels[0, : length // 4 + 1] = -100
    return {n: t.to(target.device()) for n, t in (("input_ids", ids), ("attention_mask", mask), ("labels", labels))}


def flop(family: str) -> float:
    """FLOP of forward and backward: 6 per matrix parameter and token, and attention's seven products over causal
    pairs."""
    matrices = 4 * HIDDEN**2 + (3 if family == "llama" else 2) * HIDDEN * _FFN[family]
    pairs = LENGTH * (LENGTH + 1) // 2
    parameters = LAYERS * matrices + VOCABULARY * HIDDEN
    return float(6 * parameters * BATCH * LENGTH + LAYERS * BATCH * pairs * HIDDEN * 14)


def step_of(module: Any, inputs: dict[str, torch.Tensor]) -> Thunk:
    """A call that computes the loss and the gradients of all parameters, and returns the loss."""

    def step() -> torch.Tensor:
        module.zero_grad(set_to_none=True)
        loss: torch.Tensor = module(**inputs).loss
        torch.autograd.backward(loss)
        return loss.detach()

    return step


def _ours(family: str, padded: bool) -> Thunk:
    from hal.integrations.transformers import convert

    converted = model(family)
    convert(converted, verbose=False)
    return step_of(converted, batch(padded))


def _torch(family: str, padded: bool, compiled: bool) -> Thunk:
    module = model(family)
    return step_of(torch.compile(module, dynamic=False) if compiled else module, batch(padded))


def _case(family: str, padded: bool) -> Case:
    return Case(
        f"transformers {family}",
        f"f32 L{LAYERS} H{HIDDEN} A{HEADS} S{LENGTH} B{BATCH} V{VOCABULARY}{' padded' if padded else ''}",
        {
            OURS: Candidate(partial(_ours, family, padded), "hal"),
            "eager": Candidate(partial(_torch, family, padded, False)),
            "compile": Candidate(partial(_torch, family, padded, True), "compile"),
        },
        # Attention to padding is not computed, so padded cases have no share.
        work=0.0 if padded else flop(family),
        ceiling="" if padded else "GEMM f32",
    )


def cases() -> list[Case]:
    """Forward and backward of both families, with and without padding."""
    return [_case(family, padded) for padded in (False, True) for family in _FFN]
