"""Self-attention of a GPT: fused QKV in Megatron's order, rotary positions, and attention on one of two paths.

The QKV layer's rows are grouped per key/value head as [its query heads, their output gates if there are any, key,
value], so a slice of groups is a slice of rows. Both paths give the same values, windows and dropout included. Shape
letters: S sequence, B batch, N query heads, G key/value heads, D head size, E head size of the values, R query rows of
a group (N/G * S).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hal import Rng, ops
from hal.ops.attention import band_mask

from ..config.recomputation import recomputes_attention
from ..config.schema import Config
from ..parallel.context_parallel import Ring, ring_attention, ulysses
from ..parallel.document_mask import Documents
from .activation_checkpointing import recompute
from .dropout_rng import DropoutRng
from .layers import ColumnParallelLinear, Init, Norm, RowParallelLinear, norm_of

if TYPE_CHECKING:
    from .kv_cache import KeyValueCache


Window = tuple[int | None, int | None]
"""(pre_tokens, next_tokens) of flash_attention."""
Hidden = Tensor | Documents | None
"""What is hidden in addition to the window's outside: a mask (bool, True = hidden), or all other documents."""


@dataclass(frozen=True)
class SharedInputs:
    """What all layers of one forward pass receive besides the activations.

    rotary_cos_sin: [s, d/2] or [s, b, d/2] each, of this rank's rows. dropout_rng: None = no dropout. cache: keys and
    values of the tokens before these. documents: of full sequences; attention stays within each of them.
    """

    rotary_cos_sin: tuple[Tensor, Tensor] | None = None
    dropout_rng: DropoutRng | None = None
    cache: KeyValueCache | None = None
    documents: Documents | None = None


class SelfAttention(nn.Module):
    """hidden [s, b, h] -> [s, b, h], without linear_proj's bias, which the caller fuses with the dropout."""

    def __init__(self, config: Config, init: Init, name: str, layer: int) -> None:
        super().__init__()
        heads, groups, d = config.num_attention_heads, config.num_query_groups, config.kv_channels
        h, std = config.hidden_size, config.init_method_std
        self.local_groups, self.per_group, self.head_size = groups // init.parallel.tp.size, heads // groups, d
        self.gated = config.attention_output_gate
        n_out = (heads * (1 + self.gated) + 2 * groups) * d
        self.linear_qkv = ColumnParallelLinear(init, f"{name}.linear_qkv", h, n_out, std=std, bias=config.qkv_bias)
        self.linear_proj = RowParallelLinear(
            init, f"{name}.linear_proj", heads * d, h, std=output_std(config), bias=config.projection_bias
        )
        self.q_layernorm: Norm | None = None
        self.k_layernorm: Norm | None = None
        if config.qk_layernorm:
            self.q_layernorm = norm_of(config, init, f"{name}.q_layernorm", d)
            self.k_layernorm = norm_of(config, init, f"{name}.k_layernorm", d)
        self.layer, self.interleaved, self.rotated = layer, config.rotary_interleaved, config.has_rotation(layer)
        self.core_attention = CoreAttention(config, init, layer)

    def forward(self, x: Tensor, shared: SharedInputs) -> Tensor:
        mixed = self.linear_qkv(x)
        s, b, _ = mixed.shape
        mixed = mixed.view(s, b, self.local_groups, -1, self.head_size)
        # The gradient of a split is one concatenation; indexing would create a zero-filled gradient for each part.
        q, *gate, k, v = mixed.split((self.per_group,) * (1 + self.gated) + (1, 1), dim=3)
        q_SBND, k_SBGD, v_SBGD = q.reshape(s, b, -1, self.head_size), k.squeeze(3), v.squeeze(3)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q_SBND, k_SBGD = self.q_layernorm(q_SBND.contiguous()), self.k_layernorm(k_SBGD.contiguous())
        if (angles := shared.rotary_cos_sin) is not None and self.rotated:
            q_SBND, k_SBGD = (ops.rotary(t, *angles, interleaved=self.interleaved) for t in (q_SBND, k_SBGD))
        if shared.cache is not None:
            k_SBGD, v_SBGD = shared.cache.append(self.layer, k_SBGD, v_SBGD)
        context = self.core_attention(q_SBND, k_SBGD, v_SBGD, shared)
        if self.gated:
            context = (context * torch.sigmoid(gate[0].reshape(context.shape).float())).to(context.dtype)
        y: Tensor = self.linear_proj(context)
        return y


