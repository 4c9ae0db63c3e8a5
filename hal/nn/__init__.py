"""Layers with torch's names, signatures and state-dict keys, whose arithmetic is HAL's ops on the active backend.

`hal.nn.Linear` is a `torch.nn.Linear` with another forward, and likewise the other layers: isinstance checks,
optimizers, hooks, `state_dict` and wrappers such as DDP and PEFT treat it as torch's. `convert` turns the modules of an
existing model into these in place. `import hal` does not load this package.
"""

from .conversion import Conversion, Rule, convert
from .float8_products import ExactProducts, Float8Products
from .functional import scaled_dot_product_attention
from .layers import GELU, CrossEntropyLoss, Embedding, LayerNorm, Linear, RMSNorm, RotaryEmbedding

__all__ = [
    "GELU",
    "Conversion",
    "CrossEntropyLoss",
    "Embedding",
    "ExactProducts",
    "Float8Products",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "RotaryEmbedding",
    "Rule",
    "convert",
    "scaled_dot_product_attention",
]
