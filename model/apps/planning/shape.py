"""Sizes of a layout on one rank: rows, heads, and parameters of each stage.

Counts equal those of the model that the trainer builds (gpt/model.py); all tensor-parallel ranks have the same counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hal.mesh import Layout

from ...config.parallel_layout import ParallelLayout
from ...config.schema import Config, ConfigError
from .expert_layer import Experts
from .latent_layer import Latent


@dataclass(frozen=True)
class Shape:
    """The sizes of a config on one rank of a layout. rows: positions of a sequence in attention; hidden_rows: between
    the layers. heads, groups: channels of the queries, and of the keys; values, context: of the values, and of
    attention's result. element: bytes of an activation. experts: of a layer that has some. latent: of latent attention.
    """

    config: Config
    plan: ParallelLayout
    tp: int
    rows: int
    hidden_rows: int
    heads: int
    groups: int
    values: int
    context: int
    ffn: int
    vocabulary: int
    element: int
    experts: Experts | None = None
    latent: Latent | None = None

    @staticmethod
    def of(c: Config, plan: ParallelLayout, imbalance: float = 1.0) -> Shape:
        """The sizes on any tensor-parallel rank of `plan`.

        imbalance: rows of the experts on the rank that has the most, in multiples of the mean. Raises ConfigError for
        layers whose activations the formulas do not describe.
        """
        names = "experimental_attention_variant", "attention_output_gate", "moe_shared_expert_gate"
        unknown = [f"--{name.replace('_', '-')}" for name in names if getattr(c, name)]
        if unknown:
            raise ConfigError(f"hal plan has no formulas for the memory and traffic of {', '.join(unknown)}")
        tp, rows = plan.layout.tp, c.seq_length // plan.layout.cp
        qk, v = c.head_sizes
        hidden_rows, gate = rows // tp if c.sequence_parallel else rows, 2 if c.swiglu or c.geglu else 1
        return Shape(
            config=c,
            plan=plan,
            tp=tp,
            rows=rows,
            hidden_rows=hidden_rows,
            heads=c.num_attention_heads * qk // tp,
            groups=c.num_query_groups * qk // tp,
            values=c.num_query_groups * v // tp,
            context=c.num_attention_heads * v // tp,
            ffn=c.ffn_hidden_size // tp,
            vocabulary=c.padded_vocab_size // tp,
            element=c.params_dtype.itemsize,
            experts=Experts.of(c, plan.layout, hidden_rows, rows, gate, imbalance),
            latent=Latent.of(c, tp, hidden_rows, rows),
        )

    @property
    def gate(self) -> int:
        """The number of matrices in the MLP's first layer: 2 with a gate."""
        return 2 if self.config.swiglu or self.config.geglu else 1

    @property
    def hidden_bytes(self) -> int:
        """Bytes of the hidden state of one microbatch, as a layer's norms give it."""
        return self.hidden_rows * self.config.micro_batch_size * self.config.hidden_size * self.element

    @property
    def residual_bytes(self) -> int:
        """Bytes of the sums of one microbatch between the layers, which stages exchange."""
        return self.hidden_bytes // self.element * self.config.residual_dtype.itemsize

    def first(self, stage: int) -> bool:
        """Whether a stage holds the embedding."""
        return stage == 0

    def last(self, stage: int) -> bool:
        """Whether a stage holds the final norm and the output layer."""
        return stage == self.plan.stages - 1

    def kinds(self, layers: Sequence[int]) -> list[tuple[int, int]]:
        """(a layer, the number of layers like it), for the dense ones among `layers` and those with experts."""
        if not layers:
            return []
        if self.experts is None:
            return [(layers[0], len(layers))]
        of_experts = [n for n in layers if self.config.has_experts(n)]
        dense = [n for n in layers if not self.config.has_experts(n)] if len(of_experts) < len(layers) else []
        return [(kind[0], len(kind)) for kind in (dense, of_experts) if kind]

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of a layer; None if it is dense."""
        return self.experts if self.config.has_experts(layer) else None

    def layer_parameters(self, layer: int) -> int:
        """Parameters of one layer."""
        experts = self.experts_of(layer)
        return self._dense_parameters(experts) + (0 if experts is None else experts.parameters())

    def _dense_parameters(self, experts: Experts | None) -> int:
        """Parameters of a layer other than the weights of its experts."""
        c, h = self.config, self.config.hidden_size
        norms = (4 if c.use_sandwich_norm else 2) * self._norm()
        inner = self.gate * self.ffn
        mlp = h * (inner + self.ffn) if experts is None else experts.replicated_parameters()
        # Biases of column-parallel layers are sharded with their rows; those of the two row-parallel layers are not.
        biases = (inner + h) * c.mlp_bias + h * c.projection_bias
        return norms + self._attention_parameters() + mlp + biases

    def _attention_parameters(self) -> int:
        """Parameters of attention besides the bias of its row-parallel layer."""
        c = self.config
        if self.latent is not None:
            return self.latent.parameters()
        qkv = self.heads + self.groups + self.values
        norms = 2 * c.kv_channels * (2 if c.normalization == "LayerNorm" else 1) if c.qk_layernorm else 0
        biases = qkv if c.qkv_bias else 0
        return c.hidden_size * (qkv + self.context) + norms + biases

    def end_parameters(self, stage: int) -> int:
        """Parameters of a stage besides its layers: embedding, final norm, output layer."""
        c, table = self.config, self.vocabulary * self.config.hidden_size
        count = 0
        if self.first(stage):
            learned = c.position_embedding_type == "learned_absolute"
            count += table + (c.max_position_embeddings * c.hidden_size if learned else 0)
        if self.last(stage):
            # A last stage without the embedding has a copy of a tied weight.
            own_table = c.untie_embeddings_and_output_weights or not self.first(stage)
            count += self._norm() + (table if own_table else 0)
        return count

    def layers_of(self, pp_rank: int) -> list[int]:
        """The layers of a pipeline rank."""
        return [layer for stage in self.plan.stages_of(pp_rank) for layer in self.plan.layers[stage]]

    def parameters(self, pp_rank: int) -> int:
        """Parameters that a pipeline rank holds, before any sharding over data-parallel ranks."""
        ends = sum(self.end_parameters(s) for s in self.plan.stages_of(pp_rank))
        return ends + sum(count * self.layer_parameters(layer) for layer, count in self.kinds(self.layers_of(pp_rank)))

    def expert_parameters(self, pp_rank: int) -> int:
        """Those of its experts, which have fewer replicas than the others."""
        if self.experts is None:
            return 0
        return self.experts.parameters() * sum(map(self.config.has_experts, self.layers_of(pp_rank)))

    def shard(self, pp_rank: int) -> float:
        """Parameters of a pipeline rank of which ZeRO's optimizer keeps the state on one of its ranks."""
        layout, experts = self.plan.layout, self.expert_parameters(pp_rank)
        return (self.parameters(pp_rank) - experts) / (layout.dp * layout.cp) + experts / layout.edp

    def _norm(self) -> int:
        return self.config.hidden_size * (2 if self.config.normalization == "LayerNorm" else 1)


def total_parameters(c: Config) -> int:
    """Parameters of the full model; tied parameters count once."""
    noop = {int(n) for n in c.noop_layers}
    layers = tuple(n for n in range(c.num_layers) if n not in noop)
    whole = replace(c, tensor_model_parallel_size=1, context_parallel_size=1, sequence_parallel=False)
    whole.expert_model_parallel_size = whole.expert_tensor_parallel_size = 1
    whole.padded_vocab_size = c.padded_vocab_size
    return Shape.of(whole, ParallelLayout(Layout(), "none", (layers,), 1, 0)).parameters(0)
