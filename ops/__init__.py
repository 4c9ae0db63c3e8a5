"""The operations a GPT needs: `hal.ops.NAME(...)` runs on the active backend. One file per family."""

if __name__ != "hal.ops":
    raise ImportError(f"import this package as 'hal.ops', not as '{__name__}' (install it with: pip install -e .)")


from .activation import bias_gelu, geglu, swiglu
from .attention import alibi_bias, band_mask, draw_shape, flash_attention
from .attention_merge import merge_attention
from .composite import (
    add_layer_norm,
    add_rms_norm,
    linear_bias_activation,
    linear_cross_entropy,
    qk_norm_rotary,
)
from .float8 import scaled_linear
from .linear import linear, linear_wgrad
from .moe_grouped import grouped_linear, grouped_linear_wgrad, grouped_swiglu
from .moe_permute import permute, unpermute
from .moe_router import moe_balance_sums, moe_drop, moe_router
from .norm import layer_norm, rms_norm
from .optimizer import adamw, l2norm, unscale_and_check
from .parallel_linear import all_gather_linear, linear_reduce_scatter
from .random import dropout, philox_uniform
from .residual import bias_dropout_add
from .rotary import rotary
from .softmax import scale_mask_softmax
from .vocab import cross_entropy, embedding

__all__ = [
    "adamw",
    "add_layer_norm",
    "add_rms_norm",
    "alibi_bias",
    "all_gather_linear",
    "band_mask",
    "bias_dropout_add",
    "bias_gelu",
    "cross_entropy",
    "draw_shape",
    "dropout",
    "embedding",
    "flash_attention",
    "geglu",
    "grouped_linear",
    "grouped_linear_wgrad",
    "grouped_swiglu",
    "l2norm",
    "layer_norm",
    "layouts",
    "linear",
    "linear_bias_activation",
    "linear_cross_entropy",
    "linear_reduce_scatter",
    "linear_wgrad",
    "mappings",
    "merge_attention",
    "moe_balance_sums",
    "moe_drop",
    "moe_router",
    "permute",
    "philox_uniform",
    "qk_norm_rotary",
    "rms_norm",
    "rotary",
    "scale_mask_softmax",
    "scaled_linear",
    "swiglu",
    "unpermute",
    "unscale_and_check",
]
