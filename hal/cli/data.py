"""`hal data preprocess` converts text to the files that `hal train --data-path` reads; `hal data inspect` shows what
such files hold. The work is done in hal.model.data.preprocess."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .arguments import Parser

if TYPE_CHECKING:
    from hal.model.common.progress_bar import ProgressBar
    from hal.model.data.preprocess.preprocess import Result

_USAGE = """usage: hal data COMMAND [options]

  preprocess  text (JSON lines, WikiExtractor's output, plain) into .bin and .idx
  inspect     counts, lengths and samples of a .bin and .idx

`hal data COMMAND --help` shows a command's options."""


def main(argv: Sequence[str]) -> int:
    """Runs `hal data` with these arguments."""
    commands = {"preprocess": _preprocess, "inspect": _inspect}
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if argv else 2
    if argv[0] not in commands:
        print(f"hal data: there is no command '{argv[0]}'; commands: {', '.join(commands)}", file=sys.stderr)
        return 2
    return commands[argv[0]](argv[1:])


def parser() -> argparse.ArgumentParser:
    """The options of both commands, for completion."""
    both = argparse.ArgumentParser(prog="hal data")
    commands = both.add_subparsers()
    for name, options in (("preprocess", _preprocess_options()), ("inspect", _inspect_options())):
        commands.add_parser(name, help=options.description, parents=[options], add_help=False)
    return both


def _preprocess_options() -> Parser:
    from hal.model.data.preprocess.sources import DOCUMENTS, FORMATS

    parser = Parser(
        "data preprocess", description="Text into Megatron's indexed datasets, PREFIX_KEY_document.bin/.idx"
    )
    add = parser.add_argument
    add("--input", nargs="+", required=True, metavar="FILE", help="files, folders or patterns; .gz, .bz2, .zst too")
    add("--output-prefix", required=True, metavar="PREFIX", help="beginning of the output's names")
    add("--input-format", choices=FORMATS, help="JSON lines, WikiExtractor's <doc>, or text (default: detected)")
    add("--json-keys", nargs="+", default=["text"], metavar="KEY", help="fields to read; each gives a dataset")
    add(
        "--documents", choices=DOCUMENTS, help="plain text: what a document is (default paragraph: up to an empty line)"
    )
    add("--split-sentences", action="store_true", help="one sequence per sentence, in PREFIX_KEY_sentence")
    add("--lang", metavar="CODE", help="language of the sentences, ISO 639 (default en)")
    add("--keep-newlines", action="store_true", help="keep the line ends between sentences")
    add(
        "--dataset-impl",
        choices=("mmap", "lazy", "cached"),
        default="mmap",
        help="name of an older reader; the files are always those that are memory-mapped, and have the same items",
    )
    add("--append-eod", action="store_true", help="end every document with the end-of-document id")
    add(
        "--make-vocab-size-divisible-by",
        type=_positive,
        default=128,
        metavar="N",
        help="for the reported padded size",
    )
    add("--workers", type=_positive, default=1, metavar="N", help="processes (default 1)")
    add("--on-error", choices=("refuse", "skip"), default="refuse", help="for broken documents (default refuse)")
    add(
        "--log-interval",
        type=_positive,
        default=10000,
        metavar="N",
        help="documents per log line, without a terminal",
    )
    _add_tokenizer(parser, required=True)
    return parser


def _preprocess(argv: Sequence[str]) -> int:
    from hal.model.common.progress_bar import ProgressBar
    from hal.model.data.preprocess.encode import Encoding
    from hal.model.data.preprocess.preprocess import Interrupted, Job, preprocess

    parser = _preprocess_options()
    arguments = parser.parse_args(argv)
    for name in ("lang", "keep_newlines"):
        if getattr(arguments, name) and not arguments.split_sentences:
            parser.error(f"--{name.replace('_', '-')} would be ignored: it needs --split-sentences")
    if arguments.documents and arguments.input_format not in (None, "text"):
        parser.error("--documents would be ignored: it is for --input-format text")
    if len(set(arguments.json_keys)) != len(arguments.json_keys):
        parser.error("--json-keys names a field twice")
    language = arguments.lang or "en"
    if not re.fullmatch("[a-z]{2,3}", language):
        parser.error(f"--lang is an ISO 639 code such as en or de; found {language!r}")
    job = Job(
        inputs=arguments.input,
        output_prefix=arguments.output_prefix,
        encoding=Encoding(
            tokenizer=_tokenizer_options(parser, arguments),
            keys=tuple(arguments.json_keys),
            language=language if arguments.split_sentences else None,
            keep_newlines=arguments.keep_newlines,
            append_eod=arguments.append_eod,
        ),
        format=arguments.input_format,
        documents=arguments.documents or "paragraph",
        workers=arguments.workers,
        on_error=arguments.on_error,
        divisible_by=arguments.make_vocab_size_divisible_by,
    )
    try:
        with ProgressBar(1.0, stream=sys.stderr) as bar:
            progress = _Progress(bar, arguments.log_interval)
            result = preprocess(job, progress, lambda text: bar.print(f"hal data preprocess: {text}"))
    except (Interrupted, KeyboardInterrupt) as stopped:
        print(f"hal data preprocess: {stopped or 'interrupted'}", file=sys.stderr)
        return 130
    _report(result)
    return 0


def _report(result: Result) -> None:
    parts = {"empty": result.empty, "broken (skipped)": result.broken}
    besides = "".join(f", {count:,} {what}" for what, count in parts.items() if count)
    rate = result.documents / max(result.seconds, 1e-9)
    print(
        f"{result.documents:,} documents{besides}, {result.tokens:,} tokens in {result.seconds:.1f} s "
        f"({rate:,.0f} documents/s)"
    )
    for prefix in result.prefixes.values():
        print(f"{prefix}.bin, {prefix}.idx")


def _inspect_options() -> Parser:
    parser = Parser("data inspect", description="What an indexed dataset holds.")
    parser.add_argument("prefix", metavar="PREFIX", help="path of the files without .bin and .idx")
    parser.add_argument("--samples", type=_positive, default=3, metavar="N", help="documents to show (default 3)")
    _add_tokenizer(parser, required=False)
    return parser


def _inspect(argv: Sequence[str]) -> int:
    from hal.model.config.schema import Config
    from hal.model.data.preprocess.inspect import describe
    from hal.model.data.tokenizers.build import build_tokenizer

    parser = _inspect_options()
    arguments = parser.parse_args(argv)
    tokenizer = None
    if arguments.tokenizer_type is not None:
        tokenizer = build_tokenizer(Config(**_tokenizer_options(parser, arguments)))
    for line in describe(Path(arguments.prefix), tokenizer, arguments.samples):
        print(line)
    return 0


def _add_tokenizer(parser: Parser, *, required: bool) -> None:
    from hal.model.config.schema import TOKENIZERS

    add = parser.add_argument_group("tokenizer").add_argument
    add("--tokenizer-type", required=required, choices=TOKENIZERS, help="Megatron's names")
    add("--vocab-file", metavar="FILE", help="vocab.json of GPT-2, vocab.txt of BERT, or a JSON of words")
    add("--merge-file", metavar="FILE", help="merges.txt of GPT-2")
    add("--tokenizer-model", metavar="FILE", help="SentencePiece model, or tokenizer.json")
    add("--vocab-size", type=_positive, metavar="N", help="ids without end-of-document (NullTokenizer)")
    add("--vocab-extra-ids", type=_positive, metavar="N", help="<extra_id_N> tokens to append")


def _tokenizer_options(parser: Parser, arguments: argparse.Namespace) -> dict[str, Any]:
    """The tokenizer's options that were given. One that its type does not read is a usage error."""
    from hal.model.config.schema import Config
    from hal.model.config.tokenizer_options import OPTIONS, missing_options, readers

    kind = arguments.tokenizer_type
    given = {name: getattr(arguments, name) for name in OPTIONS if getattr(arguments, name) is not None}
    for name in given:
        if kind not in readers(name):
            flag = f"--{name.replace('_', '-')}"
            parser.error(f"{flag} would be ignored: it needs --tokenizer-type {' or '.join(readers(name))}")
    missing = missing_options(Config(tokenizer_type=kind, **given))
    if missing is not None:
        parser.error(missing)
    return {"tokenizer_type": kind, **given}


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be > 0; found {number}")
    return number


class _Progress:
    """The state of the run after every chunk: a bar on a terminal, else a line every `interval` documents."""

    def __init__(self, bar: ProgressBar, interval: int) -> None:
        self._bar, self._interval, self._next = bar, interval, interval

    def __call__(self, result: Result, share: float) -> None:
        rate = result.documents / max(result.seconds, 1e-9)
        text = f"{result.documents:,} documents  {rate:,.0f} documents/s  {result.bytes / 1e6:,.1f} MB"
        self._bar.update(share, text)
        if not self._bar.shown and result.documents >= self._next:
            self._next = result.documents - result.documents % self._interval + self._interval
            self._bar.print(f"{100 * share:5.1f} %  {text}")
