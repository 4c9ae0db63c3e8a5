"""Records which operations of torch the model runs on a device itself, apart from HAL's ops: `aten_ops.json`.

`python -m hal.testing.aten_recorder FILE...` writes that list, and a table of it into each FILE between two comments.
The runs are small: training of several model shapes in each dtype, alone and on two ranks (tensor and sequence
parallel, replicas, both kinds of context parallelism), evaluation, scoring, generation, and a checkpoint. Pipelines
and ZeRO are torch's own engines; what these call is not recorded.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_iter

import hal.ops  # noqa: F401  (defines the ops)
from hal.comm.contract import Comm
from hal.comm.threads import run_threads
from hal.core.dispatch import activated
from hal.rng import Rng

from . import aten_ops, golden
from .aten_device import AtenRecorder, DeviceTensor, RecordingBackend

BEGIN, END = "<!-- aten operations: begin -->", "<!-- aten operations: end -->"

MODELS: dict[str, dict[str, Any]] = {
    "documents": {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True},
    "rope-documents": {**golden.SHAPES["llama"], "reset_position_ids": True},
    "selective": {"recompute_granularity": "selective", "use_flash_attn": False},
    "sandwich": {"use_sandwich_norm": True, "shape_order": "BSH"},
    "fp16": {"fp16": True, "initial_loss_scale": 2.0**10},
    "float8": {"bf16": True, "fp8_format": "hybrid", "fp8_recipe": "blockwise"},
}
"""Further models besides golden.SHAPES, by name: options."""

PARALLEL: dict[str, dict[str, Any]] = {
    "tensor parallel": {"tensor_model_parallel_size": 2},
    "sequence parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "replicas": {"overlap_grad_reduce": True},
    "ring": {"context_parallel_size": 2, "context_parallel_algo": "ring"},
    "ulysses": {"context_parallel_size": 2, "context_parallel_algo": "ulysses"},
}
"""Layouts of two ranks, by name: options."""


SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "seq_length": 8,
    "micro_batch_size": 2,
    "global_batch_size": 4,
    "train_iters": 2,
    "lr": 1e-2,
    "make_vocab_size_divisible_by": 2,
    "eval_iters": 1,
}
VOCABULARY = 31


class _Data:
    """Random tokens, in documents of a few tokens."""

    source: ClassVar[dict[str, object]] = {}

    def fetch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        length = SIZES["seq_length"] + 1
        tokens = torch.randint(8, (count, length), generator=torch.Generator().manual_seed(first))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def starts(self, first: int, tokens: Tensor) -> Tensor:
        from hal.model.parallel import document_mask

        return document_mask.starts(tokens, 0)


@dataclass
class Recording:
    """operations: name with overload -> (the phases that used it, its smallest call)."""

    operations: dict[str, tuple[set[str], Any]] = field(default_factory=dict)
    phase: str = ""

    def note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Keeps a call if it is the operation's smallest; float32 is preferred, which every device has."""
        tensors = [x for x in tree_iter((args, kwargs)) if isinstance(x, Tensor)]
        low = any(x.dtype in (torch.bfloat16, torch.float16) for x in tensors)
        size = low, sum(x.numel() for x in tensors)
        name = str(func).removeprefix("aten.")
        phases, smallest = self.operations.setdefault(name, (set(), None))
        phases.add(self.phase)
        if smallest is None or size < smallest[0]:
            call = aten_ops.encode({"args": list(args), "kwargs": kwargs}, lambda x: isinstance(x, DeviceTensor))
            self.operations[name] = phases, (size, call)

    def as_json(self) -> dict[str, Any]:
        """The content of aten_ops.json."""
        return {
            name: {"used by": sorted(phases), **smallest[1]}
            for name, (phases, smallest) in sorted(self.operations.items())
        }


def record() -> dict[str, Any]:
    """Runs everything on the recording device; the content of aten_ops.json."""
    recording, backend = Recording(), RecordingBackend()
    with activated(backend):
        for options in _models():
            with AtenRecorder(recording.note):
                _alone(recording, options)
        for options in PARALLEL.values():
            recording.phase = "several ranks"
            run_threads(2, lambda comm: _rank(recording, backend, options, comm))  # noqa: B023  (runs at once)
    return recording.as_json()


def _models() -> Iterator[dict[str, Any]]:
    for options in golden.SHAPES.values():
        yield options
        yield {**options, "bf16": True}
    yield from MODELS.values()


def _trainer(options: dict[str, Any], world: int) -> Any:
    from hal.model.config.schema import Config
    from hal.model.training.trainer import make_trainer

    config = Config(**SIZES, **options)
    config.set_vocabulary(VOCABULARY)
    data: Any = {"train": _Data(), "valid": _Data()}
    return make_trainer(config, data, world=world)


def _rank(recording: Recording, backend: RecordingBackend, options: dict[str, Any], comm: Comm) -> None:
    backend.join(comm)
    with AtenRecorder(recording.note):
        _trainer(options, comm.size).step()


def _alone(recording: Recording, options: dict[str, Any]) -> None:
    from hal.model.inference.decoding import complete
    from hal.model.inference.engine import Engine
    from hal.model.inference.sampling import Sampling

    recording.phase = "training"
    trainer = _trainer(options, 1)
    trainer.step()
    trainer.step()
    recording.phase = "evaluation"
    trainer.evaluate()
    recording.phase = "checkpoints"
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        trainer.save(Path(folder))
        trainer.load(Path(folder))
    recording.phase = "generation"
    model = trainer.whole_model().requires_grad_(False)
    engine = Engine(model, VOCABULARY)
    for engine.bucketed in (False, True):  # as on devices without and with the capability static_shapes
        complete(engine, [[1, 2, 3], [4, 5]], 4, Sampling(0.8, 5, 0.9), [Rng(1), Rng(2)])
    recording.phase = "evaluation"
    tokens, labels = _Data().fetch(0, 2)
    engine.total(engine.score(tokens, labels, labels > 1))


def table(operations: dict[str, Any]) -> str:
    """A Markdown table of the operations. `composed` marks those that torch computes with others on every device."""
    lines = ["| operation | used by | |", "|---|---|---|"]
    for name, call in operations.items():
        full = f"aten::{name.removesuffix('.default')}"
        composed = torch._C._dispatch_has_kernel_for_dispatch_key(full, "CompositeExplicitAutograd")
        lines.append(f"| `{name}` | {', '.join(call['used by'])} | {'composed' if composed else ''} |")
    return "\n".join(lines)


def put_table(text: str, operations: dict[str, Any]) -> str:
    """`text` with the table between the two comments replaced."""
    block = f"{BEGIN}\n{table(operations)}\n{END}"
    replaced, count = re.subn(f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda match: block, text, flags=re.DOTALL)
    if count != 1:
        raise ValueError(f"the text has {count} blocks between {BEGIN} and {END}; it must have one")
    return replaced


def main(files: Sequence[str]) -> None:
    """Writes the list, and its table into `files`."""
    operations = record()
    lines = (f" {json.dumps(name)}: {json.dumps(call)}" for name, call in operations.items())
    aten_ops.LIST.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    for file in map(Path, files):
        file.write_text(put_table(file.read_text(), operations))


if __name__ == "__main__":
    main(sys.argv[1:])
