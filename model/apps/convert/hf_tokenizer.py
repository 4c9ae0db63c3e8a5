"""The files of a Hugging Face folder that turn text into ids and back: tokenizer, generation settings, chat template.

Every tokenizer whose rules a tokenizer.json can state is written as one, so that transformers, vLLM and lm-evaluation-
harness encode text as HAL does. One difference remains by intention: the text of a special token is that token to them
(chat templates need this) and ordinary text to HAL. A SentencePiece model is copied if it came from such a folder. A
tokenizer that cannot be expressed is named in a note.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from ...common.atomic_files import write_text
from ...config.schema import ConfigError
from ...config.tokenizer_options import options_of
from ...data.tokenizers.build import build_tokenizer
from ...data.tokenizers.tokenizer import ByteTokenizer, Tokenizer
from .weights import ConversionError, Weights

_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")
_GENERATION, _CHAT = "generation_config.json", "chat_template.jinja"

PLAIN_CHAT = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""The chat template of a model that has none: a line per message."""


def tokenizer_of(weights: Weights) -> Tokenizer | str:
    """The tokenizer of the weights' options, or the reason why there is none."""
    if not weights.tokenizer and weights.vocabulary != ByteTokenizer.vocab_size:
        return "the checkpoint names no tokenizer"
    try:
        tokenizer = build_tokenizer(weights.config(make_vocab_size_divisible_by=1))
    except ConfigError as error:
        return str(error)
    if tokenizer.vocab_size > weights.vocabulary:
        return f"the tokenizer has {tokenizer.vocab_size} ids, the embedding only {weights.vocabulary}"
    return tokenizer


def write(weights: Weights, folder: Path, chat_template: Path | None) -> list[str]:
    """Writes the files into an existing folder. Returns notes about what could not be written, or was made up.

    chat_template: a Jinja file, else that of the source, else `PLAIN_CHAT`.
    """
    tokenizer, source = tokenizer_of(weights), _source(weights)
    if source is not None and (source / _GENERATION).is_file():
        shutil.copyfile(source / _GENERATION, folder / _GENERATION)
    if isinstance(tokenizer, str):
        if chat_template is not None:
            raise ConversionError(f"--chat-template needs a tokenizer, and there is none: {tokenizer}")
        return [f"no tokenizer was written: {tokenizer}; put one into the folder before AutoTokenizer is used on it"]
    if not (folder / _GENERATION).is_file():
        ends = {f"{which}_token_id": tokenizer.eod for which in ("bos", "eos", "pad")}
        _write_json(folder / _GENERATION, ends)
    pipeline = tokenizer.pipeline()
    if pipeline is None and (source is None or not (source / _SETTINGS[0]).is_file()):
        if chat_template is not None:
            raise ConversionError(
                f"--chat-template needs a tokenizer that tokenizer.json can express: {_kind(weights)}"
            )
        return [
            f"no tokenizer was written: a tokenizer.json cannot express {_kind(weights)}; the model takes and gives ids"
        ]
    if pipeline is not None:
        write_text(folder / "tokenizer.json", pipeline)
    for name in (*_SETTINGS, *(() if pipeline is not None else ("tokenizer.model",))):
        if source is not None and (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    if pipeline is not None and not (folder / _SETTINGS[0]).is_file():
        _write_json(folder / _SETTINGS[0], _settings(weights, pipeline, tokenizer.eod))
    if chat_template is not None:
        try:
            write_text(folder / _CHAT, chat_template.read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise ConversionError(f"--chat-template {chat_template} cannot be read: {error}") from None
    elif not (folder / _CHAT).is_file() and "chat_template" not in json.loads((folder / _SETTINGS[0]).read_text()):
        write_text(folder / _CHAT, PLAIN_CHAT)
        return ["the chat template is a plain one, 'role: text' lines; --chat-template FILE writes another"]
    return []


def _kind(weights: Weights) -> str:
    return str(options_of(weights.config(make_vocab_size_divisible_by=1))["tokenizer_type"])


def _source(weights: Weights) -> Path | None:
    """The folder of the tokenizer that the weights were trained with, if its files have the names of Hugging Face;
    other files there describe it further. Without a tokenizer, the folder of the model."""
    file = weights.tokenizer.get("tokenizer_model") or weights.tokenizer.get("vocab_file")
    if file is None:
        return weights.folder
    path = Path(file)
    if path.is_dir():
        return path
    return path.parent if path.name in ("tokenizer.json", "tokenizer.model", "vocab.json") else None


def _settings(weights: Weights, pipeline: str, eod: int) -> dict[str, Any]:
    """tokenizer_config.json: the class that reads any tokenizer.json, and the token that ends a document."""
    content = json.loads(pipeline)
    names = {token["id"]: token["content"] for token in content["added_tokens"]}
    vocabulary = content["model"].get("vocab", {})
    end = names.get(eod) or next(name for name, i in vocabulary.items() if i == eod)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        "bos_token": end,
        "pad_token": end,
        "clean_up_tokenization_spaces": False,
        "model_max_length": weights.config(make_vocab_size_divisible_by=1).max_position_embeddings,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=2) + "\n")
