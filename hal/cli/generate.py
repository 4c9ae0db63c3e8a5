"""`hal generate`: continues prompts from the command line, a file or the terminal, with a trained model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .arguments import Parser, require_writable

if TYPE_CHECKING:
    from hal.model.inference.load import Pretrained
    from hal.model.inference.text_generation import Request


def parser() -> Parser:
    """The options of `hal generate`."""
    from hal.model.inference import load

    command = Parser("generate", description=__doc__)
    add = command.add_argument
    add("--prompt", action="append", metavar="TEXT", help="a text to continue; may be repeated")
    add(
        "--prompt-file", type=Path, metavar="FILE", help='a prompt per line, or .jsonl with a "prompt" (or "text") each'
    )
    add("--num-tokens-to-generate", type=int, default=128, metavar="N", help="maximum tokens per text (default 128)")
    add("--num-samples", type=int, default=1, metavar="N", help="texts per prompt (default 1)")
    add("--greedy", action="store_true", help="always choose the most likely token")
    add("--temperature", type=float, metavar="T", help="sampling temperature (default 1)")
    add("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    add(
        "--top-p",
        type=float,
        metavar="P",
        help="sample from the smallest set of most likely tokens of total probability P",
    )
    add("--stop", action="append", default=[], metavar="TEXT", help="stop before TEXT; may be repeated")
    add(
        "--no-kv-cache", action="store_true", help="recompute all keys and values for every token (to verify the cache)"
    )
    add("--output-file", type=Path, metavar="FILE.jsonl", help="write prompts and texts to this file")
    load.add_arguments(command, "seed", "micro_batch_size")
    return command


def main(argv: Sequence[str]) -> int:
    """Runs `hal generate` with these arguments."""
    from hal.model.apps.convert.pretrained_folder import converted
    from hal.model.inference import load

    command = parser()
    arguments = command.parse_args(argv)
    if arguments.greedy and not arguments.temperature and not arguments.top_k and arguments.top_p is None:
        arguments.temperature = 0.0
    elif arguments.greedy:
        command.error("--greedy takes the most likely token, so --temperature, --top-k and --top-p would be ignored")
    if arguments.num_tokens_to_generate < 1 or arguments.num_samples < 1:
        command.error("--num-tokens-to-generate and --num-samples must be at least 1")
    if arguments.prompt and arguments.prompt_file:
        command.error("--prompt and --prompt-file contradict each other; give one")
    if not all(arguments.stop):
        command.error("--stop must not be empty: it would end every text immediately")
    require_writable("--output-file", arguments.output_file)
    settable = ("seed", "micro_batch_size")
    if hasattr(arguments, "load"):
        ranks = getattr(arguments, "tensor_model_parallel_size", 1)
        arguments.load = str(converted(Path(arguments.load), ranks) or arguments.load)
    return load.run_command("generate", argv, arguments, lambda model: _run(arguments, model), *settable)


def _run(arguments: argparse.Namespace, model: Pretrained) -> int:
    from hal.model.common.atomic_files import write_text
    from hal.model.config.schema import ConfigError
    from hal.model.inference.sampling import Sampling
    from hal.model.inference.text_generation import Request, answer, encode_prompt, read_prompts

    temperature = 1.0 if arguments.temperature is None else arguments.temperature
    top_p = 1.0 if arguments.top_p is None else arguments.top_p
    request = Request(
        arguments.num_tokens_to_generate,
        Sampling(temperature, arguments.top_k or 0, top_p),
        model.config.seed,
        arguments.num_samples,
        tuple(arguments.stop),
        not arguments.no_kv_cache,
    )
    model.engine.require_one_replica("hal generate")
    texts = read_prompts(arguments.prompt_file) if arguments.prompt_file else arguments.prompt
    if not texts:
        if model.engine.mesh.world.size > 1:
            raise ConfigError("interactive mode needs a single process; give --prompt or --prompt-file")
        if sys.stdin.isatty():
            return _converse(model, request)
        texts = [sys.stdin.read()]
    prompts = [encode_prompt(model.tokenizer, text) for text in texts]
    answers = answer(model.engine, model.tokenizer, prompts, request, batch=model.config.micro_batch_size)
    if not model.engine.lead:
        return 0
    rows = [
        {"prompt": text, "text": one.text, "finish_reason": one.reason, "tokens": one.tokens}
        for text, samples in zip(texts, answers)
        for one in samples
    ]
    if arguments.output_file is not None:
        write_text(arguments.output_file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        print(f"{len(rows)} texts are in {arguments.output_file}")
        return 0
    for row in rows:
        print(f"{row['prompt']}{row['text']}", end="\n" if len(rows) == 1 else "\n---\n")
    return 0


def _converse(model: Pretrained, request: Request) -> int:
    """Interactive mode: one prompt per line, until the end of input."""
    from hal.model.inference.text_generation import encode_prompt, stream_text

    print("Enter one prompt per line; Ctrl-D ends.")
    number = 0
    while True:
        try:
            text = input("> ")
        except EOFError:
            print()
            return 0
        for piece, _ in stream_text(
            model.engine, model.tokenizer, encode_prompt(model.tokenizer, text), request, number
        ):
            print(piece, end="", flush=True)
        print()
        number += 1
