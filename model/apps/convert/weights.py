"""The intermediate form of a conversion: HAL's options and the full tensors, checked against a GPT of those options.

The embedding has one row per id of the vocabulary; readers remove padding rows and writers add them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hal import HalError

from ...config.schema import Config, resolve
from ...config.validation import check_model
from ...gpt.model import OUTPUT_LAYER, WORD_EMBEDDING, shapes

_TABLES = WORD_EMBEDDING, OUTPUT_LAYER  # the tensors with a row per id
_FLOAT32 = "expert_bias"  # of float32 in models of any precision


class LazyTensors(Mapping[str, Tensor]):
    """Tensors by name, each of which is computed anew when it is asked for and not kept.

    metas: the same without data (device meta), for shapes and dtypes.
    """

    def __init__(self) -> None:
        self._loads: dict[str, Callable[[], Tensor]] = {}
        self.metas: dict[str, Tensor] = {}

    def add(self, name: str, load: Callable[[], Tensor], meta: Tensor) -> None:
        """Adds a tensor that `load` returns."""
        self._loads[name], self.metas[name] = load, meta

    def __getitem__(self, name: str) -> Tensor:
        return self._loads[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._loads)

    def __len__(self) -> int:
        return len(self._loads)


def lazily(tensors: Mapping[str, Tensor], function: Callable[[str, Tensor], Tensor]) -> LazyTensors:
    """function(name, tensor) of every tensor, computed when it is asked for."""
    result = LazyTensors()
    for name in tensors:
        result.add(name, partial(_applied, tensors, function, name), function(name, meta_of(tensors, name)))
    return result


def _applied(tensors: Mapping[str, Tensor], function: Callable[[str, Tensor], Tensor], name: str) -> Tensor:
    return function(name, tensors[name])


def meta_of(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor without its data."""
    return tensors.metas[name] if isinstance(tensors, LazyTensors) else tensors[name].to("meta")


class ConversionError(HalError):
    """A checkpoint cannot be read, or its model cannot be expressed in the target format."""


@dataclass
class Weights:
    """options: model options of a Config, by name. tensors: unsharded, by HAL's parameter names. tokenizer: tokenizer
    options of a Config, if the source has them. iteration: the training iteration of the checkpoint. folder: that of a
    model of Hugging Face without a tokenizer, whose other files are kept with the model."""

    options: dict[str, Any]
    tensors: Mapping[str, Tensor]
    tokenizer: dict[str, Any] = field(default_factory=dict)
    iteration: int = 0
    folder: Path | None = None

    @property
    def vocabulary(self) -> int:
        """The number of rows of the embedding."""
        return self.meta(WORD_EMBEDDING).shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model: that of its word embedding."""
        return self.meta(WORD_EMBEDDING).dtype

    def meta(self, name: str) -> Tensor:
        """A tensor without its data, for its shape and dtype."""
        return meta_of(self.tensors, name)

    def config(self, **more: Any) -> Config:
        """A Config of these options with this vocabulary, padded. Raises ConversionError for invalid options."""
        precision = {"bf16": self.dtype == torch.bfloat16, "fp16": self.dtype == torch.float16}
        return self.model_config(self.vocabulary, **precision, **{**self.tokenizer, **more})

    def model_config(self, vocabulary: int, **more: Any) -> Config:
        """A Config of the options with a vocabulary of this size. Raises ConversionError for invalid options."""
        try:
            config = resolve({**self.options, **more})
            config.set_vocabulary(vocabulary)
            check_model(config)
        except (TypeError, ValueError, HalError) as error:
            raise ConversionError(f"the options of the source are invalid: {error}") from None
        return config

    def check(self) -> None:
        """Raises ConversionError unless the tensors are those of a GPT of these options, in name, shape and dtype."""
        if WORD_EMBEDDING not in self.tensors:
            raise ConversionError(f"the source has no {WORD_EMBEDDING}")
        config = self.config(make_vocab_size_divisible_by=1)
        # This is checked before calling `shapes`, which builds all layers and would take long for a corrupt number.
        require(config.num_layers <= len(self.tensors), f"the source has fewer than {config.num_layers} layers")
        expected = shapes(config)
        missing, extra = sorted(set(expected) - set(self.tensors)), sorted(set(self.tensors) - set(expected))
        if missing or extra:
            raise ConversionError(
                f"the source does not contain the model that its options describe: {len(missing)} tensors are missing "
                f"({', '.join(missing[:3])}), {len(extra)} are unexpected ({', '.join(extra[:3])})"
            )
        for name, shape in expected.items():
            tensor = self.meta(name)
            if tuple(tensor.shape) != shape or not tensor.is_floating_point():
                raise ConversionError(f"{name} has shape {tuple(tensor.shape)} and {tensor.dtype}; expected {shape}")

    def padded(self, rows: int) -> Mapping[str, Tensor]:
        """The tensors with the vocabulary padded with zeros to `rows` rows."""

        def pad(name: str, t: Tensor) -> Tensor:
            return torch.nn.functional.pad(t, (0, 0, 0, rows - t.shape[0])) if name in _TABLES else t

        return lazily(self.tensors, pad)

    def cut(self, vocabulary: int) -> None:
        """Removes the padding rows from `vocabulary` on. Raises ConversionError if there are fewer rows than that."""
        if vocabulary > self.vocabulary:
            raise ConversionError(f"a vocabulary of {vocabulary} ids does not fit an embedding of {self.vocabulary}")
        self.tensors = lazily(self.tensors, lambda name, t: t[:vocabulary] if name in _TABLES else t)

    def to(self, dtype: torch.dtype) -> None:
        """Converts the model to another precision."""
        self.tensors = lazily(self.tensors, lambda name, t: t if name.endswith(_FLOAT32) else t.to(dtype))


def require(condition: bool, problem: str) -> None:
    """Raises ConversionError with the problem unless the condition holds."""
    if not condition:
        raise ConversionError(problem)


def common_dtype(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors in the dtype of the word embedding, for sources of mixed precision (float32 norms)."""
    if WORD_EMBEDDING not in tensors:
        return tensors
    dtype = meta_of(tensors, WORD_EMBEDDING).dtype
    return lazily(tensors, lambda name, t: t if name.endswith(_FLOAT32) else t.to(dtype))
