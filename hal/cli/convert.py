"""`hal convert`: converts checkpoints between HAL, Hugging Face, Megatron-LM and megatron-core. Weights are converted;
optimizer states are not."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .arguments import Parser


def parser() -> Parser:
    """The options of `hal convert`."""
    from hal.model.apps.convert import convert
    from hal.model.apps.convert.families import FAMILIES
    from hal.model.checkpoint.saved_config import TOKENIZER
    from hal.model.config.command_line import add_options

    command = Parser("convert", description=__doc__)
    add = command.add_argument
    add("--load", type=Path, required=True, metavar="DIR", help="the checkpoint to read")
    add("--save", type=Path, required=True, metavar="DIR", help="a new folder for the result")
    add("--loader", choices=convert.FORMATS, help="format of --load (default: detected)")
    add("--saver", choices=convert.FORMATS, required=True, help="format of --save")
    add(
        "--target-tensor-parallel-size",
        type=int,
        metavar="N",
        help="tensor-parallel size of the result (megatron; default 1)",
    )
    add(
        "--target-pipeline-parallel-size",
        type=int,
        metavar="N",
        help="pipeline-parallel size of the result (megatron; default 1)",
    )
    add(
        "--target-expert-parallel-size",
        type=int,
        metavar="N",
        help="expert-parallel size of the result (megatron; default 1)",
    )
    add(
        "--saver-transformer-impl",
        choices=("local", "transformer_engine"),
        help="the layers whose names the result has (megatron; default local)",
    )
    add(
        "--moe-grouped-gemm",
        action="store_true",
        default=None,
        help="store experts as models with --moe-grouped-gemm load them (megatron)",
    )
    add("--make-vocab-size-divisible-by", type=int, metavar="N", help="padding of the vocabulary (default 128)")
    add(
        "--true-vocab-size",
        type=int,
        metavar="N",
        help="vocabulary size of --load without padding, if it does not contain it",
    )
    add("--chat-template", type=Path, metavar="FILE", help="Jinja chat template of the result (huggingface)")
    add("--model-type", choices=FAMILIES, help="family of the result (huggingface; default: the first that fits)")
    add("--dtype", choices=convert.DTYPES, help="precision of the result (default: that of --load)")
    group = command.add_argument_group("tokenizer of the result (hal)", argument_default=argparse.SUPPRESS)
    add_options(group, TOKENIZER)
    return command


def main(argv: Sequence[str]) -> int:
    """Runs `hal convert` with these arguments."""
    from hal.model.apps.convert import convert
    from hal.model.checkpoint.saved_config import TOKENIZER

    command = parser()
    arguments = command.parse_args(argv)
    tokenizer = {name: getattr(arguments, name) for name in TOKENIZER if hasattr(arguments, name)}
    sizes = [f"target_{dimension}_parallel_size" for dimension in ("tensor", "pipeline", "expert")]
    ignored = {
        "megatron": (*sizes, "saver_transformer_impl", "moe_grouped_gemm"),
        "hal": tuple(tokenizer),
        "huggingface": ("chat_template", "model_type"),
    }
    for saver, names in ignored.items():
        for name in names:
            if arguments.saver != saver and getattr(arguments, name) is not None:
                command.error(f"--{name.replace('_', '-')} would be ignored: it is for --saver {saver}")
    if arguments.saver == "huggingface" and arguments.make_vocab_size_divisible_by is not None:
        command.error("--make-vocab-size-divisible-by would be ignored: Hugging Face models have no padding")
    if tokenizer and "tokenizer_type" not in tokenizer:
        command.error("the tokenizer's options need --tokenizer-type")
    for name in (*sizes, "make_vocab_size_divisible_by"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            command.error(f"--{name.replace('_', '-')} must be at least 1")
    loader = arguments.loader or convert.detect(arguments.load)
    weights = convert.read(arguments.load, loader, vocabulary=arguments.true_vocab_size)
    target = convert.Target(
        arguments.saver,
        arguments.save,
        tp=arguments.target_tensor_parallel_size or 1,
        pp=arguments.target_pipeline_parallel_size or 1,
        ep=arguments.target_expert_parallel_size or 1,
        transformer_engine=arguments.saver_transformer_impl == "transformer_engine",
        grouped=bool(arguments.moe_grouped_gemm),
        divisible_by=arguments.make_vocab_size_divisible_by or 128,
        dtype=arguments.dtype,
        tokenizer=tokenizer,
        chat_template=arguments.chat_template,
        model_type=arguments.model_type,
    )
    notes = convert.write(weights, target)
    count = sum(weights.meta(name).numel() for name in weights.tensors)
    dtype = str(weights.dtype).removeprefix("torch.")
    print(f"{loader} -> {arguments.saver}: {count:,} parameters in {dtype}, {weights.vocabulary} ids: {arguments.save}")
    for note in notes:
        print(f"note: {note}")
    return 0
