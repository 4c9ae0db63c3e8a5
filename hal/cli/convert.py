"""`hal convert`: checkpoints between HAL, Hugging Face, Megatron-LM and megatron-core. The weights travel; optimizer
states do not."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from .arguments import Parser


def parser() -> Parser:
    """The options of `hal convert`."""
    from hal.model.arguments import add_options
    from hal.model.conversion import convert
    from hal.model.pretrained import TOKENIZER

    made = Parser("convert", description=__doc__)
    add = made.add_argument
    add("--load", type=Path, required=True, metavar="DIR", help="the checkpoint to read")
    add("--save", type=Path, required=True, metavar="DIR", help="a new folder for the result")
    add("--loader", choices=convert.FORMATS, help="format of --load (default: seen by its files)")
    add("--saver", choices=convert.FORMATS, required=True, help="format of --save")
    add("--target-tensor-parallel-size", type=int, metavar="N", help="ranks that share layers (megatron; default 1)")
    add("--target-pipeline-parallel-size", type=int, metavar="N", help="stages (megatron; default 1)")
    add("--make-vocab-size-divisible-by", type=int, metavar="N", help="padding of the vocabulary (default 128)")
    add("--true-vocab-size", type=int, metavar="N", help="ids of --load that are no padding, where it does not say")
    add("--dtype", choices=convert.DTYPES, help="precision of the result (default: that of --load)")
    group = made.add_argument_group("the tokenizer that a HAL checkpoint names", argument_default=argparse.SUPPRESS)
    add_options(group, TOKENIZER)
    return made


def main(argv: Sequence[str]) -> int:
    """Runs `hal convert` with these arguments."""
    from hal.model.conversion import convert
    from hal.model.pretrained import TOKENIZER

    made = parser()
    arguments = made.parse_args(argv)
    tokenizer = {name: getattr(arguments, name) for name in TOKENIZER if hasattr(arguments, name)}
    ignored = {
        "megatron": ("target_tensor_parallel_size", "target_pipeline_parallel_size"),
        "hal": tuple(tokenizer),
    }
    for saver, names in ignored.items():
        for name in names:
            if arguments.saver != saver and getattr(arguments, name) is not None:
                made.error(f"--{name.replace('_', '-')} would be ignored: it is for --saver {saver}")
    if arguments.saver == "huggingface" and arguments.make_vocab_size_divisible_by is not None:
        made.error("--make-vocab-size-divisible-by would be ignored: huggingface's models have no padding")
    if tokenizer and "tokenizer_type" not in tokenizer:
        made.error("the tokenizer's options need --tokenizer-type")
    for name in ("target_tensor_parallel_size", "target_pipeline_parallel_size", "make_vocab_size_divisible_by"):
        if getattr(arguments, name) is not None and getattr(arguments, name) < 1:
            made.error(f"--{name.replace('_', '-')} must be at least 1")
    loader = arguments.loader or convert.detect(arguments.load)
    weights = convert.read(arguments.load, loader, vocabulary=arguments.true_vocab_size)
    target = convert.Target(
        arguments.saver,
        arguments.save,
        arguments.target_tensor_parallel_size or 1,
        arguments.target_pipeline_parallel_size or 1,
        arguments.make_vocab_size_divisible_by or 128,
        arguments.dtype,
        tokenizer,
    )
    convert.write(weights, target)
    count = sum(t.numel() for t in weights.tensors.values())
    dtype = str(weights.dtype).removeprefix("torch.")
    print(f"{loader} -> {arguments.saver}: {count:,} parameters in {dtype}, {weights.vocabulary} ids: {arguments.save}")
    return 0
