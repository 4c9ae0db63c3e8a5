"""A whole model between two formats: HAL's options and tensors, checked to be exactly what a GPT of those options has.

The embedding has one row per id of the vocabulary; padding rows are cut off by readers and added by writers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hal import HalError

from ..checks import check_model
from ..config import Config
from ..gpt import shapes

WORD, POSITION, OUTPUT = (
    "embedding.word_embeddings.weight",
    "embedding.position_embeddings.weight",
    "output_layer.weight",
)


class ConversionError(HalError):
    """A checkpoint cannot be read, or what it holds cannot be expressed in the format asked for."""


@dataclass
class Weights:
    """options: a Config's, by name (the model's, `seq_length`, precision). tensors: by HAL's parameter names, whole.
    tokenizer: a Config's tokenizer options, as far as the source knew them. iteration: that of the training."""

    options: dict[str, Any]
    tensors: dict[str, Tensor]
    tokenizer: dict[str, Any] = field(default_factory=dict)
    iteration: int = 0

    @property
    def vocabulary(self) -> int:
        """How many ids the embedding has a row for."""
        return self.tensors[WORD].shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the model, that of its word embedding."""
        return self.tensors[WORD].dtype

    def config(self, **more: Any) -> Config:
        """The options as a Config with this vocabulary, padded. Raises ConversionError for options that contradict."""
        precision = {"bf16": self.dtype == torch.bfloat16, "fp16": self.dtype == torch.float16}
        try:
            config = Config(**{**self.options, **precision, **self.tokenizer, **more})
            config.set_vocabulary(self.vocabulary)
            config.given = frozenset(self.options)
            check_model(config)
        except (TypeError, ValueError, HalError) as error:
            raise ConversionError(f"the source's options do not make a model: {error}") from None
        return config

    def check(self) -> None:
        """Raises ConversionError unless the tensors are those of a GPT of these options, in name, shape and dtype."""
        if WORD not in self.tensors:
            raise ConversionError(f"the source has no {WORD}")
        config = self.config(make_vocab_size_divisible_by=1)
        # Before a model of a billion layers is built to look at.
        require(config.num_layers <= len(self.tensors), f"the source holds fewer than {config.num_layers} layers")
        wanted = shapes(config)
        missing, extra = sorted(set(wanted) - set(self.tensors)), sorted(set(self.tensors) - set(wanted))
        if missing or extra:
            raise ConversionError(
                f"the source does not hold the model its options describe: {len(missing)} tensors are missing "
                f"({', '.join(missing[:3])}), {len(extra)} have no place ({', '.join(extra[:3])})"
            )
        for name, shape in wanted.items():
            found = self.tensors[name]
            if tuple(found.shape) != shape or not found.is_floating_point():
                raise ConversionError(f"{name} has shape {tuple(found.shape)} and {found.dtype}; expected {shape}")

    def padded(self, rows: int) -> dict[str, Tensor]:
        """The tensors with the vocabulary's rows filled up with zeros."""
        found = dict(self.tensors)
        for name in (WORD, OUTPUT):
            if name in found:
                found[name] = torch.nn.functional.pad(found[name], (0, 0, 0, rows - found[name].shape[0]))
        return found

    def cut(self, vocabulary: int) -> None:
        """Drops the rows from `vocabulary` on: padding. Raises ConversionError if there are fewer rows."""
        if vocabulary > self.vocabulary:
            raise ConversionError(f"a vocabulary of {vocabulary} ids does not fit an embedding of {self.vocabulary}")
        for name in (WORD, OUTPUT):
            if name in self.tensors:
                self.tensors[name] = self.tensors[name][:vocabulary]


def require(condition: bool, problem: str) -> None:
    """Raises ConversionError with the problem unless the condition holds."""
    if not condition:
        raise ConversionError(problem)


def common_dtype(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors in the precision of the word embedding, where a source mixed some (float32 norms)."""
    return {name: t.to(tensors[WORD].dtype) for name, t in tensors.items()} if WORD in tensors else dict(tensors)
