"""Latent attention (--multi-latent-attention; DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and values of all heads
are up-projections of one latent vector per token. The cache stores that latent and the rotary key: C + P channels.

Parameter names and semantics are megatron-core 0.16.1's (megatron/core/transformer/multi_latent_attention.py).
Shape letters: S sequence, B batch, N query heads of this rank, C channels of the latent (kv_lora_rank), K and E the
channels of a head's keys and values that are made of it (qk_head_dim, v_head_dim), P channels with rotary positions
(qk_pos_emb_head_dim), which all heads share in the keys.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hal import ops
from hal.nn.float8_products import EXACT, ExactProducts

from ..config.rotary import yarn_factor
from ..config.schema import Config
from ..parallel.sharded_products import linear
from .attention import CoreAttention, SharedInputs, output_std
from .layers import ColumnParallelLinear, Init, Norm, RowParallelLinear, norm_of

if TYPE_CHECKING:
    from .kv_cache import KeyValueCache


class DownProjection(nn.Module):
    """x [..., in] -> [..., out] without a bias. The weight [out, in] is replicated on all tensor-parallel ranks,
    because every head reads the complete latent; with sequence parallelism each rank multiplies its own rows."""

    products: ExactProducts = EXACT

    def __init__(self, init: Init, name: str, n_in: int, n_out: int, std: float) -> None:
        super().__init__()
        self.parallel = init.parallel
        self.weight = init.weight(f"{name}.weight", (n_out, n_in), std)

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, products=self.products)


class LatentAttention(nn.Module):
    """hidden [s, b, h] -> [s, b, h], without linear_proj's bias, which the caller fuses with the dropout."""

    def __init__(self, config: Config, init: Init, name: str, layer: int) -> None:
        super().__init__()
        c, h, n, std = config, config.hidden_size, config.num_attention_heads, config.init_method_std
        self.layer, self.parallel = layer, init.parallel
        self.latent, self.position = c.kv_lora_rank, c.qk_pos_emb_head_dim
        self.key, self.value, size = c.qk_head_dim, c.v_head_dim, c.qk_head_dim + c.qk_pos_emb_head_dim

        def column(which: str, n_in: int, n_out: int) -> ColumnParallelLinear:
            return ColumnParallelLinear(init, f"{name}.{which}", n_in, n_out, std=std, bias=False)

        def norm(which: str, channels: int) -> Norm | None:
            if not c.qk_layernorm:
                return None
            return norm_of(c, init, f"{name}.{which}", channels)

        self.linear_q_proj: ColumnParallelLinear | None = None
        if c.q_lora_rank is None:
            self.linear_q_proj = column("linear_q_proj", h, n * size)
        else:
            self.linear_q_down_proj = DownProjection(init, f"{name}.linear_q_down_proj", h, c.q_lora_rank, std)
            self.q_layernorm = norm("q_layernorm", c.q_lora_rank)
            self.linear_q_up_proj = column("linear_q_up_proj", c.q_lora_rank, n * size)
        n_out = self.latent + self.position
        self.linear_kv_down_proj = DownProjection(init, f"{name}.linear_kv_down_proj", h, n_out, std)
        self.kv_layernorm = norm("kv_layernorm", self.latent)
        self.linear_kv_up_proj = column("linear_kv_up_proj", self.latent, n * (self.key + self.value))
        self.linear_proj = RowParallelLinear(
            init, f"{name}.linear_proj", n * self.value, h, std=output_std(c), bias=c.projection_bias
        )
        # YaRN's factor of all channels (mscale_all_dim), squared because queries and keys each have it. The rest of the
        # factor of the rotated channels is in cos and sin (config/rotary.py).
        scale = yarn_factor(c, c.mscale_all_dim) ** 2 / math.sqrt(size)
        self.core_attention = CoreAttention(c, init, layer, scale)

    def forward(self, x: Tensor, shared: SharedInputs) -> Tensor:
        angles, cache = shared.rotary_cos_sin, shared.cache
        assert angles is not None  # see config/latent.py
        q = self._queries(x)
        q = q.view(*q.shape[:2], -1, self.key + self.position)
        q_SBNK, q_SBNP = torch.split(q, [self.key, self.position], -1)
        latent, k = self.linear_kv_down_proj(x).split((self.latent, self.position), -1)
        latent_SBC = latent.contiguous() if self.kv_layernorm is None else self.kv_layernorm(latent.contiguous())
        # The rotary key is the same on all tensor-parallel ranks, and its gradient is a partial sum on each, which is
        # added up like that of a column-parallel layer's input.
        k_SBP = self.parallel.enter_region(k.contiguous())
        # Pairs (2i, 2i+1) as in DeepSeek's weights. megatron-core also separates even and odd channels, in queries and
        # keys alike, so the scores are the same.
        q_SBNP, k_SB1P = (ops.rotary(t, *angles, interleaved=True) for t in (q_SBNP, k_SBP[:, :, None]))
        context = None
        if cache is not None:
            (keys,) = cache.append(self.layer, torch.cat((latent_SBC[:, :, None], k_SB1P), -1))
            if cache.length:
                context = self._absorbed(q_SBNK, q_SBNP, keys, cache)
        if context is None:
            kv = self.linear_kv_up_proj(latent_SBC)
            kv = kv.view(*kv.shape[:2], -1, self.key + self.value)
            k_SBNK, v_SBNE = kv.split((self.key, self.value), -1)
            k_SBNP = k_SB1P.expand(-1, -1, k_SBNK.shape[2], -1)
            q, k = torch.cat((q_SBNK, q_SBNP), -1), torch.cat((k_SBNK, k_SBNP), -1)
            context = self.core_attention(q, k, v_SBNE, shared)
        y: Tensor = self.linear_proj(context)
        return y

    def _queries(self, x: Tensor) -> Tensor:
        """hidden [s, b, h] -> the queries of this rank's heads, [s, b, n*(k+p)]."""
        if self.linear_q_proj is not None:
            return self.linear_q_proj.forward(x)
        latent = self.linear_q_down_proj(x)
        return self.linear_q_up_proj.forward(latent if self.q_layernorm is None else self.q_layernorm(latent))

    def _absorbed(self, q_SBNK: Tensor, q_SBNP: Tensor, keys: Tensor, cache: KeyValueCache) -> Tensor:
        """Attention of new tokens to the cached latents and rotary keys `keys` [skv, b, 1, c+p], by absorption of the
        up-projections into queries and output. q_SBNK and q_SBNP: the queries' two parts. Returns [s, b, n*e].

        A score q . (W_k latent) is (W_k^T q) . latent, and a sum of values W_v latent is W_v times that of latents. So
        the queries are multiplied by W_k instead of the keys, and attention has one key of c+p channels for all
        heads, whose first c channels are the value (arXiv 2405.04434, section 2.1.2).
        """
        s, b, n, _ = q_SBNK.shape
        weight = self.linear_kv_up_proj.weight.view(n, self.key + self.value, self.latent)
        key_NKC, value_NEC = torch.split(weight, [self.key, self.value], 1)
        q_SBNC = (q_SBNK.flatten(0, 1).transpose(0, 1) @ key_NKC).transpose(0, 1).view(s, b, n, -1)
        q = torch.cat((q_SBNC, q_SBNP), -1)
        context = self.core_attention(q, keys, keys[..., : self.latent], SharedInputs(cache=cache))
        context_NSBC = context.reshape(s * b, n, self.latent).transpose(0, 1)
        out_NSBE: Tensor = context_NSBC @ value_NEC.transpose(1, 2)
        return out_NSBE.transpose(0, 1).reshape(s, b, -1)
