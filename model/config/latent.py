"""Rules for the options of latent attention and of YaRN's rotary positions (gpt/latent_attention.py, rotary.py)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .schema import Config

OPTIONS = "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type"
YARN = "rotary_scaling_factor beta_fast beta_slow mscale mscale_all_dim"
"""Names of the options that only latent attention reads, and of those that only YaRN reads."""


def problems(c: Config) -> Iterator[str]:
    """Contradictions between the options of latent attention, rotary positions, and others."""
    if c.rope_type == "yarn":
        yield from _yarn(c)
    length = c.original_max_position_embeddings
    if c.use_rope_scaling and "original_max_position_embeddings" in c.given and length != 8192:
        yield f"--original-max-position-embeddings {length}: Llama 3.1 has 8192, and so has --use-rope-scaling"
    if not c.multi_latent_attention:
        if c.rope_type == "yarn":
            yield "--rope-type yarn needs --multi-latent-attention; other attention has plain rotary positions (rope)"
        return
    if c.position_embedding_type != "rope":
        yield (
            f"--multi-latent-attention rotates {c.qk_pos_emb_head_dim} channels of each head by position, and takes no "
            f"--position-embedding-type {c.position_embedding_type}; give --position-embedding-type rope"
        )
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


def readers(c: Config) -> Iterator[tuple[str, bool, str]]:
    """(names of options, whether the run reads them, what would read them)."""
    yield OPTIONS, c.multi_latent_attention, "--multi-latent-attention"
    yarn = c.rope_type == "yarn"
    yield YARN, yarn, "--multi-latent-attention with --rope-type yarn"
    yield "original_max_position_embeddings", yarn or c.use_rope_scaling, "--rope-type yarn or --use-rope-scaling"
    yield "rotary_percent", c.rope_type == "rope", "--rope-type rope"
    yield "kv_channels add_qkv_bias", not c.multi_latent_attention, "attention without --multi-latent-attention"
