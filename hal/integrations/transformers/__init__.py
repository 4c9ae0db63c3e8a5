"""Hugging Face transformers on HAL's ops: attention by its interface, norms, activations and rotary by replacement.

`convert(model)` is all that a program needs; `Trainer` and `generate` then run on the active backend. Importing this
registers "hal" as an attention implementation. `python -m hal.integrations.transformers serve FOLDER` runs
transformers' own command line with every model that it loads converted (docs/serve.md).
"""

from __future__ import annotations

import os

from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

import hal
from hal.nn import Conversion
from hal.nn import convert as convert_modules

from .attention_interface import attention
from .mask_interface import mask
from .replacements import RULES

__all__ = ["NAME", "RULES", "attention", "convert", "mask"]

NAME = "hal"
"""The attention implementation's name in transformers."""

AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, mask)


def convert(model: PreTrainedModel, *, backend: str | None = None, verbose: bool = True) -> Conversion:
    """Makes a model of transformers run on HAL's ops: `hal.nn.convert` with the rules for its classes, and attention.

    Trainer and accelerate then compute on the backend's device. A model that does not use transformers' attention
    interface keeps its attention, and the result reports this. Raises what `hal.use` raises.
    """
    done = convert_modules(model, backend=backend, rules=RULES, verbose=False)
    os.environ["ACCELERATE_TORCH_DEVICE"] = str(hal.local_device())
    if model._can_set_attn_implementation():
        model.set_attn_implementation(NAME)
        done.replaced["attention implementation by hal.ops.flash_attention"] += 1
    else:
        done.left["attention: the model does not use transformers' attention interface"] += 1
    if verbose:
        print(done)
    return done
