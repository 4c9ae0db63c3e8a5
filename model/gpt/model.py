"""The GPT: GPT-2, Llama and their relatives from one config, with Megatron-core's parameter names and initialisation.

Activations are [s, b, h]. A model may have only a slice of the layers (a pipeline stage); its parameter names are still
those of the full model. All computation goes through `hal.ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import hal.nn
from hal import ops

from ..config.recomputation import chunks
from ..config.rotary import rotation
from ..config.schema import Config
from ..parallel import document_mask
from ..parallel.document_mask import Documents
from ..parallel.kept_inputs import kept_inputs
from ..parallel.sharded_products import column_linear
from ..parallel.tensor_sharding import Parallel, Shard
from .activation_checkpointing import recompute
from .attention import SelfAttention, SharedInputs
from .dropout_rng import DropoutRng
from .float8 import set_products
from .gated_delta_net import GatedDeltaNet
from .latent_attention import LatentAttention
from .layers import UNALLOCATED, Init, Norm, VocabParallelEmbedding, norm_of
from .mlp import MLP
from .moe import MoE

if TYPE_CHECKING:
    from .kv_cache import KeyValueCache

WORD_EMBEDDING = "embedding.word_embeddings.weight"
POSITION_EMBEDDING = "embedding.position_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"
"""Names of parameters. With tied embeddings, OUTPUT_LAYER exists only on a last pipeline stage that lacks the
embedding: it is that stage's copy of WORD_EMBEDDING."""


class PositionEmbedding(hal.nn.Embedding):
    """The table of learned positions [positions, h]."""

    def __init__(self, config: Config, init: Init, name: str) -> None:
        shape = config.max_position_embeddings, config.hidden_size
        super().__init__(*shape, device=UNALLOCATED)
        self.weight = init.weight(f"{name}.weight", shape, config.embedding_init_method_std)


