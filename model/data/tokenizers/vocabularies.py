"""Tokenizers from libraries, under Megatron's names and with Megatron's special ids.

Vocabularies are files that the user provides; an invalid file raises ConfigError. `vocab_size` is the largest id + 1,
so vocabularies with gaps are safe too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hal.untrusted import contained

from ...common.optional_packages import optional_package
from ...config.schema import ConfigError
from .expansion import MAX_TOKEN, require_bounded
from .sentencepiece_model import require_safe
from .tokenizer import Tokenizer, ends_of, json_object, read_file, text_errors

_END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
"""Usual names of the end-of-text token, tried if no tokenizer_config.json gives one."""


class _LibraryTokenizer(Tokenizer):
    """A tokenizer of the library `tokenizers`."""

    _pipeline: Any

    def encode(self, text: str) -> list[int]:
        with text_errors():
            return list(self._pipeline.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        with contained("the tokenizer cannot decode ids", ConfigError):
            return str(self._pipeline.decode(list(ids)))

    def token_id(self, token: str) -> int | None:
        index: int | None = self._pipeline.token_to_id(token)
        return index

    def pipeline(self) -> str:
        from tokenizers import Tokenizer as Pipeline

        copy = Pipeline.from_str(self._pipeline.to_str())
        # A special token has a separate id in the vocabulary; being added, it is also found in a text.
        copy.add_special_tokens([copy.id_to_token(self.eod)])
        return str(copy.to_str(pretty=True))


class GPT2BPETokenizer(_LibraryTokenizer):
    """GPT-2's byte-level BPE from a vocab.json and a merges.txt; <|endoftext|> ends a document."""

    def __init__(self, vocab_file: str, merge_file: str) -> None:
        from tokenizers import ByteLevelBPETokenizer

        self.content = read_file(vocab_file) + b"\0" + read_file(merge_file)
        with contained(f"{vocab_file} and {merge_file} are not a GPT-2 vocabulary", ConfigError):
            self._pipeline = ByteLevelBPETokenizer(vocab_file, merge_file)
        eod = self._pipeline.token_to_id("<|endoftext|>")
        if eod is None:
            raise ConfigError(f"{vocab_file} has no <|endoftext|> token to end documents with")
        with contained(f"{vocab_file} is not a GPT-2 vocabulary", ConfigError):
            self.vocab_size, self.eod = _size(self._pipeline.get_vocab()), int(eod)


class _BertWordPiece(_LibraryTokenizer):
    """BERT's WordPiece from a vocab.txt. As in Megatron, [BOS], [EOS] and <extra_id_N> are appended to the vocabulary
    if missing, and [EOS] ends a document."""

    lower = True

    def __init__(self, vocab_file: str, vocab_extra_ids: int = 0) -> None:
        from tokenizers import Tokenizer as Pipeline
        from tokenizers import decoders, normalizers, pre_tokenizers
        from tokenizers.models import WordPiece

        self.content = read_file(vocab_file)
        with contained(f"{vocab_file} is not a WordPiece vocabulary", ConfigError):
            vocabulary = dict(WordPiece.read_file(vocab_file))
            known = len(vocabulary)
            size = _size(vocabulary)
            for token in ("[BOS]", "[EOS]", *(f"<extra_id_{n}>" for n in range(vocab_extra_ids))):
                if token not in vocabulary:
                    vocabulary[token], size = size, size + 1
            if "[UNK]" not in vocabulary or known < 2:
                raise ValueError("it has no [UNK] line")
            # BERT and Megatron limit words to 200 characters; the library's default is 100.
            self._pipeline = Pipeline(WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=200))
        self._pipeline.normalizer = normalizers.BertNormalizer(lowercase=self.lower, strip_accents=self.lower)
        self._pipeline.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        self._pipeline.decoder = decoders.WordPiece()
        self.vocab_size, self.eod = size, vocabulary["[EOS]"]


class BertWordPieceLowerCase(_BertWordPiece):
    """Lower-cases the text and strips accents."""


class BertWordPieceCase(_BertWordPiece):
    """Keeps case and accents."""

    lower = False


class GPTSentencePieceTokenizer(Tokenizer):
    """A SentencePiece model; its own </s> ends a document."""

    prefix: tuple[int, ...] = ()

    def __init__(self, tokenizer_model: str) -> None:
        with optional_package("SentencePiece needs its package", "torch-hal[train]", ConfigError):
            from sentencepiece import SentencePieceProcessor
        self.content = read_file(tokenizer_model)
        self._pieces = SentencePieceProcessor()
        with contained(f"{tokenizer_model} is not a SentencePiece model", ConfigError):
            require_safe(self.content)
            self._pieces.LoadFromSerializedProto(self.content)
            count = self._pieces.get_piece_size()
        if count == 0:
            raise ConfigError(f"{tokenizer_model} is not a SentencePiece model: it has no pieces")
        self.count = count
        self.vocab_size, self.eod = self._ends(tokenizer_model)

    def _ends(self, path: str) -> tuple[int, int]:
        eos = self._pieces.eos_id()
        if eos < 0:
            raise ConfigError(
                f"{path} has no </s> token to end documents with; use --tokenizer-type SentencePieceTokenizer"
            )
        return self.count, eos

    def encode(self, text: str) -> list[int]:
        with text_errors():
            return [*self.prefix, *self._pieces.encode(text, out_type=int)]

    def decode(self, ids: Sequence[int]) -> str:
        with contained("the tokenizer cannot decode ids", ConfigError):
            return str(self._pieces.decode([i for i in map(int, ids) if i < self.count]))

    def token_id(self, token: str) -> int | None:
        index = int(self._pieces.piece_to_id(token))  # the id of <unk> for what is no piece
        return index if self._pieces.id_to_piece(index) == token else None


