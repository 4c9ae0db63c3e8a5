"""Examples as token ids, with the tokens that the loss counts: those of answers.

Texts are encoded and chat templates rendered by transformers' tokenizers, so that the ids are those that transformers,
TRL and a server of the exported model compute. This differs from pretraining, where the text of a special token is
ordinary text: a template consists of special tokens.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

from hal.untrusted import contained

from ...common.optional_packages import optional_package
from ...config.schema import Config, ConfigError
from ..tokenizers.tokenizer import Tokenizer, read_file
from .examples import BadExample, Completion, Conversation

_MARKERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
"""The tag by which a template marks what the model generates; see transformers' return_assistant_tokens_mask."""

_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")

Rendered = tuple[list[int], list[bool]]
"""Token ids, and which of them the loss counts."""


class Renderer:
    """Encodes examples. fingerprint: 16 hexadecimal digits that change when the same example may get other ids."""

    def __init__(self, config: Config, tokenizer: Tokenizer) -> None:
        """Raises ConfigError without transformers, or for a tokenizer that it cannot have."""
        needs = "--sft needs transformers, whose tokenizers render chat templates"
        with optional_package(needs, "torch-hal[transformers]", ConfigError):
            import transformers
        folder = _settings_folder(config)
        with contained("transformers cannot open the tokenizer", ConfigError):
            self._tokenizer: Any = _open(config, tokenizer, folder, transformers)
        self._tokenizer.model_max_length = 1 << 62  # silences a warning about long texts, whose length is checked later
        if self._tokenizer.eos_token is None:
            self._tokenizer.eos_token = self._tokenizer.convert_ids_to_tokens(tokenizer.eod)
        digest = hashlib.sha256(f"{transformers.__version__} {tokenizer.fingerprint}\n".encode())
        if config.chat_template is not None:
            content = read_file(config.chat_template)
            with contained(f"--chat-template {config.chat_template} is no text", ConfigError):
                self._tokenizer.chat_template = content.decode()
            digest.update(content)
        if folder is not None:
            for name in _SETTINGS:
                digest.update((folder / name).read_bytes() if (folder / name).is_file() else b"-")
        self.fingerprint = digest.hexdigest()[:16]

    def encode(self, example: Completion | Conversation) -> Rendered:
        """Raises BadExample for an example that the template refuses or in which no token counts, ConfigError if there
        is no template."""
        if isinstance(example, Conversation) and not self._tokenizer.chat_template:
            raise ConfigError(
                "the examples are messages, and the tokenizer has no chat template; give one with --chat-template FILE"
            )
        with contained("it cannot be encoded", BadExample):
            ids, counted = self._completion(example) if isinstance(example, Completion) else self._messages(example)
        if not any(counted[1:]):  # the first token is never predicted
            raise BadExample("the chat template marks no token of an answer")
        return ids, counted

    def _completion(self, example: Completion) -> Rendered:
        """The completion ends with the end of the text. It begins where the ids of the prompt alone and those of the
        whole differ, since a token may span the boundary."""
        end = "" if example.completion.endswith(self._tokenizer.eos_token) else self._tokenizer.eos_token
        ids = self._tokenizer(example.prompt + example.completion + end)["input_ids"]
        prompt = self._tokenizer(example.prompt)["input_ids"]
        same = next((i for i, (a, b) in enumerate(zip(prompt, ids)) if a != b), min(len(prompt), len(ids)))
        return ids, [i >= same for i in range(len(ids))]

    def _messages(self, example: Conversation) -> Rendered:
        template = self._tokenizer.get_chat_template(tools=example.tools)
        if _MARKERS.search(template):
            marked = self._tokenizer.apply_chat_template(
                example.messages, tools=example.tools, return_dict=True, return_assistant_tokens_mask=True
            )
            return marked["input_ids"], [bool(mark) for mark in marked["assistant_masks"]]
        text, spans = self._render(example, len(example.messages)), self._spans(example)
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        offsets = encoded["offset_mapping"]
        return encoded["input_ids"], [any(a <= begin < b for a, b in spans) and begin < end for begin, end in offsets]

    def _spans(self, example: Conversation) -> list[tuple[int, int]]:
        """First and last (exclusive) character of every answer in the rendered conversation.

        An answer is what its message adds to the conversation before it and the prompt for an answer. Raises BadExample
        if the template does not render a conversation as the beginning of a longer one.
        """
        whole = self._render(example, len(example.messages))
        spans = []
        for number, message in enumerate(example.messages):
            if message["role"] != "assistant":
                continue
            before, after = self._render(example, number, prompt=True), self._render(example, number + 1)
            if not (whole.startswith(after) and after.startswith(before)):
                raise BadExample(
                    f"message {number + 1}: the chat template renders it otherwise, or what is before it, when more "
                    "messages follow, so that its tokens cannot be found; give a template with {% generation %} tags "
                    "around the answers with --chat-template"
                )
            spans.append((len(before), len(after)))
        return spans

    def _render(self, example: Conversation, count: int, *, prompt: bool = False) -> str:
        """The text of the first `count` messages, optionally with the prompt for the assistant's answer."""
        return str(
            self._tokenizer.apply_chat_template(
                example.messages[:count], tools=example.tools, tokenize=False, add_generation_prompt=prompt
            )
        )


def _settings_folder(config: Config) -> Path | None:
    """The folder of the tokenizer.json, whose other files describe special tokens and the chat template."""
    if config.tokenizer_type != "HuggingFaceTokenizer" or config.tokenizer_model is None:
        return None
    path = Path(config.tokenizer_model)
    return path if path.is_dir() else path.parent


def _open(config: Config, tokenizer: Tokenizer, folder: Path | None, transformers: Any) -> Any:
    """transformers' tokenizer of the config."""
    if folder is not None and (folder / "tokenizer_config.json").is_file():
        opened = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if not opened.is_fast:
            raise ConfigError(f"the tokenizer in {folder} has no tokenizer.json, which --sft needs")
        return opened
    pipeline = tokenizer.pipeline()
    if pipeline is None:
        raise ConfigError(
            f"--sft needs a tokenizer that tokenizer.json can express, which --tokenizer-type {config.tokenizer_type} "
            "is not; give --tokenizer-type HuggingFaceTokenizer"
        )
    from tokenizers import Tokenizer as Pipeline

    return transformers.PreTrainedTokenizerFast(tokenizer_object=Pipeline.from_str(pipeline))