class OutputLayer(hal.nn.Linear):
    """The matrix [v / ranks, h] that computes logits: a separate weight, or the last stage's copy of a tied one."""

    def __init__(self, config: Config, init: Init, tied: bool) -> None:
        std = config.embedding_init_method_std if tied else config.init_method_std
        shape = config.padded_vocab_size, config.hidden_size
        super().__init__(shape[1], shape[0] // init.parallel.tp.size, False, UNALLOCATED)
        # A copy is initialised under the name of the first stage's table, so that both have equal values.
        drawn_as = WORD_EMBEDDING if tied else None
        self.weight = init.weight(OUTPUT_LAYER, shape, std, Shard(0), drawn_as=drawn_as)


class Embedding(nn.Module):
    """tokens [b, s] int64 -> [s, b, h]: word plus learned position embedding (from position `start`), with dropout."""

    def __init__(self, config: Config, init: Init) -> None:
        super().__init__()
        self.word_embeddings = VocabParallelEmbedding(config, init, "embedding.word_embeddings")
        self.position_embeddings: PositionEmbedding | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbedding(config, init, "embedding.position_embeddings")
        self.p, self.parallel, self.dtype = config.hidden_dropout, init.parallel, config.residual_dtype

    def forward(
        self, tokens: Tensor, dropout_rng: DropoutRng | None, start: int = 0, positions: Tensor | None = None
    ) -> Tensor:
        """positions: int64 [b, s] of full sequences; default: consecutive positions from `start`."""
        x: Tensor = self.word_embeddings(tokens.t().contiguous())
        if self.position_embeddings is not None:
            rows = self.parallel.hidden_rows(self.parallel.full_length(x.shape[0]))
            if positions is None:
                x = x + rows.take(self.position_embeddings.weight[start : start + rows.full], 0)[:, None]
            else:
                x = x + self.position_embeddings(rows.take(positions, 1).t().contiguous())
        x = x.to(self.dtype)
        if dropout_rng is not None and self.p > 0.0:
            rng, shape = dropout_rng.hidden("embedding", 0, x.shape)
            x = ops.dropout(x.reshape(shape), self.p, rng).view(x.shape)
        return x


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), or with --use-parallel-residual both of the same x; each sum
    includes bias, dropout and optionally a sandwich norm."""

    def __init__(self, config: Config, init: Init, layer: int) -> None:
        super().__init__()
        name, h = f"decoder.layers.{layer}", config.hidden_size

        def norm(which: str, scale: float = 1.0) -> Norm:
            return norm_of(config, init, f"{name}.{which}", h, scale)

        self.layer, self.p, self.parallel = layer, config.hidden_dropout, init.parallel
        self.parallel_residual, self.multiplier = config.use_parallel_residual, config.residual_multiplier
        self.input_layernorm = norm("input_layernorm")
        linear = config.has_linear_attention(layer)
        attention = GatedDeltaNet if linear else LatentAttention if config.multi_latent_attention else SelfAttention
        self.self_attention = attention(config, init, f"{name}.self_attention", layer)
        self.pre_mlp_layernorm = norm("pre_mlp_layernorm")
        experts = config.has_experts(layer)
        self.mlp: MLP | MoE = MoE(config, init, f"{name}.mlp", layer) if experts else MLP(config, init, f"{name}.mlp")
        self.post_attn_norm: Norm | None = None
        self.post_mlp_layernorm: Norm | None = None
        if config.use_sandwich_norm:
            self.post_attn_norm = norm("post_attn_norm", config.attn_post_norm_scale)
            self.post_mlp_layernorm = norm("post_mlp_layernorm", config.ffn_post_norm_scale)
        self.plain = self.post_attn_norm is None and self.multiplier == 1.0 and init.dtype == config.residual_dtype
        set_products(self, config, layer)

    def forward(self, x: Tensor, shared: SharedInputs) -> Tensor:
        attended, dropout_rng = self.self_attention(self.input_layernorm(x), shared), shared.dropout_rng
        bias = self.self_attention.linear_proj.bias
        if self.parallel_residual:
            normed = self.pre_mlp_layernorm(x)
            x = self._add(attended, bias, x, "attention_output", self.post_attn_norm, dropout_rng)
        elif self.plain and bias is None and (dropout_rng is None or self.p == 0.0):
            normed, x = self.pre_mlp_layernorm.of_sum(attended, x)
        else:
            x = self._add(attended, bias, x, "attention_output", self.post_attn_norm, dropout_rng)
            normed = self.pre_mlp_layernorm(x)
        expanded = self.mlp(normed)
        return self._add(expanded, self.mlp.bias, x, "mlp_output", self.post_mlp_layernorm, dropout_rng)

    def _add(
        self, y: Tensor, bias: Tensor | None, x: Tensor, name: str, norm: Norm | None, dropout_rng: DropoutRng | None
    ) -> Tensor:
        if norm is not None:
            y, bias = norm(y if bias is None else y + bias), None
        if self.multiplier != 1.0:
            y, bias = (y if bias is None else y + bias) * self.multiplier, None
        if dropout_rng is None or self.p == 0.0:
            return ops.bias_dropout_add(y, bias, x)
        rng, shape = dropout_rng.hidden(name, self.layer, y.shape)
        return ops.bias_dropout_add(y.reshape(shape), bias, x.reshape(shape), p=self.p, rng=rng).view(x.shape)


class Decoder(nn.Module):
    """Consecutive layers (global numbers as keys) and, on the last stage, the final norm."""

    def __init__(self, config: Config, init: Init, layers: Sequence[int], final: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): TransformerLayer(config, init, n) for n in layers})
        self.final_layernorm = norm_of(config, init, "decoder.final_layernorm", config.hidden_size) if final else None
        self.chunks, self.kept = chunks(config, list(layers)), kept_inputs(config, init.parallel)

    def forward(self, x: Tensor, shared: SharedInputs) -> Tensor:
        def run(x: Tensor, layers: Sequence[int]) -> Tensor:
            for n in layers:
                x = self.layers[str(n)](x, shared)
            return x

        for layers, on in self.chunks:
            x = recompute(run, x, layers, on=on, kept=self.kept)
        return x if self.final_layernorm is None else self.final_layernorm(x)


class GPT(nn.Module):
    """A GPT or a pipeline stage of one.

    layers: global numbers of the layers to build (default all). first: has the embedding and takes tokens [b, s] (else
    hidden [s, b, h]). last: has the final norm and output layer and returns logits [s, b, v] (else hidden).
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        parallel: Parallel | None = None,
        *,
        layers: Sequence[int] | None = None,
        first: bool = True,
        last: bool = True,
    ) -> None:
        super().__init__()
        init = Init(config.seed, config.params_dtype, device, parallel or Parallel())
        self.config, self.parallel, self.shards = config, init.parallel, init.shards
        self.embedding = Embedding(config, init) if first else None
        self.decoder = Decoder(config, init, range(config.num_layers) if layers is None else layers, last)
        self.tied = not config.untie_embeddings_and_output_weights
        # A last stage without the embedding has its own copy of a tied weight.
        self.output_layer = OutputLayer(config, init, self.tied) if last and not (self.tied and first) else None
        self.last = last
        self._rotary_cos_sin: tuple[Tensor, Tensor] | None = None
        self._angles: tuple[Tensor, Tensor] | None = None

    def forward(
        self,
        x: Tensor,
        dropout_rng: DropoutRng | None = None,
        cache: KeyValueCache | None = None,
        *,
        rows: slice | None = None,
        starts: Tensor | None = None,
        logits: bool = True,
    ) -> Tensor:
        """Logits on the last stage, hidden activations elsewhere and with logits=False.

        dropout_rng: dropout of this microbatch; None = no dropout (evaluation). cache: keys and values of the tokens
        before these. rows: return logits for these positions only. starts: where each token's document begins
        (see document_mask.py), int64 [b, s] of full sequences on the CPU, if Config.has_documents.

        With context parallelism, tokens are this rank's columns (`Parallel.context_rows`) of each sequence.
        """
        s = x.shape[0]  # rows of the activations between layers on this rank
        if self.embedding is not None:
            s = x.shape[1] // (self.parallel.tp.size if self.parallel.sequence else 1)
        full = self.parallel.full_length(s)
        if dropout_rng is not None:
            dropout_rng = replace(dropout_rng, rows=self.parallel.hidden_rows(full))
        if self.embedding is not None:
            x = self.embedding(x, dropout_rng, 0 if cache is None else cache.length, self._positions(starts, x.device))
        rotary_cos_sin = self._rotation(full, x.device, starts) if cache is None else cache.rotary_cos_sin(full)
        documents = None if starts is None or not self.config.separates_documents else Documents.of(starts, x.device)
        x = self.decoder(x, SharedInputs(rotary_cos_sin, dropout_rng, cache, documents))
        if cache is not None:
            cache.advance(full)
        if self.last and rows is not None:
            x = x[rows]
        if not (self.last and logits):
            return x
        y, cap = column_linear(x, self.output_weight(), None, self.parallel), self.config.output_logit_softcapping
        y = y if self.config.output_multiplier_scale == 1.0 else y * self.config.output_multiplier_scale
        return y if cap is None else torch.tanh(y / cap) * cap

    def output_weight(self) -> Tensor:
        """The matrix [v_local, h] that computes logits: the output layer's, or the word embedding's if tied."""
        if self.output_layer is not None:
            return self.output_layer.weight
        assert self.embedding is not None
        return self.embedding.word_embeddings.weight

    def stored_name(self, name: str) -> str:
        """The name of a parameter in checkpoints, where a tied weight is stored once."""
        return WORD_EMBEDDING if self.tied and name == OUTPUT_LAYER else name

    def loss(self, y: Tensor, labels: Tensor, *, inplace_backward: bool = False, hidden: bool = False) -> Tensor:
        """Mean cross entropy (float32 scalar) of y, logits [s, b, v_local], against labels [b, s].

        With Config.ignores_labels, labels document_mask.IGNORED do not count; if no label counts, the mean is 0.
        inplace_backward: the caller does not read the logits again, so the backward pass may overwrite them. hidden: y
        is what the last stage returns with logits=False, and the backend need not keep its logits in memory.
        """
        tp, target, counts = self.parallel.tp, labels.t().contiguous(), None
        if self.config.ignores_labels:
            counts = target != document_mask.IGNORED
            target = target * counts
        rows = self.config.padded_vocab_size // tp.size
        start = tp.rank * rows
        # The ids of this rank that are predicted, which come before those that pad the vocabulary.
        ids = rows if self.config.predicts_padding else min(rows, max(0, self.config.vocabulary - start))
        if hidden:
            x, weight = self.parallel.enter_region(y), self.output_weight()
            weight = weight if ids == rows else weight[:ids]
            losses = ops.linear_cross_entropy(x, weight, target, vocab_start=start, comm=tp)
        else:
            if ids < rows:
                y[..., ids:].fill_(torch.finfo(y.dtype).min)
            losses = ops.cross_entropy(y, target, vocab_start=start, comm=tp, inplace_backward=inplace_backward)
        return losses.mean() if counts is None else (losses * counts).sum() / counts.sum().clamp(min=1)

    def _positions(self, starts: Tensor | None, device: torch.device) -> Tensor | None:
        if starts is None or not self.config.restarts_positions:
            return None
        return hal.to_device(document_mask.positions(starts), device)

    def _rotation(self, full: int, device: torch.device, starts: Tensor | None) -> tuple[Tensor, Tensor] | None:
        if not self.config.rotates:
            return None
        rows, positions = self.parallel.context_rows(full), self._positions(starts, device)
        if positions is not None:
            if self._angles is None or self._angles[0].shape[0] != full:
                self._angles = rotation(self.config, full, device)
            cos, sin = self._angles
            return cos[rows.take(positions, 1)], sin[rows.take(positions, 1)]
        if self._rotary_cos_sin is None or self._rotary_cos_sin[0].shape[0] != rows.count:
            cos, sin = rotation(self.config, full, device)
            self._rotary_cos_sin = rows.take(cos, 0), rows.take(sin, 0)
        return self._rotary_cos_sin


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a full GPT's parameters and buffers. Nothing is allocated."""
    layers = [n for n in range(config.num_layers) if str(n) not in config.noop_layers]
    with torch.device("meta"):
        model = GPT(config, torch.device("meta"), layers=layers)
    return {name: tuple(t.shape) for name, t in model.state_dict().items()}
