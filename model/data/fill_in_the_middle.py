"""Texts rearranged for filling in the middle (--fim-data): a model learns to write what is between two given parts.

Source: Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", arXiv 2207.14255, as in
Megatron-LM core_v0.16.1's GPTFIMDataset, with one difference: there, the random numbers of a sample depend on how many
samples the process has read before. Here they depend on the seed, the split and the sample, so that a resumed run
continues with the samples that an uninterrupted one has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy

from ..config.schema import Config, ConfigError
from .tokenizers.tokenizer import Tokenizer

_TOKENS = ("prefix", "middle", "suffix", "pad")
_RATES = ("rate", "spm_rate", "split_sample", "fragment_rate", "no_prefix")


def settings(config: Config) -> dict[str, Any]:
    """What determines the arrangement of a sample besides the seed, as JSON values."""
    return {name: getattr(config, f"fim_{name}") for name in (*_RATES, *(f"{t}_token" for t in _TOKENS), "eod_token")}


class Rearrangement:
    """Moves the middle of texts to their end. `split` is the number of the split, 0 to 2.

    A sequence is cut at ends of documents, and with --fim-split-sample at its token too. Each part is rearranged with
    the given probability: a prefix, a middle and a suffix of random lengths (in characters, so that tokens may differ
    at the cuts) become, with P, M and S for their tokens, `P prefix S suffix M middle`, or with --fim-spm-rate
    `P S suffix M prefix middle`. The result has as many tokens as the sequence: the rest is cut off, or padded.

    Raises ConfigError, naming all of them, for tokens that the vocabulary lacks.
    """

    def __init__(self, config: Config, tokenizer: Tokenizer, split: int) -> None:
        self.config, self.tokenizer, self.split = config, tokenizer, split
        options = [f"fim_{name}_token" for name in _TOKENS]
        options += [name for name in ("fim_eod_token", "fim_split_sample") if getattr(config, name) is not None]
        indices = {name: tokenizer.token_id(getattr(config, name)) for name in options}
        ids = {name: index for name, index in indices.items() if index is not None}
        missing = [f"--{n.replace('_', '-')} {getattr(config, n)}" for n in options if n not in ids]
        if missing:
            raise ConfigError(
                f"the {config.tokenizer_type} has no such tokens: {', '.join(missing)}; give tokens of its vocabulary, "
                "or a tokenizer that has these"
            )
        self.prefix, self.middle, self.suffix, self.pad = (ids[f"fim_{name}_token"] for name in _TOKENS)
        self.end = ids.get("fim_eod_token", tokenizer.eod)
        self.separator = ids.get("fim_split_sample")

    def __call__(self, tokens: numpy.ndarray, sample: int) -> numpy.ndarray:
        """tokens: int64 [n], those of sample number `sample`. Returns int64 [n]."""
        random = numpy.random.RandomState([self.config.seed, self.split, sample])
        parts = _parts(tokens, self.end, lambda document: self._document(document, random))
        arranged = numpy.concatenate(parts)[: len(tokens)]
        padding = numpy.full(len(tokens) - len(arranged), self.pad)
        return numpy.concatenate((arranged, padding)).astype(numpy.int64)

    def _document(self, tokens: numpy.ndarray, random: numpy.random.RandomState) -> numpy.ndarray:
        if self.separator is None or self.separator not in tokens:
            return self._text(tokens, self.config.fim_rate, random)
        rate = self.config.fim_fragment_rate
        assert rate is not None  # see config/validation.py
        if not random.binomial(1, self.config.fim_rate):
            return tokens
        return numpy.concatenate(_parts(tokens, self.separator, lambda text: self._text(text, rate, random)))

    def _text(self, tokens: numpy.ndarray, rate: float, random: numpy.random.RandomState) -> numpy.ndarray:
        if not random.binomial(1, rate):
            return tokens
        text = self.tokenizer.decode(tokens.tolist())
        if self.config.fim_no_prefix is not None and text.startswith(self.config.fim_no_prefix):
            return tokens
        first, second = sorted(random.randint(0, len(text) + 1, size=2))
        prefix, middle, suffix = map(self._encoded, (text[:first], text[first:second], text[second:]))
        if random.binomial(1, self.config.fim_spm_rate):
            return numpy.array([self.prefix, self.suffix, *suffix, self.middle, *prefix, *middle])
        return numpy.array([self.prefix, *prefix, self.suffix, *suffix, self.middle, *middle])

    def _encoded(self, text: str) -> list[int]:
        """Ids without the token that some tokenizers put before every text."""
        ids = self.tokenizer.encode(text)
        return ids[1:] if ids and ids[0] == self.tokenizer.begin else ids


def _parts(
    tokens: numpy.ndarray, separator: int, arrange: Callable[[numpy.ndarray], numpy.ndarray]
) -> list[numpy.ndarray]:
    """The parts between separators, each arranged, with their separators. A separator that ends no text is left out, as
    in Megatron."""
    parts, start = [], 0
    for at in numpy.flatnonzero(tokens == separator).tolist():
        if at > start:
            parts += [arrange(tokens[start:at]), numpy.array([separator])]
        start = at + 1
    return [*parts, arrange(tokens[start:])]


def dataset_class(base: type, rearrange: Rearrangement) -> type:
    """megatron-core's GPTDataset, whose samples are rearranged."""

    class FillInTheMiddleDataset(base):  # type: ignore[misc]
        def _query_document_sample_shuffle_indices(self, index: int) -> tuple[numpy.ndarray, numpy.ndarray]:
            tokens, documents = super()._query_document_sample_shuffle_indices(index)
            return rearrange(tokens, int(index)), documents

    return FillInTheMiddleDataset
