"""Linear attention by the gated delta rule (--experimental-attention-variant gated_delta_net; Yang, Kautz and
Hatamizadeh, "Gated Delta Networks", arXiv 2412.06464), as in megatron-core 0.16.1
(megatron/core/ssm/gated_delta_net.py) and Qwen3-Next.

A head keeps a state of [key, value] channels instead of the keys and values of all tokens: for every token t

    S_t = a_t S_{t-1} + b_t k_t (v_t - (a_t S_{t-1})^T k_t)^T,    out_t = S_t^T q_t / sqrt(key channels)

with decays a_t and step sizes b_t in (0, 1) that depend on the token.

Shape letters: S sequence, B batch, G key heads of this rank, P value heads per key head, K and V channels of a key and
a value, C channels per key head that the convolution mixes (2 K + P V), N chunks, L tokens of a chunk.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..config.schema import Config
from ..parallel.tensor_sharding import Shard
from .attention import SharedInputs, output_std
from .layers import ColumnParallelLinear, Init, RowParallelLinear, norm_of

CHUNK = 64
"""Tokens that are computed by matrix products at once, a power of two. Longer chunks have larger triangular systems,
shorter ones more steps."""


class GatedDeltaNet(nn.Module):
    """hidden [s, b, h] -> [s, b, h].

    The rows of in_proj are grouped per key head as [query, key, its values, its output gates, a step size and a decay
    for each value], so that a slice of heads is a slice of rows.
    """

    def __init__(self, config: Config, init: Init, name: str, layer: int) -> None:
        super().__init__()
        c, groups, heads = config, config.linear_num_key_heads, config.linear_num_value_heads
        self.layer, self.key, self.value = layer, c.linear_key_head_dim, c.linear_value_head_dim
        self.per_group, self.groups = heads // groups, groups // init.parallel.tp.size
        self.mixed = 2 * self.key + self.per_group * self.value
        rows = groups * (self.mixed + self.per_group * (self.value + 2))
        self.in_proj = ColumnParallelLinear(
            init, f"{name}.in_proj", c.hidden_size, rows, std=c.init_method_std, bias=False
        )
        kernel = c.linear_conv_kernel_dim
        # torch's initialisation of a convolution with one input channel per output channel.
        drawn = _uniform(init, f"{name}.conv_weight", (groups * self.mixed, kernel))
        self.conv_weight = init.place(f"{name}.conv_weight", (2 * drawn - 1) / math.sqrt(kernel), Shard(0))
        self.dt_bias = init.constant(f"{name}.dt_bias", (heads,), 1.0, Shard(0))
        decay = 1 + 15 * _uniform(init, f"{name}.A_log", (heads,))
        self.A_log = init.place(f"{name}.A_log", decay.log(), Shard(0))
        self.out_norm = norm_of(c, init, f"{name}.out_norm", self.value)
        self.linear_proj = RowParallelLinear(
            init, f"{name}.linear_proj", heads * self.value, c.hidden_size, std=output_std(c), bias=False
        )

    def forward(self, x: Tensor, shared: SharedInputs) -> Tensor:
        y = self.in_proj(x)
        first, (s, b, _) = 0, y.shape
        sizes = self.mixed, self.per_group * self.value, 2 * self.per_group
        mixed_SBGC, gate, rates = y.view(s, b, self.groups, -1).split(sizes, -1)
        if shared.cache is not None:
            # Of earlier tokens the inputs of the recurrence are stored, not the state: the cache may forget its last
            # tokens again. Rows after the new tokens complete a bucket, and no token sees what comes after it.
            first = shared.cache.length
            mixed_SBGC, rates = shared.cache.append(self.layer, mixed_SBGC, rates)
        q_SBGK, k_SBGK, values = torch.split(self._convolved(mixed_SBGC), [self.key, self.key, sizes[1]], -1)
        step, decay = rates.float().unflatten(-1, (2, self.per_group)).unbind(-2)
        decay = -self._by_group(self.A_log).exp() * _softplus(decay + self._by_group(self.dt_bias))
        out = gated_delta_rule(
            _normalised(q_SBGK).permute(1, 2, 0, 3)[:, :, None],
            _normalised(k_SBGK).permute(1, 2, 0, 3)[:, :, None],
            values.view(*values.shape[:3], self.per_group, self.value).permute(1, 2, 3, 0, 4),
            decay.permute(1, 2, 3, 0),
            step.sigmoid().permute(1, 2, 3, 0),
        )
        out = out[:, :, :, first : first + s].permute(3, 0, 1, 2, 4).to(x.dtype)
        gate = gate.unflatten(-1, (self.per_group, self.value))
        normed = self.out_norm(out.contiguous()) * nn.functional.silu(gate.float())
        result: Tensor = self.linear_proj(normed.to(x.dtype).flatten(2))
        return result

    def _by_group(self, x: Tensor) -> Tensor:
        """A parameter per value head as float32 [g, p]."""
        return x.float().view(self.groups, self.per_group)

    def _convolved(self, x_SBGC: Tensor) -> Tensor:
        """silu of a causal convolution of every channel with its own weights; float32 [s, b, g, c]."""
        s, kernel = x_SBGC.shape[0], self.conv_weight.shape[1]
        padded = torch.cat((x_SBGC.new_zeros(kernel - 1, *x_SBGC.shape[1:]), x_SBGC)).float()
        weight = self.conv_weight.float().view(self.groups, self.mixed, kernel)
        y = padded[:s] * weight[..., 0]
        for n in range(1, kernel):
            y = y + padded[n : n + s] * weight[..., n]
        return nn.functional.silu(y)


def _uniform(init: Init, name: str, shape: tuple[int, ...]) -> Tensor:
    """The values of a parameter, uniform in (0, 1): the distribution function of a normal draw."""
    drawn: Tensor = torch.special.ndtr(init.draw(name, shape, 1.0))
    return drawn


def _softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), of operations that every device has; its gradient at 0 is 1/2."""
    size = x.abs()
    return (x + size) / 2 + torch.log1p(torch.exp(-size))


