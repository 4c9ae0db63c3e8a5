"""The MLP of a transformer layer: two linear layers around gelu, squared relu, swiglu or geglu."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..config.schema import Config
from ..parallel.sharded_products import column_linear
from .attention import output_std
from .layers import ColumnParallelLinear, Init, RowParallelLinear


class MLP(nn.Module):
    """hidden [s, b, h] -> [s, b, h], without linear_fc2's bias, which the caller fuses with the dropout.

    A gated MLP's first layer stacks [gate; up], each `ffn` rows (default ffn_hidden_size), as Megatron's does.
    """

    def __init__(self, config: Config, init: Init, name: str, ffn: int | None = None) -> None:
        super().__init__()
        h, ffn, bias = config.hidden_size, ffn or config.ffn_hidden_size, config.mlp_bias
        parts = 2 if config.swiglu or config.geglu else 1
        self.linear_fc1 = ColumnParallelLinear(
            init, f"{name}.linear_fc1", h, parts * ffn, std=config.init_method_std, bias=bias, parts=parts
        )
        self.linear_fc2 = RowParallelLinear(init, f"{name}.linear_fc2", ffn, h, std=output_std(config), bias=bias)
        kinds = ("swiglu", "geglu", "squared_relu")
        self.kind = next((kind for kind in kinds if getattr(config, kind)), "gelu")
        self.approximate = config.gelu_approximate

    @property
    def bias(self) -> Tensor | None:
        """linear_fc2's bias."""
        return self.linear_fc2.bias

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "squared_relu":
            weight, bias = self.linear_fc1.weight, self.linear_fc1.bias
            inner = column_linear(x, weight, None, self.linear_fc1.parallel, self.linear_fc1.products)
            inner = torch.relu(inner if bias is None else inner + bias).square()
        else:
            inner = self.linear_fc1.activated(x, self.kind, self.approximate)
        y: Tensor = self.linear_fc2(inner)
        return y