class CoreAttention:
    """softmax(scale q k^T) v of this rank's heads. The default of `scale` is --softmax-scale, else 1/sqrt(D)."""

    def __init__(self, config: Config, init: Init, layer: int, scale: float | None = None) -> None:
        self.heads, self.layer, self.p = config.num_attention_heads, layer, config.attention_dropout
        self.first_head = init.parallel.tp.rank * (self.heads // init.parallel.tp.size)
        self.ring, self.ulysses = init.parallel.ring, init.parallel.ulysses
        self.scale, self.softcap = scale or config.softmax_scale, config.attn_logit_softcapping
        self.flash, self.layout, self.window = config.use_flash_attn, config.shape_order, config.window_of(layer)
        self.recompute = recomputes_attention(config, layer)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, shared: SharedInputs) -> Tensor:
        """q [s, b, n, d], k [skv, b, g, d], v [skv, b, g, e] -> [s, b, n*e]; with context parallelism s counts this
        rank's rows. With a cache, k and v are its content, and it determines which are hidden."""
        hidden: Hidden = shared.documents
        window: Window = self.window
        if shared.cache is not None:
            hidden = shared.cache.hidden(q.shape[0], self.window)
            window = (None, None) if hidden is not None else window
        context: Tensor = recompute(self._attend, q, k, v, shared.dropout_rng, hidden, window, on=self.recompute)
        return context

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, dropout_rng: DropoutRng | None, hidden: Hidden, window: Window
    ) -> Tensor:
        """Like `__call__`, over the ranks that share the sequence."""
        first = self.first_head + self.ulysses.rank * (q.shape[2] // self.ulysses.size)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if self.ring.size == 1:
                return self._whole(q, k, v, dropout_rng, first, hidden, window)
            draw, full = None, q.shape[0] * self.ring.size
            if dropout_rng is not None and self.p > 0.0:

                def draw(q_start: int, k_start: int) -> Rng:
                    return dropout_rng.attention(self.layer, self.heads, first, full, full, (q_start, k_start))

            assert not isinstance(hidden, Tensor)  # a cache belongs to a model without context parallelism
            return ring_attention(q, k, v, Ring(self.ring, window, self.p, draw, hidden, self.scale))

        return attend(q, k, v) if self.ulysses.size == 1 else ulysses(q, k, v, self.ulysses, attend)

    def _whole(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_rng: DropoutRng | None,
        first_head: int,
        hidden: Hidden,
        window: Window,
    ) -> Tensor:
        """Attention over full sequences; the first head of q is head `first_head` of the model."""
        dropout: dict[str, Any] = {}
        if dropout_rng is not None and self.p > 0.0:
            rng = dropout_rng.attention(self.layer, self.heads, first_head, q.shape[0], k.shape[0])
            dropout = {"dropout_p": self.p, "rng": rng}
        pre, next_ = window
        how = {"pre_tokens": pre, "next_tokens": next_, "scale": self.scale, "softcap": self.softcap, **dropout}
        if isinstance(hidden, Documents) and self.flash and not dropout:
            return self._packed(q, k, v, hidden, how)
        # Dropout is drawn for [b, n, s, skv], which packed sequences do not have, so it needs a mask.
        mask = hidden.mask() if isinstance(hidden, Documents) else hidden
        if self.flash:
            return self._flash(q, k, v, mask, how)
        return self._softmax(q, k, v, mask, window, dropout)

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, documents: Documents, how: dict[str, Any]) -> Tensor:
        """Like `_whole`, of every document alone, without a mask in memory. how: arguments of flash_attention."""
        s, b, cu = *q.shape[:2], documents.cu_seqlens
        packed = (t.transpose(0, 1).flatten(0, 1) for t in (q, k, v))
        out = ops.flash_attention(*packed, layout="TND", cu_seqlens_q=cu, cu_seqlens_k=cu, **how)
        assert isinstance(out, Tensor)  # the result is a tuple only with return_lse
        return out.reshape(b, s, -1).transpose(0, 1)

    def _flash(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, how: dict[str, Any]) -> Tensor:
        """Like `_whole`, with a single op in the layout --shape-order. how: its other arguments."""
        heads: dict[str, Any] = {"num_heads": q.shape[2], "num_kv_heads": k.shape[2]}
        q, k, v = (_arrange(t, self.layout) for t in (q, k, v))
        out = ops.flash_attention(q, k, v, layout=self.layout, mask=mask, **heads, **how)
        assert isinstance(out, Tensor)  # the result is a tuple only with return_lse
        return _restore(out, self.layout)

    def _softmax(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, window: Window, dropout: dict[str, Any]
    ) -> Tensor:
        """Like `_whole`, with the probabilities [b, n, s, skv] in memory."""
        s, b, n, d = q.shape
        g = k.shape[2]
        # [b, g, (n/g)*s, d], so that the query heads of a group share its keys without copying them.
        q_BGRD = q.view(s, b, g, n // g, d).permute(1, 2, 3, 0, 4).reshape(b, g, n // g * s, d)
        k_BGDS, v_BGSE = k.permute(1, 2, 3, 0), v.permute(1, 2, 0, 3)
        scores, scale = (q_BGRD @ k_BGDS).view(b, n, s, k.shape[0]), self.scale or 1.0 / math.sqrt(d)
        if self.softcap is not None:
            scores, scale = torch.tanh(scores * (scale / self.softcap)) * self.softcap, 1.0
        pre, next_ = window
        causal = next_ == 0
        band = band_mask(s, k.shape[0], pre, None if causal else next_, q.device)
        mask = band if mask is None else mask if band is None else mask | band
        probabilities = ops.scale_mask_softmax(scores, mask, scale, causal)
        if dropout:
            probabilities = ops.dropout(probabilities, dropout["dropout_p"], dropout["rng"])
        context = probabilities.view(b, g, n // g * s, -1) @ v_BGSE
        return context.view(b, n, s, -1).permute(2, 0, 1, 3).reshape(s, b, -1)


def output_std(config: Config) -> float:
    """Standard deviation of the weights of the 2 x num_layers layers that add to the residual stream (as GPT-2)."""
    return config.init_method_std / math.sqrt(2.0 * config.num_layers)


def _arrange(x_SBND: Tensor, layout: str) -> Tensor:
    """x [s, b, n, d] in the order of `layout`; a view except for BSH."""
    x = x_SBND.permute(["SBND".index(dimension) for dimension in layout.replace("H", "ND")])
    return x.flatten(2) if layout.endswith("H") else x


def _restore(x: Tensor, layout: str) -> Tensor:
    """x in the order of `layout` -> [s, b, n*d]."""
    if layout.endswith("H"):
        return x if layout == "SBH" else x.transpose(0, 1)
    return x.permute([layout.index(dimension) for dimension in "SBND"]).flatten(2)
