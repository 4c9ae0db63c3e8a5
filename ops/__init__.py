"""The operations a GPT needs: `hal.ops.NAME(...)` runs on the active backend. One file per family."""

if __name__ != "hal.ops":
    raise ImportError(f"import this package as 'hal.ops', not as '{__name__}' (install it with: pip install -e .)")


from .activation import bias_gelu, geglu, swiglu
from .attention import band_mask, draw_shape, flash_attention
from .linear import linear, linear_wgrad
from .norm import layer_norm, rms_norm
from .optimizer import adamw, l2norm, unscale_and_check
from .random import dropout, philox_uniform
from .residual import bias_dropout_add
from .rotary import rotary
from .softmax import scale_mask_softmax
from .vocab import cross_entropy, embedding

__all__ = [
    "adamw",
    "band_mask",
    "bias_dropout_add",
    "bias_gelu",
    "cross_entropy",
    "draw_shape",
    "dropout",
    "embedding",
    "flash_attention",
    "geglu",
    "l2norm",
    "layer_norm",
    "layouts",
    "linear",
    "linear_wgrad",
    "mappings",
    "philox_uniform",
    "rms_norm",
    "rotary",
    "scale_mask_softmax",
    "swiglu",
    "unscale_and_check",
]
