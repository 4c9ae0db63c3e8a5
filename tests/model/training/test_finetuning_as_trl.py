"""Finetuning computes the losses of TRL's SFTTrainer: of prompts and completions, of messages, and packed.

Runs every night, where TRL is installed: pip install trl -c constraints.txt
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import finetuning
import pytest
import torch

import hal

pytestmark = pytest.mark.nightly

LENGTH, STEPS = 96, 4


def theirs(folder: Path, model: Any, examples: list[Any], batch: int, **options: Any) -> list[float]:
    """The losses of the steps of TRL over `examples` in this order."""
    trl = pytest.importorskip("trl", reason="needs trl: pip install trl -c constraints.txt")
    import datasets

    losses: list[float] = []

    class InOrder(trl.SFTTrainer):
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *arguments: Any, **keywords: Any) -> Any:
            loss = super().training_step(*arguments, **keywords)
            losses.append(float(loss))
            return loss

    arguments = trl.SFTConfig(
        output_dir=str(folder / "trl"),
        max_steps=STEPS,
        per_device_train_batch_size=batch,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_length=LENGTH + 1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        disable_tqdm=True,
        **options,
    )
    data = datasets.Dataset.from_list(examples)
    InOrder(model=model, args=arguments, train_dataset=data, processing_class=finetuning.tokenizer()).train()
    return losses


def ours(folder: Path, data: Path, backend: Any, *options: object) -> tuple[list[float], Any]:
    """The losses of HAL's steps, and the sequences in the order of the epochs."""
    with hal.activated(backend):
        run = finetuning.trainer(
            folder, "--data-path", data, "--lr", 1e-2, "--seq-length", LENGTH, "--train-iters", STEPS, *options
        )
        return [run.step().loss for _ in range(STEPS)], run.data["train"].dataset


KINDS = {
    "completions": (finetuning.completions, {"completion_only_loss": True}),
    "messages": (finetuning.conversations, {"assistant_only_loss": True}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_losses_are_those_of_trl(kind: str, tmp_path: Path, cpu_ref: hal.Backend) -> None:
    make, options = KINDS[kind]
    examples = make(10)
    model = finetuning.save_llama(tmp_path / "llama")
    data = finetuning.write_lines(tmp_path / "train.jsonl", examples)
    batches = ("--micro-batch-size", 2, "--global-batch-size", 4)
    got, dataset = ours(tmp_path / "llama", data, cpu_ref, *batches)
    order = [examples[n] for epoch in range(2) for n in dataset.order(epoch)]
    assert order[:10] != examples, "the test needs an order that is drawn"
    want = theirs(tmp_path, model, order, 4, **options)
    assert len(want) == STEPS and want[-1] < want[0] - 0.5
    assert got == pytest.approx(want, rel=2e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_the_losses_are_those_of_trl(kind: str, tmp_path: Path, cpu_ref: hal.Backend) -> None:
    """A step is an epoch, so it does not matter which sequence an example is packed into."""
    make, options = KINDS[kind]
    examples = make(24)
    model = finetuning.save_llama(tmp_path / "llama")
    data = finetuning.write_lines(tmp_path / "train.jsonl", examples)
    with hal.activated(cpu_ref):
        plan = finetuning.trainer(tmp_path / "llama", "--data-path", data, "--packing", "--seq-length", LENGTH)
    sequences = plan.data["train"].dataset.sequences
    assert 2 <= sequences <= 16, "the test needs several sequences of several examples"
    got, _ = ours(
        tmp_path / "llama", data, cpu_ref, "--packing", "--micro-batch-size", 1, "--global-batch-size", sequences
    )
    want = theirs(tmp_path, model, examples, 1000, packing=True, **options)
    assert got == pytest.approx(want, rel=2e-6)