class SentencePieceTokenizer(GPTSentencePieceTokenizer):
    """A SentencePiece model with Megatron's <CLS>, <SEP>, <EOD>, <MASK>, <PAD>, <BOS>, <EOS> and <extra_id_N> appended
    if missing; <EOD> ends a document."""

    def __init__(self, tokenizer_model: str, vocab_extra_ids: int = 0) -> None:
        self._extra = vocab_extra_ids
        super().__init__(tokenizer_model)

    def _ends(self, path: str) -> tuple[int, int]:
        sp, ids = self._pieces, {self._pieces.id_to_piece(i): i for i in range(self.count)}
        own = {"<PAD>": sp.pad_id(), "<BOS>": sp.bos_id(), "<EOS>": sp.eos_id()}
        names = ["<CLS>", "<SEP>", "<EOD>", "<MASK>"]
        names += [sp.id_to_piece(i) if i >= 0 else name for name, i in own.items()]
        names += [f"<extra_id_{n}>" for n in range(self._extra)]
        size = self.count
        for name in names:
            if name not in ids:
                ids[name], size = size, size + 1
        self._ids = ids
        return size, ids["<EOD>"]

    def token_id(self, token: str) -> int | None:
        return self._ids.get(token)


class Llama2Tokenizer(GPTSentencePieceTokenizer):
    """Llama's SentencePiece model: <s> begins a text, </s> ends a document."""

    def _ends(self, path: str) -> tuple[int, int]:
        if self._pieces.bos_id() < 0:
            raise ConfigError(
                f"{path} has no <s> token to begin texts with; use --tokenizer-type GPTSentencePieceTokenizer"
            )
        self.prefix = (self._pieces.bos_id(),)
        return super()._ends(path)


class HuggingFaceTokenizer(_LibraryTokenizer):
    """Any tokenizer.json, or a folder that contains one, with what other files of the folder say about it.

    `eod` is the `eos_token` of tokenizer_config.json, or else the first of the usual names that is in the vocabulary.
    `other_ends` are the ids of generation_config.json, or without that file of config.json. Prompts begin with the
    tokens with which they begin in transformers.
    """

    def __init__(self, tokenizer_model: str) -> None:
        from tokenizers import Tokenizer as Pipeline

        path = Path(tokenizer_model)
        path = path / "tokenizer.json" if path.is_dir() else path
        self.content = read_file(str(path))
        with contained(f"{path} is not a tokenizer.json", ConfigError):
            self._pipeline = Pipeline.from_buffer(self.content)
            self._pipeline.no_truncation()
            self._pipeline.no_padding()
            self._pipeline.encode_special_tokens = True
            require_bounded(self._pipeline, path)
            self.vocab_size = _size(self._pipeline.get_vocab(with_added_tokens=True))
        settings = json_object(path.with_name("tokenizer_config.json"))
        eos_token = _token(settings, "eos_token")
        names = (eos_token,) if eos_token else _END_NAMES
        ids = [i for name in names if (i := self._pipeline.token_to_id(name)) is not None]
        if not ids:
            raise ConfigError(
                f"{path} has no token called {' or '.join(names)} to end documents with; write its name as "
                f'"eos_token" into a tokenizer_config.json in the same folder'
            )
        self.eod = int(ids[0])
        self.begin = self._pipeline.token_to_id(_token(settings, "bos_token") or "")
        # These settings replace the post-processor of tokenizer.json, as they do in transformers.
        self._adds: tuple[bool, bool] | None = None
        if "add_bos_token" in settings or "add_eos_token" in settings:
            self._adds = settings.get("add_bos_token") is True, settings.get("add_eos_token") is True
        self.other_ends = ends_of(path.parent)

    def encode(self, text: str) -> list[int]:
        with text_errors():
            return list(self._pipeline.encode(text, add_special_tokens=False).ids)

    def encode_prompt(self, text: str) -> list[int]:
        if self._adds is None:
            with text_errors():
                return list(self._pipeline.encode(text).ids)
        first, last = self._adds
        return [
            *([self.begin] if first and self.begin is not None else []),
            *self.encode(text),
            *([self.eod] if last else []),
        ]

    def pipeline(self) -> str:
        return self.content.decode()


def _token(settings: dict[str, Any], name: str) -> str | None:
    """The text of a special token, which is an object with other properties in some files."""
    token = settings.get(name)
    token = token.get("content") if isinstance(token, dict) else token
    return None if token is None else str(token)


def _size(vocabulary: dict[str, int]) -> int:
    if not vocabulary:
        raise ValueError("the vocabulary is empty")
    longest = max(map(len, vocabulary))
    if longest > MAX_TOKEN:
        raise ValueError(f"a token has {longest} characters; at most {MAX_TOKEN} are supported")
    return max(vocabulary.values()) + 1
