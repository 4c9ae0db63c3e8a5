"""megatron-core's self-attention on HAL's ops: flash_attention with windows and grouped heads, and rotary.

Context parallelism passes keys and values in a ring (cp_comm_type "p2p") or exchanges heads for positions ("a2a"), with
Megatron's zigzag distribution of a sequence. Layout [s, b, n, d]; packed sequences [t, n, d].
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
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

import hal
from hal import Comm, HalError, Rng, ops

from ..parallel.context_parallel import Ring, ring_attention, ulysses
from ..parallel.sequence_shard import SequenceShard
from .process_groups import comm_of
from .rng_tracker import next_stream, tracked

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


class HalCoreAttention(MegatronModule):
    """softmax(q k^T) v. A key is visible if the config's `window_size` (pre, next; -1 = unbounded), the mask type and
    the mask, if there is one, allow it. attention_bias, [sq, sk] or [b or 1, n or 1, sq, sk], is added to the scaled
    scores. softmax_type "off-by-one" and "learnable" add one key with the value 0, whose score for every query of a
    head is 0 or the parameter `softmax_offset` [n of this rank].

    Raises HalError with context parallelism for masks, biases, these softmax types, packed sequences, and a
    cp_comm_type other than "p2p" and "a2a"; for biases of packed sequences; and for other softmax types.
    """

    softmax_offset: Tensor | None

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
        self._make_offset()
        self.mask_type, self.scale = attn_mask_type, softmax_scale
        self.p = config.attention_dropout if attention_dropout is None else attention_dropout
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        pre, next_ = config.window_size if windowed else (-1, -1)
        self.window = (None if pre < 0 else pre, None if next_ < 0 else next_)
        self.cp: Comm | None = None
        if config.context_parallel_size > 1:
            if self.softmax_offset is not None:
                raise HalError(f"context parallelism does not support softmax_type={config.softmax_type!r}")
            groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["cp"])
            self.cp = comm_of(groups.cp)
            self.exchange_heads = cp_comm_type == "a2a"
            if cp_comm_type not in (None, "p2p", "a2a"):
                raise HalError(f"context parallelism with cp_comm_type={cp_comm_type!r}: HAL has 'p2p' and 'a2a'")
            if softmax_scale is not None and not self.exchange_heads:
                raise HalError("context parallelism in a ring does not support softmax_scale; use cp_comm_type 'a2a'")

    def _make_offset(self) -> None:
        kind, tp = self.config.softmax_type, self.config.tensor_model_parallel_size
        shape, how = self.config.num_attention_heads // tp, {"device": hal.device(), "dtype": self.config.params_dtype}
        if kind == "vanilla":
            self.softmax_offset = None
        elif kind == "off-by-one":
            self.softmax_offset = torch.zeros(shape, **how)
        elif kind == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.empty(shape, **how))
            if self.config.perform_initialization:
                self.config.init_method(self.softmax_offset)
        else:
            raise HalError(f"HAL's attention has no softmax_type={kind!r}; use 'vanilla', 'off-by-one' or 'learnable'")

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> Any:
        """The learnable offset, split over the tensor-parallel ranks."""
        state = self.state_dict(prefix="", keep_vars=True)
        groups = {} if metadata is None else {"dp_cp_group": metadata["dp_cp_group"]}
        return make_sharded_tensors_for_checkpoint(state, prefix, {"softmax_offset": 0}, sharded_offsets, **groups)

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
        if attention_bias is not None and (packed_seq_params is not None or self.cp is not None):
            raise HalError("HAL's attention has no attention_bias for packed sequences or context parallelism")
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
                    "context parallelism does not support an attention mask: the mask type and the window define what "
                    "is visible. Pass none (Megatron-LM: --no-create-attention-mask-in-dataloader)."
                )
            return self._context_parallel(query, key, value, window)
        return self._whole(query, key, value, window, attention_mask, self._stream(), attention_bias)

    def _stream(self) -> Rng | None:
        """The random stream of this call's dropout, which differs between tensor-parallel ranks."""
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
        bias: Tensor | None = None,
    ) -> Tensor:
        """q [s, b, n, d], k and v [s, b, g, d] -> [s, b, n*d]."""
        return self._attend(q, k, v, window, rng, layout="SBND", mask=mask, bias=bias).flatten(2)

    def _packed(self, q: Tensor, k: Tensor, v: Tensor, window: tuple[int | None, int | None], packed: Any) -> Tensor:
        """q [t, n, d], k and v [t, g, d] of concatenated documents -> [t, n*d]."""
        if self.cp is not None or packed.cu_seqlens_q_padded is not None:
            raise HalError(
                "packed sequences: HAL's attention does not support padding or context parallelism with them"
            )
        lengths = {"cu_seqlens_q": packed.cu_seqlens_q.int(), "cu_seqlens_k": packed.cu_seqlens_kv.int()}
        return self._attend(q, k, v, window, self._stream(), layout="TND", **lengths).flatten(1)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        window: tuple[int | None, int | None],
        rng: Rng | None,
        *,
        layout: str,
        **more: Any,
    ) -> Tensor:
        """HAL's attention of q, k, v in `layout`, with this module's scale, dropout and sinks; the result is like q."""
        if rng is not None:
            more |= {"dropout_p": self.p, "rng": rng}
        if self.softmax_offset is not None:
            more["sinks"] = self.softmax_offset
        pre, next_ = window
        out = ops.flash_attention(q, k, v, layout=layout, pre_tokens=pre, next_tokens=next_, scale=self.scale, **more)
        assert isinstance(out, Tensor)  # a pair only with return_lse
        return out

    def _context_parallel(self, q: Tensor, k: Tensor, v: Tensor, window: tuple[int | None, int | None]) -> Tensor:
        """q [s, b, n, d] and k, v [s, b, g, d] of this rank's part of the sequence -> the result, like q."""
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
        # a2a gathers the sequence in the order of the ranks' zigzag chunks; attention needs it in the original order.
        dealt = torch.cat([SequenceShard.zigzag(s * size, rank, size).positions(q.device) for rank in range(size)])
        in_order = torch.argsort(dealt)
        own = None if rng is None else rng.fork("heads", self.cp.rank)

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.index_select(0, in_order) for x in (q, k, v))
            return self._whole(q, k, v, window, None, own).index_select(0, dealt)

        return ulysses(q, k, v, self.cp, attend)


