"""Latent attention on one rank of a layout: parameters, activations, traffic and floating-point operations of a layer.

The terms are those of model/gpt/latent_attention.py, with its letters: n query heads on this rank, C channels of the
latent of keys and values, P rotated channels, heads of K + P channels in queries and keys and E in values. Without
--q-lora-rank the queries are products of the hidden state instead of a latent.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...config.flops import attention_weights
from ...config.schema import Config

STATISTIC = 4
"""Bytes of a norm's statistic, which is float32 in any model."""


@dataclass(frozen=True)
class Latent:
    """The latent attention of one layer on a rank. rows: tokens of a microbatch in attention; hidden_rows: those whose
    latents this rank computes, which are fewer with sequence parallelism. heads: n. element: bytes of an activation."""

    config: Config
    tp: int
    rows: int
    hidden_rows: int
    heads: int
    element: int

    @staticmethod
    def of(c: Config, tp: int, hidden_rows: int, rows: int) -> Latent | None:
        """The latent attention of a config; None if its attention is of another kind."""
        if not c.multi_latent_attention:
            return None
        b, heads = c.micro_batch_size, c.num_attention_heads // tp
        return Latent(c, tp, rows * b, hidden_rows * b, heads, c.params_dtype.itemsize)

    @property
    def _expanded(self) -> int:
        """Channels of the product that keys and values are made of."""
        return self.heads * (self.config.qk_head_dim + self.config.v_head_dim)

    @property
    def _norms(self) -> int:
        """Channels of the normed latents."""
        return (self.config.q_lora_rank or 0) + self.config.kv_lora_rank if self.config.qk_layernorm else 0

    @property
    def down(self) -> int:
        """Parameters of the down projections, which tensor-parallel ranks hold alike."""
        c = self.config
        return c.hidden_size * ((c.q_lora_rank or 0) + c.kv_lora_rank + c.qk_pos_emb_head_dim)

    def parameters(self) -> int:
        """Parameters of the projections and their norms on this rank, without linear_proj's bias."""
        per_channel = 2 if self.config.normalization == "LayerNorm" else 1
        return attention_weights(self.config, self.tp) + per_channel * self._norms

    def latents(self) -> int:
        """Bytes of the latents that are kept: inputs of the up projections, and with norms those of the norms too."""
        c = self.config
        kept = (c.q_lora_rank or 0) + c.kv_lora_rank + self._norms
        per_row = (2 if c.normalization == "LayerNorm" else 1) * STATISTIC
        norms = (1 + (c.q_lora_rank is not None)) * c.qk_layernorm
        return self.hidden_rows * (kept * self.element + norms * per_row)

    def heads_kept(self, selective: bool) -> int:
        """Bytes of queries, keys and values that attention keeps for its backward pass, unless it is recomputed
        (selective). Queries and keys are concatenations; values are a copy, or a view that keeps the product with which
        they share memory."""
        c = self.config
        qk, v = c.head_sizes
        # A ring and every layout but SBH and BSH take views.
        copied = c.use_flash_attn and not selective and self._copies
        return self.rows * self.element * (2 * self.heads * qk + (self.heads * v if copied else self._expanded))

    @property
    def _copies(self) -> bool:
        """Whether attention's arguments are copies of what the projections give."""
        c = self.config
        if c.context_parallel_size > 1:
            return c.ulysses_degree > 1
        return c.use_flash_attn and c.shape_order in ("SBH", "BSH")

    def recomputed(self) -> int:
        """Bytes of the arguments that selective recomputation makes again in the backward pass."""
        c = self.config
        qk, v = c.head_sizes
        if not self._copies:
            return 0
        views = c.context_parallel_size == 1 and c.shape_order == "SBH"
        return self.rows * self.element * self.heads * (v + (0 if views else 2 * qk))

    def working(self) -> int:
        """Bytes of the gradients of queries, keys, values and of the product that keys and values are made of."""
        qk, v = self.config.head_sizes
        return self.rows * self.element * (self.heads * (2 * qk + v) + self._expanded)

    def entered(self) -> int:
        """Channels per token that enter the tensor-parallel region: the latents and the keys' rotated channels."""
        c = self.config
        return (c.hidden_size if c.q_lora_rank is None else c.q_lora_rank) + c.kv_lora_rank + c.qk_pos_emb_head_dim

    def gathered_again(self) -> int:
        """Of these, inputs of column-parallel products, which sequence parallelism gathers for weight gradients."""
        return self.entered() - self.config.qk_pos_emb_head_dim

    def products(self) -> float:
        """FLOP of the matrix products of one forward pass of a microbatch, without the scores."""
        split = attention_weights(self.config, self.tp) - self.down
        return 2.0 * (self.rows * split + self.hidden_rows * self.down)

    def moved(self) -> int:
        """Bytes that norms, rotations and concatenations of a forward pass read and write."""
        qk, _ = self.config.head_sizes
        return self.element * (self.hidden_rows * 2 * self.entered() + self.rows * 2 * (2 * self.heads * qk))
