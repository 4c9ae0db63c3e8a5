"""Opens the data of a run: samples of indexed datasets for pretraining, examples with answers for finetuning."""

from __future__ import annotations

from ..config.schema import Config
from .finetuning.example_split import open_examples
from .gpt_dataset import Split, open_data
from .tokenizers.tokenizer import Tokenizer


def open_splits(config: Config, tokenizer: Tokenizer, samples: dict[str, int]) -> dict[str, Split]:
    """The splits named in `samples` (split -> number of samples that the run needs). Raises ConfigError for data that
    cannot be used."""
    return open_examples(config, tokenizer, list(samples)) if config.sft else open_data(config, tokenizer, samples)
