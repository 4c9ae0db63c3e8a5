"""The rotary angles of a configuration: base, share of the channels, and the scaling for sequences longer than those of
the pre-training (interpolated positions, Llama 3.1, YaRN, LongRoPE)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .schema import Config


def rotation(config: Config, length: int, device: torch.device, *, longest: int | None = None) -> tuple[Tensor, Tensor]:
    """(cos, sin), float32 [length, r/2]: the angles of rotary positions 0..length-1. With YaRN and LongRoPE, both are
    multiplied by a factor that sharpens attention over longer sequences.

    longest: the length of the longest sequence that has them, on which LongRoPE's angles depend; default `length`.

    Source: Su et al., "RoFormer", arXiv 2104.09864, with the base, the rotated share and a scaling as options.
    """
    c = config
    channels = c.qk_pos_emb_head_dim if c.multi_latent_attention else c.kv_channels
    percent = 1.0 if c.multi_latent_attention and c.rope_type == "yarn" else c.rotary_percent
    r = int(channels * percent) // 2 * 2
    # float64 on the host, because in float32 the angles of late positions would have few bits after the point.
    frequency = c.rotary_base ** (-torch.arange(0, r, 2, dtype=torch.float64) / r)
    if c.use_rope_scaling:
        frequency = _llama3_frequencies(frequency, c.rope_scaling_factor)
    if c.rope_type == "yarn":
        frequency = _yarn_frequencies(frequency, c)
    if c.rope_type == "longrope":
        exceeds = (longest or length) > c.original_max_position_embeddings
        divisors = c.long_factor if exceeds else c.short_factor
        frequency = frequency / torch.tensor([float(x) for x in divisors], dtype=torch.float64)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency / c.rotary_seq_len_interpolation_factor
    factor = yarn_factor(c, c.mscale) / yarn_factor(c, c.mscale_all_dim) * _longrope_factor(c)
    return (factor * angle.cos()).to(device, torch.float32), (factor * angle.sin()).to(device, torch.float32)


def yarn_factor(c: Config, coefficient: float) -> float:
    """The factor by which YaRN multiplies queries and keys; 1 for other rotary positions.

    Peng et al., arXiv 2309.00071, section 3.4, with DeepSeek-V2's coefficient.
    """
    if c.rope_type != "yarn" or c.rotary_scaling_factor <= 1.0:
        return 1.0
    return 0.1 * coefficient * math.log(c.rotary_scaling_factor) + 1.0


def _longrope_factor(c: Config) -> float:
    """The factor by which LongRoPE multiplies queries and keys, as published with Phi-3 (Ding et al., arXiv
    2402.13753); 1 for other rotary positions."""
    if c.rope_type != "longrope" or c.rotary_scaling_factor <= 1.0:
        return 1.0
    return math.sqrt(1.0 + math.log(c.rotary_scaling_factor) / math.log(c.original_max_position_embeddings))


def _llama3_frequencies(frequency: Tensor, factor: float) -> Tensor:
    """Llama 3.1's scaling of rotary frequencies [r/2] for sequences longer than the 8192 tokens of its pre-training.

    Waves longer than 8192 tokens become `factor` times longer, those shorter than 8192 / 4 stay, and those between are
    interpolated (Meta's llama-models, apply_scaling; Megatron's --use-rope-scaling has the same constants).
    """
    turns = 8192 * frequency / (2 * math.pi)  # of a wave in 8192 tokens
    share = ((turns - 1.0) / (4.0 - 1.0)).clamp(0.0, 1.0)
    return frequency * (share + (1.0 - share) / factor)


def _yarn_frequencies(frequency: Tensor, c: Config) -> Tensor:
    """YaRN's scaling of rotary frequencies [r/2]: those of channels that turn at least beta_fast times in the original
    context stay, those of channels that turn at most beta_slow times are divided by the scaling factor, and those
    between are interpolated by the channel's index (arXiv 2309.00071, section 3.2).

    As in megatron-core and DeepSeek's code, the two channels are rounded outwards.
    """
    half = len(frequency)

    def channel(turns: float) -> float:
        """The channel that turns so often in the original context."""
        return half * math.log(c.original_max_position_embeddings / (turns * 2 * math.pi)) / math.log(c.rotary_base)

    low, high = max(math.floor(channel(c.beta_fast)), 0), min(math.ceil(channel(c.beta_slow)), 2 * half - 1)
    span = high - low if high != low else 0.001
    scaled = ((torch.arange(half, dtype=torch.float64) - low) / span).clamp(0.0, 1.0)
    return frequency * (1.0 - scaled + scaled / c.rotary_scaling_factor)
