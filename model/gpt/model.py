"""The GPT: GPT-2 and Llama shapes from one config, with Megatron-core's parameter names and initialisation.

Activations are [s, b, h]. A model may hold a slice of the layers (a pipeline stage); parameter names are those of the
whole model whatever it holds. Everything computed here goes through `hal.ops`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hal import ops

from . import documents
from .attention import SelfAttention, rotation
from .config import Config
from .draws import Draws
from .layers import Init, Norm, Parallel, Shard, VocabParallelEmbedding, column_linear
from .mlp import MLP
from .recompute import recompute

if TYPE_CHECKING:
    from .cache import KeyValueCache


class Embedding(nn.Module):
    """tokens [b, s] int64 -> [s, b, h]: word plus learned position (of `start` and on), with dropout."""

    def __init__(self, config: Config, init: Init) -> None:
        super().__init__()
        h, std = config.hidden_size, config.embedding_init_method_std
        assert config.max_position_embeddings is not None and std is not None
        self.word_embeddings = VocabParallelEmbedding(
            init, "embedding.word_embeddings", config.padded_vocab_size, h, std=std
        )
        self.position_embeddings: nn.Module | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = nn.Module()
            self.position_embeddings.weight = init.weight(
                "embedding.position_embeddings.weight", (config.max_position_embeddings, h), std
            )
        self.p, self.parallel = config.hidden_dropout, init.parallel

    def forward(self, tokens: Tensor, draws: Draws | None, start: int = 0, positions: Tensor | None = None) -> Tensor:
        """positions: int64 [b, s] of whole sequences; default: those from `start` on."""
        x = self.word_embeddings(tokens.t().contiguous())
        if self.position_embeddings is not None:
            rows, weight = (
                self.parallel.hidden_rows(self.parallel.full_length(x.shape[0])),
                self.position_embeddings.weight,
            )
            if positions is None:
                x = x + rows.take(weight[start : start + rows.full], 0)[:, None]
            else:
                x = x + ops.embedding(weight, rows.take(positions, 1).t().contiguous())
        if draws is not None and self.p > 0.0:
            rng, seen = draws.hidden("embedding", 0, x.shape)
            x = ops.dropout(x.reshape(seen), self.p, rng).view(x.shape)
        return x


class TransformerLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); each addition with bias, dropout and, if asked, a norm before."""

    def __init__(self, config: Config, init: Init, layer: int) -> None:
        super().__init__()
        name, h = f"decoder.layers.{layer}", config.hidden_size

        def norm(which: str, scale: float = 1.0) -> Norm:
            return Norm(init, f"{name}.{which}", h, kind=config.normalization, eps=config.norm_epsilon, scale=scale)

        self.layer, self.p, self.parallel = layer, config.hidden_dropout, init.parallel
        self.input_layernorm = norm("input_layernorm")
        self.self_attention = SelfAttention(config, init, f"{name}.self_attention", layer)
        self.pre_mlp_layernorm = norm("pre_mlp_layernorm")
        self.mlp = MLP(config, init, f"{name}.mlp")
        self.post_attn_norm = self.post_mlp_layernorm = None
        if config.use_sandwich_norm:
            self.post_attn_norm = norm("post_attn_norm", config.attn_post_norm_scale)
            self.post_mlp_layernorm = norm("post_mlp_layernorm", config.ffn_post_norm_scale)

    def forward(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor] | None,
        draws: Draws | None,
        cache: KeyValueCache | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        attended = self.self_attention(self.input_layernorm(x), turn, draws, cache, mask)
        x = self._add(attended, self.self_attention.linear_proj.bias, x, "attention_output", self.post_attn_norm, draws)
        expanded = self.mlp(self.pre_mlp_layernorm(x))
        return self._add(expanded, self.mlp.linear_fc2.bias, x, "mlp_output", self.post_mlp_layernorm, draws)

    def _add(
        self, y: Tensor, bias: Tensor | None, x: Tensor, name: str, norm: Norm | None, draws: Draws | None
    ) -> Tensor:
        if norm is not None:
            y, bias = norm(y if bias is None else y + bias), None
        if draws is None or self.p == 0.0:
            return ops.bias_dropout_add(y, bias, x)
        rng, seen = draws.hidden(name, self.layer, y.shape)
        return ops.bias_dropout_add(y.reshape(seen), bias, x.reshape(seen), p=self.p, rng=rng).view(x.shape)


class Decoder(nn.Module):
    """A run of layers (global numbers as keys) and, on the last stage, the final norm."""

    def __init__(self, config: Config, init: Init, layers: Sequence[int], final: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(n): TransformerLayer(config, init, n) for n in layers})
        self.final_layernorm = (
            Norm(
                init, "decoder.final_layernorm", config.hidden_size, kind=config.normalization, eps=config.norm_epsilon
            )
            if final
            else None
        )
        self.method = config.recompute_method if config.recompute_granularity == "full" else None
        self.recompute_layers = config.recompute_num_layers or 1

    def forward(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor] | None,
        draws: Draws | None,
        cache: KeyValueCache | None = None,
        mask: Tensor | None = None,
    ) -> Tensor:
        layers = list(self.layers.values())

        def run(start: int, end: int, x: Tensor, on: bool) -> Tensor:
            def several(x: Tensor) -> Tensor:
                for layer in layers[start:end]:
                    x = layer(x, turn, draws, cache, mask)
                return x

            return recompute(several, x, on=on)

        step = self.recompute_layers if self.method == "uniform" else 1
        for start in range(0, len(layers), step):
            on = self.method == "uniform" or (self.method == "block" and start < self.recompute_layers)
            x = run(start, min(start + step, len(layers)), x, on)
        return x if self.final_layernorm is None else self.final_layernorm(x)


