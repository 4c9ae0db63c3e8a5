"""The intermediate form of a conversion: HAL's options and the full tensors, checked against a GPT of those options.

The embedding has one row per id of the vocabulary; readers remove padding rows and writers add them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hal import HalError

from ...config.schema import Config, resolve
from ...config.validation import check_model
from ...gpt.model import OUTPUT_LAYER, WORD_EMBEDDING, shapes


class ConversionError(HalError):
    """A checkpoint cannot be read, or its model cannot be expressed in the target format."""


@dataclass
class Weights:
    """options: model options of a Config, by name. tensors: unsharded, by HAL's parameter names. tokenizer: tokenizer
    options of a Config, if the source has them. iteration: the training iteration of the checkpoint."""

    options: dict[str, Any]
    tensors: dict[str, Tensor]
    tokenizer: dict[str, Any] = field(default_factory=dict)
    iteration: int = 0

    @property
    def vocabulary(self) -> int:
        """The number of rows of the embedding."""
        return self.tensors[WORD_EMBEDDING].shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model: that of its word embedding."""
        return self.tensors[WORD_EMBEDDING].dtype

    def config(self, **more: Any) -> Config:
        """A Config of these options with this vocabulary, padded. Raises ConversionError for invalid options."""
        precision = {"bf16": self.dtype == torch.bfloat16, "fp16": self.dtype == torch.float16}
        try:
            config = resolve({**self.options, **precision, **self.tokenizer, **more})
            config.set_vocabulary(self.vocabulary)
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
            tensor = self.tensors[name]
            if tuple(tensor.shape) != shape or not tensor.is_floating_point():
                raise ConversionError(f"{name} has shape {tuple(tensor.shape)} and {tensor.dtype}; expected {shape}")

    def padded(self, rows: int) -> dict[str, Tensor]:
        """The tensors with the vocabulary padded with zeros to `rows` rows."""
        tensors = dict(self.tensors)
        for name in (WORD_EMBEDDING, OUTPUT_LAYER):
            if name in tensors:
                tensors[name] = torch.nn.functional.pad(tensors[name], (0, 0, 0, rows - tensors[name].shape[0]))
        return tensors

    def cut(self, vocabulary: int) -> None:
        """Removes the padding rows from `vocabulary` on. Raises ConversionError if there are fewer rows than that."""
        if vocabulary > self.vocabulary:
            raise ConversionError(f"a vocabulary of {vocabulary} ids does not fit an embedding of {self.vocabulary}")
        for name in (WORD_EMBEDDING, OUTPUT_LAYER):
            if name in self.tensors:
                self.tensors[name] = self.tensors[name][:vocabulary]


def require(condition: bool, problem: str) -> None:
    """Raises ConversionError with the problem unless the condition holds."""
    if not condition:
        raise ConversionError(problem)


def common_dtype(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in the dtype of the word embedding, for sources of mixed precision (float32 norms)."""
    return (
        {name: t.to(tensors[WORD_EMBEDDING].dtype) for name, t in tensors.items()}
        if WORD_EMBEDDING in tensors
        else dict(tensors)
    )