class HalSelfAttention(SelfAttention):
    """megatron-core's SelfAttention with HAL's rotary op; everything else is inherited.

    Raises HalError for --qk-layernorm if the spec has no such norms: the spec of --spec is built before options are
    read.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.qk_layernorm and isinstance(self.q_layernorm, IdentityOp):
            raise HalError(
                "--qk-layernorm: gpt_layer_spec has no such norms and would train another model; build the model with "
                "hal.model.megatron's gpt_block_spec(config), or leave out --spec"
            )

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None, *args: Any, **kwargs: Any) -> Any:
        self._rotary_cos_sin: tuple[Tensor, Tensor] | None = None
        angles = kwargs.get("rotary_pos_emb")
        plain = kwargs.get("inference_context") is None and kwargs.get("packed_seq_params") is None and not args
        if plain and isinstance(angles, Tensor) and angles.shape[1] == 1 and not self._skips_rotary():
            kwargs["rotary_pos_emb"] = None
            self._rotary_cos_sin = _rotary_cos_sin(angles, self.config.rotary_interleaved)
        return super().forward(hidden_states, attention_mask, *args, **kwargs)

    def _skips_rotary(self) -> bool:
        """Whether megatron-core handles rotary positions itself: in layers without positions, and for YaRN."""
        without = self.config.no_rope_freq and self.config.no_rope_freq[self.layer_number - 1]
        return bool(without) or getattr(self.config, "yarn_rotary_scaling_factor", None) is not None

    def get_query_key_value_tensors(self, *args: Any, **kwargs: Any) -> Any:
        tensors = super().get_query_key_value_tensors(*args, **kwargs)
        if self._rotary_cos_sin is None:
            return tensors
        query, key, *rest = tensors
        cos, sin = self._rotary_cos_sin
        inter = self.config.rotary_interleaved
        return (*(ops.rotary(x, cos, sin, layout="SBND", interleaved=inter) for x in (query, key)), *rest)


def _rotary_cos_sin(angles: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """(cos, sin) [s, r/2] of megatron-core's angles [s, 1, 1, r], which contain each angle twice."""
    flat = angles[:, 0, 0].float()
    half = flat[:, ::2] if interleaved else flat[:, : flat.shape[1] // 2]
    return half.cos().contiguous(), half.sin().contiguous()