class GPT(nn.Module):
    """A GPT or a pipeline stage of one.

    layers: global numbers of the layers held (default all). first: holds the embedding and takes tokens [b, s] (else
    hidden [s, b, h]). last: holds the final norm and output layer and returns logits [s, b, v] (else hidden).
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
        self.output_layer: nn.Module | None = None
        if last and not (self.tied and first):
            # A last stage without the embedding holds its own copy of a tied weight, drawn under the same name.
            drawn_as = "embedding.word_embeddings.weight" if self.tied else "output_layer.weight"
            self.output_layer = nn.Module()
            std = config.embedding_init_method_std if self.tied else config.init_method_std
            self.output_layer.weight = init.weight(
                drawn_as, (config.padded_vocab_size, config.hidden_size), std, Shard(0)
            )
        self.last, self._turn, self._angles = last, None, None

    def forward(
        self,
        x: Tensor,
        draws: Draws | None = None,
        cache: KeyValueCache | None = None,
        *,
        rows: int | None = None,
        starts: Tensor | None = None,
    ) -> Tensor:
        """draws: dropout of this microbatch; None = no dropout (evaluation). cache: of the tokens before these. rows:
        logits of so many last positions only. starts: where each token's document begins (`documents.starts`), int64
        [b, s] of whole sequences, for --reset-position-ids and --reset-attention-mask.

        With context parallelism, tokens are this rank's columns (`Parallel.context_rows`) of each sequence.
        """
        s_hidden = x.shape[1] // (self.parallel.size if self.parallel.sequence else 1) if self.embedding else x.shape[0]
        full = self.parallel.full_length(s_hidden)
        if draws is not None:
            draws = replace(draws, rows=self.parallel.hidden_rows(full))
        if self.embedding is not None:
            x = self.embedding(x, draws, 0 if cache is None else cache.length, self._positions(starts))
        turn = self._rotation(full, x.device, starts) if cache is None else cache.turn(full)
        mask = None if starts is None or not self.config.reset_attention_mask else documents.mask(starts)
        x = self.decoder(x, turn, draws, cache, mask)
        if cache is not None:
            cache.advance(full)
        if self.last and rows is not None:
            x = x[-rows:]
        return column_linear(x, self.output_weight(), None, self.parallel) if self.last else x

    def output_weight(self) -> Tensor:
        """The matrix that makes logits [v_local, h]: the output layer's, or the word embedding's if tied."""
        holder = self.output_layer if self.output_layer is not None else self.embedding.word_embeddings
        return holder.weight

    def loss(self, logits: Tensor, labels: Tensor, *, inplace_backward: bool = False) -> Tensor:
        """Mean cross entropy (float32 scalar) of logits [s, b, v_local] against labels [b, s].

        With --eod-mask-loss, labels of documents.IGNORED do not count; the mean of none is 0. inplace_backward: the
        caller does not look at the logits again, so the backward pass may write over them.
        """
        start = self.parallel.rank * logits.shape[-1]
        how = {"vocab_start": start, "comm": self.parallel.tp, "inplace_backward": inplace_backward}
        target = labels.t().contiguous()
        if not self.config.eod_mask_loss:
            return ops.cross_entropy(logits, target, **how).mean()
        counts = target != documents.IGNORED
        return (ops.cross_entropy(logits, target * counts, **how) * counts).sum() / counts.sum().clamp(min=1)

    def _positions(self, starts: Tensor | None) -> Tensor | None:
        return None if starts is None or not self.config.reset_position_ids else documents.positions(starts)

    def _rotation(self, full: int, device: torch.device, starts: Tensor | None) -> tuple[Tensor, Tensor] | None:
        if self.config.position_embedding_type != "rope":
            return None
        rows, positions = self.parallel.context_rows(full), self._positions(starts)
        if positions is not None:
            if self._angles is None or self._angles[0].shape[0] != full:
                self._angles = rotation(self.config, full, device)
            cos, sin = self._angles
            return cos[rows.take(positions, 1)], sin[rows.take(positions, 1)]
        if self._turn is None or self._turn[0].shape[0] != rows.count:
            cos, sin = rotation(self.config, full, device)
            self._turn = rows.take(cos, 0), rows.take(sin, 0)
        return self._turn


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a whole GPT's parameters. Nothing is allocated."""
    layers = [n for n in range(config.num_layers) if str(n) not in config.noop_layers]
    with torch.device("meta"):
        model = GPT(config, torch.device("meta"), layers=layers)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}