def _normalised(x: Tensor) -> Tensor:
    """x [..., k] of length 1, with the epsilon of megatron-core and Qwen3-Next."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def gated_delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, step: Tensor) -> Tensor:
    """The recurrence of this module's docstring, for all tokens of a sequence, float32.

    q, k [b, g, 1 or p, s, k]; v [b, g, p, s, v]; decay = log a and step = b [b, g, p, s]. Returns [b, g, p, s, v].

    Section 3.3 of the paper, in chunks of L tokens: within a chunk, the updates that depend on each other are a unit
    lower triangular system, whose inverse makes all of them products of matrices. Chunks pass the state on.
    """
    s, b, g, p = v.shape[3], *v.shape[:3]
    q, k, v = (_chunked(x.float()) for x in (q / math.sqrt(q.shape[-1]), k, v))
    decay, step = (_chunked(x[..., None].float()).squeeze(-1) for x in (decay, step))
    total = decay.cumsum(-1)  # log of the decay from the chunk's beginning
    lower = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=v.device).tril()
    # exp(total_i - total_j) for j <= i; hidden before exp, which would overflow above the diagonal.
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~lower, -math.inf).exp()
    scaled = step[..., None] * k
    inverse = _unit_lower_inverse((scaled @ k.mT * between).tril(-1))
    new_values = inverse @ (step[..., None] * v)
    seen = inverse @ (scaled * total.exp()[..., None])  # what the updates read of the state before the chunk
    scores = q @ k.mT * between
    queries, rest = q * total.exp()[..., None], (total[..., -1:] - total).exp()
    state, results = v.new_zeros(b, g, p, k.shape[-1], v.shape[-1]), []
    for n in range(v.shape[3]):
        updates = new_values[:, :, :, n] - seen[:, :, :, n] @ state
        results.append(queries[:, :, :, n] @ state + scores[:, :, :, n] @ updates)
        kept = total[:, :, :, n, -1].exp()[..., None, None]
        state = kept * state + (k[:, :, :, n] * rest[:, :, :, n, :, None]).mT @ updates
    return torch.cat(results, 3)[:, :, :, :s]


def _chunked(x: Tensor) -> Tensor:
    """[b, g, p, s, d] -> [b, g, p, n, l, d], filled up with zeros, which neither decay nor change the state."""
    missing = x.new_zeros(*x.shape[:3], -x.shape[3] % CHUNK, x.shape[-1])
    return torch.cat((x, missing), 3).view(*x.shape[:3], -1, CHUNK, x.shape[-1])


def _unit_lower_inverse(below: Tensor) -> Tensor:
    """(1 + below)^-1 for strictly lower triangular `below` [..., l, l], where l is a power of two.

    Inverses of diagonal blocks of twice the size are made of those of the two halves X and Y and the block B below the
    diagonal: [[X, 0], [-Y B X, Y]]. This is as stable as substitution, in log2(l) steps. With the inverses so far in
    one block-diagonal matrix D, and all blocks B of a size in another, a step is D - D B D.
    """
    length = below.shape[-1]
    rows = torch.arange(length, device=below.device)
    inverse = torch.eye(length, dtype=below.dtype, device=below.device).expand_as(below)
    size = 1
    while size < length:
        block = rows // size
        corner = (block[:, None] // 2 == block // 2) & (block[:, None] > block)
        inverse = inverse - inverse @ (below * corner) @ inverse
        size *= 2
    return inverse
