"""hal.nn's layers as parts of a tensor-parallel GPT, and the initialisation of parameters.

Every weight is drawn in full, on the CPU, from the seed and the parameter's name, and each rank keeps its slice.
Therefore the initial model does not depend on the parallel layout. A single rank does not communicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

import hal.nn
from hal import Rng, ops
from hal.nn.float8_products import EXACT, ExactProducts

from ..config.schema import Config
from ..parallel.sharded_products import column_linear, main_grads, row_linear
from ..parallel.tensor_sharding import Parallel, Shard

mappings = ops.mappings
UNALLOCATED = torch.device("meta")
"""The device on which torch's constructors make parameters, which those of `Init` then replace."""


@dataclass
class Init:
    """Creates parameters. `shards` records how each is split, by parameter name (absent = replicated on every rank)."""

    seed: int
    dtype: torch.dtype
    device: torch.device
    parallel: Parallel = field(default_factory=Parallel)
    shards: dict[str, Shard] = field(default_factory=dict)

    def weight(
        self,
        name: str,
        full_shape: Sequence[int],
        std: float,
        shard: Shard | None = None,
        *,
        drawn_as: str | None = None,
    ) -> nn.Parameter:
        """Normally distributed with standard deviation `std`; depends only on the seed, the name and the full shape.

        drawn_as: the name that determines the values, for a copy of a parameter under another name.
        """
        return self.place(name, self.draw(drawn_as or name, full_shape, std), shard)

    def draw(self, name: str, shape: Sequence[int], std: float) -> Tensor:
        """The values of the parameter `name`, float32 on the CPU."""
        generator = torch.Generator().manual_seed(Rng(self.seed).fork("init", name).seed)
        return torch.empty(*shape).normal_(0.0, std, generator=generator)

    def constant(self, name: str, full_shape: Sequence[int], value: float, shard: Shard | None = None) -> nn.Parameter:
        """Every element `value`."""
        return self.place(name, torch.full(tuple(full_shape), value), shard)

    def place(self, name: str, full: Tensor, shard: Shard | None) -> nn.Parameter:
        """This rank's shard of the parameter's `full` value, on the device and in the model's dtype."""
        if shard is not None:
            self.shards[name] = shard
            full = shard.slice(full, self.parallel.tp.rank, self.parallel.tp.size)
        return nn.Parameter(full.to(device=self.device, dtype=self.dtype).contiguous())


class ColumnParallelLinear(hal.nn.Linear):
    """x [..., in] -> [..., out / ranks]; the weight's rows are split over the ranks."""

    products: ExactProducts = EXACT
    """How operands are multiplied. An attribute of the layer, since fully_shard replaces the weight."""

    def __init__(self, init: Init, name: str, n_in: int, n_out: int, *, std: float, bias: bool, parts: int = 1) -> None:
        super().__init__(n_in, n_out // init.parallel.tp.size, bias, UNALLOCATED)
        self.parallel, shard = init.parallel, Shard(0, parts)
        self.weight = init.weight(f"{name}.weight", (n_out, n_in), std, shard)
        if bias:
            self.bias = init.constant(f"{name}.bias", (n_out,), 0.0, shard)

    def forward(self, x: Tensor) -> Tensor:
        return column_linear(x, self.weight, self.bias, self.parallel, self.products)

    def activated(self, x: Tensor, activation: str, approximate: str) -> Tensor:
        """activation(x W^T + bias), `activation` as in ops.linear_bias_activation: [..., in] -> [..., out / ranks], of
        which a gated activation leaves half."""
        if self.parallel.sequence or main_grads(self.weight, None) or self.products is not EXACT:
            y = column_linear(x, self.weight, None, self.parallel, self.products)  # with its own backward pass
            if activation == "swiglu":
                return ops.swiglu(y, self.bias)
            return (ops.geglu if activation == "geglu" else ops.bias_gelu)(y, self.bias, approximate)
        x = mappings.copy_to_region(x, self.parallel.tp)
        return ops.linear_bias_activation(x, self.weight, self.bias, activation=activation, approximate=approximate)


class RowParallelLinear(hal.nn.Linear):
    """x [..., in / ranks] -> [..., out]; the weight's columns are split and the products are summed over the ranks.

    The bias (`self.bias`, replicated on every rank) is not added here, because it is fused with the dropout that
    follows.
    """

    products: ExactProducts = EXACT

    def __init__(self, init: Init, name: str, n_in: int, n_out: int, *, std: float, bias: bool) -> None:
        super().__init__(n_in // init.parallel.tp.size, n_out, bias, UNALLOCATED)
        self.parallel = init.parallel
        self.weight = init.weight(f"{name}.weight", (n_out, n_in), std, Shard(1))
        if bias:
            self.bias = init.constant(f"{name}.bias", (n_out,), 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return row_linear(x, self.weight, self.parallel, self.products)


class VocabParallelEmbedding(hal.nn.Embedding):
    """ids [s, ...] -> [s, ..., hidden] (with sequence parallelism this rank's rows); the table's rows (the vocabulary)
    are split over the ranks."""

    def __init__(self, config: Config, init: Init, name: str) -> None:
        shape = config.padded_vocab_size, config.hidden_size
        super().__init__(shape[0] // init.parallel.tp.size, shape[1], device=UNALLOCATED)
        self.parallel = init.parallel
        self.weight = init.weight(f"{name}.weight", shape, config.embedding_init_method_std, Shard(0))
        # Rounded to the model's dtype, because Gemma stores the factor as a tensor of it.
        self.multiplier = torch.tensor(config.embedding_multiplier_scale, dtype=init.dtype, device="cpu").item()

    def forward(self, ids: Tensor) -> Tensor:
        start = self.parallel.tp.rank * self.weight.shape[0]
        x = ops.embedding(self.weight, ids, vocab_start=start, comm=self.parallel.tp)
        x = x if self.multiplier == 1.0 else x * self.multiplier
        return mappings.scatter_to_region(x, self.parallel.tp, 0) if self.parallel.sequence else x


class LayerNorm(hal.nn.LayerNorm):
    """hal.nn.LayerNorm whose result is in the model's dtype; x may be float32 (--fp32-residual-connection)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(self.weight.dtype)


class RMSNorm(hal.nn.RMSNorm):
    """hal.nn.RMSNorm whose result is in the model's dtype; x may be float32."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).to(self.weight.dtype)


Norm = LayerNorm | RMSNorm


def norm_of(config: Config, init: Init, name: str, hidden: int, scale: float = 1.0) -> Norm:
    """LayerNorm or RMSNorm over the last dimension; gamma starts at `scale`."""
    kind = LayerNorm if config.normalization == "LayerNorm" else RMSNorm
    norm: Norm = kind(hidden, config.norm_epsilon, device=UNALLOCATED)
    norm.offset = 1.0 if config.apply_layernorm_1p else 0.0
    norm.weight = init.constant(f"{name}.weight", (hidden,), scale - norm.offset)
    if isinstance(norm, LayerNorm):
        norm.bias = init.constant(f"{name}.bias", (hidden,), 0.0)
    return norm
