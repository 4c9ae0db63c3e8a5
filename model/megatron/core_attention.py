"""megatron-core's self-attention on HAL's ops: flash_attention with windows and grouped heads, and rotary.

With context parallelism keys travel in a ring (cp_comm_type "p2p") or heads change hands ("a2a"), over the balanced
chunks in which Megatron deals a sequence. Layout [s, b, n, d]; packed sequences [t, n, d].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from hal import Comm, HalError, Rng, ops

from ..parallel.context import Ring, ring_attention, ulysses
from ..parallel.rows import Rows
from .comms import comm_of
from .draws import next_stream, tracked

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


class HalCoreAttention(MegatronModule):
    """softmax(q k^T) v. Windows are the config's `window_size` (pre, next; -1 = unbounded), together with the mask
    type and, if one is given, the mask.

    Raises HalError for what flash_attention does not have (sink softmax, attention bias), and with context parallelism
    for masks, packed sequences, and ways to communicate other than "p2p" and "a2a".
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        if config.softmax_type != "vanilla":
            raise HalError(f"HAL's attention has no softmax_type={config.softmax_type!r}; use 'vanilla'")
        self.mask_type, self.scale = attn_mask_type, softmax_scale
        self.p = config.attention_dropout if attention_dropout is None else attention_dropout
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        pre, next_ = config.window_size if windowed else (-1, -1)
        self.window = (None if pre < 0 else pre, None if next_ < 0 else next_)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.heads, self.tp_rank = config.num_attention_heads, groups.tp.rank()
        self.cp: Comm | None = None
        if config.context_parallel_size > 1:
            self.cp = comm_of(groups.cp)
            self.exchange_heads = cp_comm_type == "a2a"
            if cp_comm_type not in (None, "p2p", "a2a"):
                raise HalError(f"context parallelism with cp_comm_type={cp_comm_type!r}: HAL has 'p2p' and 'a2a'")
            if softmax_scale is not None and not self.exchange_heads:
                raise HalError("context parallelism in a ring takes no softmax_scale; use cp_comm_type 'a2a'")

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        if attention_bias is not None:
            raise HalError("HAL's attention takes no attention_bias")
        mask_type = self.mask_type if attn_mask_type is None else attn_mask_type
        pre, next_ = self.window
        if mask_type in _CAUSAL:
            next_ = 0 if next_ is None else min(next_, 0)
        window = (pre, next_)
        if packed_seq_params is not None:
            return self._packed(query, key, value, window, packed_seq_params)
        if self.cp is not None:
            if attention_mask is not None:
                raise HalError(
                    "context parallelism takes no attention mask: the mask type and the window say what is visible. "
                    "Pass none (Megatron-LM: --no-create-attention-mask-in-dataloader)."
                )
            return self._shared(query, key, value, window)
        return self._whole(query, key, value, window, attention_mask, self._stream())

    def _stream(self) -> Rng | None:
        """This call's dropout, another one for each tensor-parallel rank."""
        if not self.training or self.p == 0.0:
            return None
        with tracked(self.config):
            return next_stream()

    def _whole(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: tuple[int | None, int | None],
        mask: Tensor | None,
        rng: Rng | None,
    ) -> Tensor:
        out: Tensor = ops.flash_attention(
            q,
            k,
            v,
            layout="SBND",
            pre_tokens=window[0],
            next_tokens=window[1],
            mask=mask,
            scale=self.scale,
            **_dropout(self.p, rng),
        )
        return out.flatten(2)

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, window: tuple[int | None, int | None], packed: Any) -> Tensor:
        if self.cp is not None or packed.cu_seqlens_q_padded is not None:
            raise HalError("packed sequences: HAL's attention takes none with padding or context parallelism")
        out: Tensor = ops.flash_attention(
            q,
            k,
            v,
            layout="TND",
            pre_tokens=window[0],
            next_tokens=window[1],
            scale=self.scale,
            cu_seqlens_q=packed.cu_seqlens_q.int(),
            cu_seqlens_k=packed.cu_seqlens_kv.int(),
            **_dropout(self.p, self._stream()),
        )
        return out.flatten(1)

    def _shared(self, q: Tensor, k: Tensor, v: Tensor, window: tuple[int | None, int | None]) -> Tensor:
        assert self.cp is not None
        rng, (s, b, n, _), size = self._stream(), q.shape, self.cp.size
        if not self.exchange_heads:
            draw: Callable[[int, int], Rng] | None = None
            if rng is not None:
                whole = (b, n, s * size, s * size)
                draw = lambda q_start, k_start: rng.block(whole, (0, 0, q_start, k_start))  # noqa: E731
            return ring_attention(q, k, v, Ring(self.cp, window, self.p, draw))
        if k.shape[2] % size:
            raise HalError(f"cp_comm_type 'a2a': {size} ranks cannot share {k.shape[2]} key/value heads; use 'p2p'")
        dealt = torch.cat([Rows.balanced(s * size, rank, size).positions(q.device) for rank in range(size)])
        in_order = torch.argsort(dealt)
        own = None if rng is None else rng.fork("heads", self.cp.rank)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            ordered = (x.index_select(0, in_order) for x in (q, k, v))
            return self._whole(*ordered, window, None, own).index_select(0, dealt)

        return ulysses(q, k, v, self.cp, attend)


class HalSelfAttention(SelfAttention):
    """megatron-core's SelfAttention whose rotary positions are HAL's op; everything else is inherited.

    Raises HalError for --qk-layernorm without the norms: the spec that --spec names is made before options are read.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.qk_layernorm and isinstance(self.q_layernorm, IdentityOp):
            raise HalError(
                "--qk-layernorm: gpt_layer_spec has no such norms and would train another model; build the model with "
                "hal.model.megatron's gpt_block_spec(config), or leave out --spec"
            )

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        self._turn = None
        angles = kwargs.get("rotary_pos_emb")
        plain = kwargs.get("inference_context") is None and kwargs.get("packed_seq_params") is None and not args
        if plain and isinstance(angles, Tensor) and angles.shape[1] == 1 and not self._skips_rotary():
            kwargs["rotary_pos_emb"] = None
            self._turn = _turn(angles, self.config.rotary_interleaved)
        return super().forward(hidden_states, attention_mask, *args, **kwargs)

    def _skips_rotary(self) -> bool:
        """Layers without positions, and YaRN's attention factor, stay megatron-core's business."""
        without = self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1]
        return bool(without) or getattr(self.config, "yarn_rotary_scaling_factor", None) is not None

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        found = super().get_query_key_value_tensors(*args, **kwargs)
        if self._turn is None:
            return found
        query, key, *rest = found
        inter = self.config.rotary_interleaved
        return (*(ops.rotary(x, *self._turn, layout="SBND", interleaved=inter) for x in (query, key)), *rest)


def _turn(angles: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """(cos, sin) [s, r/2] of megatron-core's angles [s, 1, 1, r], which hold each angle twice."""
    flat = angles[:, 0, 0].float()
    half = flat[:, ::2] if interleaved else flat[:, : flat.shape[1] // 2]
    return half.cos().contiguous(), half.sin().contiguous()


def _dropout(p: float, rng: Rng | None) -> dict[str, Any]:
    return {} if rng is None else {"dropout_p": p, "rng": rng}
