"""The MLP of a transformer layer: two linear layers around gelu, swiglu or geglu."""

from __future__ import annotations

from torch import Tensor, nn

from hal import ops

from ..config.schema import Config
from .attention import output_std
from .layers import ColumnParallelLinear, Init, RowParallelLinear


class MLP(nn.Module):
    """hidden [s, b, h] -> [s, b, h], without linear_fc2's bias, which the caller fuses with the dropout.

    A gated MLP's first layer stacks [gate; up], each ffn_hidden_size rows, as Megatron's does.
    """

    def __init__(self, config: Config, init: Init, name: str) -> None:
        super().__init__()
        h, ffn, bias = config.hidden_size, config.ffn_hidden_size, not config.disable_bias_linear
        parts = 2 if config.swiglu or config.geglu else 1
        self.linear_fc1 = ColumnParallelLinear(
            init,
            f"{name}.linear_fc1",
            h,
            parts * ffn,
            std=config.init_method_std,
            bias=bias,
            fused_bias=True,
            parts=parts,
        )
        self.linear_fc2 = RowParallelLinear(init, f"{name}.linear_fc2", ffn, h, std=output_std(config), bias=bias)
        self.kind = "swiglu" if config.swiglu else "geglu" if config.geglu else "gelu"
        self.approximate = config.gelu_approximate

    def forward(self, x: Tensor) -> Tensor:
        inner, bias = self.linear_fc1(x), self.linear_fc1.bias
        if self.kind == "swiglu":
            inner = ops.swiglu(inner, bias)
        elif self.kind == "geglu":
            inner = ops.geglu(inner, bias, self.approximate)
        else:
            inner = ops.bias_gelu(inner, bias, self.approximate)
        y: Tensor = self.linear_fc2(inner)
        return y
