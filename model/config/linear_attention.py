"""Rules for the options of layers with linear attention (gpt/gated_delta_net.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from .experts import layer_pattern

if TYPE_CHECKING:
    from .schema import Config

OPTIONS = (
    "linear_attention_freq linear_conv_kernel_dim linear_key_head_dim linear_value_head_dim linear_num_key_heads "
    "linear_num_value_heads"
)
"""Names of the options that only a model with --experimental-attention-variant gated_delta_net reads."""


def is_linear(c: Config, layer: int) -> bool:
    """Whether layer number `layer` has linear attention: all but every N-th, or those of a list."""
    if c.experimental_attention_variant is None:
        return False
    frequency = str(c.linear_attention_freq)
    return layer_pattern(frequency, c.num_layers, last=True)[layer] != frequency.strip().isdigit()


def problems(c: Config) -> Iterator[str]:
    """Contradictions between the options of linear attention and others."""
    if c.experimental_attention_variant is None:
        return
    try:
        layer_pattern(str(c.linear_attention_freq), c.num_layers, last=True)
    except ValueError as error:
        yield (
            f"--experimental-attention-variant {c.experimental_attention_variant} needs --linear-attention-freq, the "
            f"layers with linear attention: {error}"
        )
    keys, values, tp = c.linear_num_key_heads, c.linear_num_value_heads, c.tensor_model_parallel_size
    if keys < 1 or values % keys:
        yield f"--linear-num-value-heads {values} is not divisible by --linear-num-key-heads {keys}"
    elif keys % tp:
        yield f"--linear-num-key-heads {keys} is not divisible by --tensor-model-parallel-size {tp}"
    if not c.swiglu:
        yield (
            "--experimental-attention-variant gated_delta_net uses the MLP's activation, and only silu is available; "
            "give --swiglu"
        )
    others = {
        "--multi-latent-attention": c.multi_latent_attention,
        f"--context-parallel-size {c.context_parallel_size}": c.context_parallel_size > 1,
        "--reset-attention-mask": c.reset_attention_mask,
        "--sft": c.sft,
        "--fp8-format": c.fp8_format is not None,
    }
    given = [option for option, on in others.items() if on]
    if given:
        yield (
            f"--experimental-attention-variant gated_delta_net keeps one state for the whole sequence, in the model's "
            f"dtype, and cannot follow {', '.join(given)}; remove one of them"
        )


def readers(c: Config) -> Iterator[tuple[str, bool, str]]:
    """(names of options, whether the run reads them, what would read them)."""
    yield OPTIONS, c.experimental_attention_variant is not None, "--experimental-attention-variant gated_delta_net"
    yield "moe_shared_expert_gate", c.moe_shared_expert_intermediate_size is not None, "a shared expert"
    yield "apply_wd_to_qk_layernorm", c.qk_layernorm, "--qk-layernorm"
    yield "attention_output_gate", not c.multi_latent_attention, "attention without --multi-latent-attention"
