"""Rules for the options of latent attention and of scaled rotary positions (gpt/latent_attention.py, rotary.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .schema import Config

OPTIONS = "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim"
YARN = "beta_fast beta_slow mscale mscale_all_dim"
LONGROPE = "short_factor long_factor"
"""Names of the options that only latent attention reads, and of those that only YaRN or LongRoPE reads."""


def problems(c: Config) -> Iterator[str]:
    """Contradictions between the options of latent attention, rotary positions, and others."""
    if c.rope_type == "yarn":
        yield from _yarn(c)
    length = c.original_max_position_embeddings
    if c.use_rope_scaling and "original_max_position_embeddings" in c.given and length != 8192:
        yield f"--original-max-position-embeddings {length}: Llama 3.1 has 8192, and so has --use-rope-scaling"
    if c.rope_type == "longrope":
        yield from _longrope(c)
    scaled = {
        "--use-rope-scaling": c.use_rope_scaling,
        f"--rope-type {c.rope_type}": c.rope_type != "rope",
        "--rotary-seq-len-interpolation-factor": c.rotary_seq_len_interpolation_factor != 1.0,
    }
    several = [option for option, on in scaled.items() if on]
    if len(several) > 1 and not (c.multi_latent_attention and c.use_rope_scaling):
        yield f"{' and '.join(several)}: rotary positions are scaled in one way; give one of them"
    if not c.multi_latent_attention:
        return
    if c.rope_type == "longrope":
        yield "--rope-type longrope is for models without --multi-latent-attention; give --rope-type yarn or rope"
    if c.no_rope_freq is not None:
        yield f"--no-rope-freq {c.no_rope_freq} is for models without --multi-latent-attention; remove it"
    if c.num_query_groups != c.num_attention_heads:
        yield (
            f"--multi-latent-attention gives each of {c.num_attention_heads} heads separate keys and values; remove "
            f"--num-query-groups {c.num_query_groups}"
        )
    if c.qk_pos_emb_head_dim % 2:
        yield f"--qk-pos-emb-head-dim {c.qk_pos_emb_head_dim} must be even: rotary positions turn pairs of channels"
    if c.rotary_interleaved:
        yield "--rotary-interleaved: latent attention always rotates channels (2i, 2i+1), as DeepSeek does; remove it"
    if c.use_rope_scaling:
        yield "--use-rope-scaling is for models without --multi-latent-attention; give --rope-type yarn and its options"
    if c.rope_type == "rope" and c.rotary_scaling_factor > 1.0 and c.mscale_all_dim:
        yield (
            f"--mscale-all-dim {c.mscale_all_dim} scales attention for YaRN, but --rope-type is rope; remove it, or "
            "give --rope-type yarn"
        )


def _yarn(c: Config) -> Iterator[str]:
    if c.rotary_base <= 1.0:
        yield f"--rope-type yarn needs a --rotary-base above 1; found {c.rotary_base}"
    if c.beta_fast < c.beta_slow:
        yield f"--beta-fast {c.beta_fast} is below --beta-slow {c.beta_slow}; YaRN keeps what turns often"


def _longrope(c: Config) -> Iterator[str]:
    count = int(c.kv_channels * c.rotary_percent) // 2
    for name in LONGROPE.split():
        values, option = getattr(c, name), f"--{name.replace('_', '-')}"
        try:
            wrong = len(values) != count or not all(0.0 < float(x) < float("inf") for x in values)
        except ValueError:
            wrong = True
        if wrong:
            shown = ",".join(map(str, values))[:60] or "none"
            yield f"--rope-type longrope needs {count} positive numbers in {option}; found {shown}"
    if c.original_max_position_embeddings < 2:
        yield "--rope-type longrope needs --original-max-position-embeddings of at least 2"


def readers(c: Config) -> Iterator[tuple[str, bool, str]]:
    """(names of options, whether the run reads them, what would read them)."""
    yield OPTIONS, c.multi_latent_attention, "--multi-latent-attention"
    yarn, longrope = c.rope_type == "yarn", c.rope_type == "longrope"
    yield "rope_type rotary_seq_len_interpolation_factor", c.rotates, "rotary positions"
    whole = c.multi_latent_attention and yarn
    yield "rotary_percent", not whole, "attention without --multi-latent-attention and --rope-type yarn"
    yield YARN, yarn, "--rope-type yarn"
    yield LONGROPE, longrope, "--rope-type longrope"
    yield "rotary_scaling_factor", yarn or longrope, "--rope-type yarn or longrope"
    extended = yarn or longrope or c.use_rope_scaling
    yield "original_max_position_embeddings", extended, "--rope-type yarn or longrope, or --use-rope-scaling"
    yield "kv_channels add_qkv_bias", not c.multi_latent_attention, "attention without --multi-latent-attention"
