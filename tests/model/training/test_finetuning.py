"""`hal train --sft`: from a folder of Hugging Face and a file of examples to a finetuned model, under every layout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import finetuning
import pytest
from parallel_runs import CP2, PP2, SP, TP2, ULYSSES, ZBV, close

import hal
from hal.cli.train import main
from hal.model.config.schema import ConfigError
from hal.model.parallel.document_mask import Documents
from hal.testing.processes import run_processes

pytest.importorskip("transformers", reason="needs transformers (extra: transformers)")

PACKED = ["--packing", "--seq-length", "96", "--lr", "3e-3"]
BATCH = ["--micro-batch-size", "1", "--global-batch-size", "4"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """llama/, completions.jsonl and conversations.jsonl."""
    finetuning.save_llama(tmp_path / "llama", layers=4)
    finetuning.write_lines(tmp_path / "completions.jsonl", finetuning.completions(24))
    finetuning.write_lines(tmp_path / "conversations.jsonl", finetuning.conversations(24))
    return tmp_path


def command(folder: Path, *words: object, load: str = "llama", run: str = "run") -> list[float]:
    """The losses of a run of the command line."""
    where = ["--backend", "cpu_ref", "--load", folder / load, "--run-dir", folder / run, "--sample-tokens", 0]
    data = ["--sft", "--data-path", folder / "conversations.jsonl"]
    assert main([str(word) for word in (*where, *data, *words)]) == 0
    return [loss for _, loss in json.loads((folder / run / "run.json").read_text())["losses"]]


@pytest.mark.slow
def test_a_folder_and_a_file_are_enough(folder: Path, capsys: Any) -> None:
    losses = command(folder, "--eval-interval", 3, "--eval-iters", 1, "--split", "20,4,0", "--sample-tokens", 4)
    said = capsys.readouterr().out
    assert len(losses) == 5, "one pass over 20 examples in batches of 4"
    assert "note: train: 20 examples in 20 sequences, of which " in said and "note: valid: 4 examples in 4" in said
    assert "iterations 1 to 5" in said and "a sample:\n" in said and said.count("validation loss") >= 1


@pytest.mark.slow
def test_an_interrupted_epoch_goes_on_bit_for_bit(folder: Path) -> None:
    epochs = [*PACKED, "--num-train-epochs", 2, "--micro-batch-size", 2]
    whole = command(folder, *epochs, run="whole")
    command(folder, *epochs, "--exit-interval", 10, "--save", folder / "saved", run="first")
    rest = command(folder, *epochs, load="saved", run="rest")
    assert len(whole) == 14 and rest == whole[-4:], "an epoch has 7 steps"
    # The checkpoint names the data and the length of the run.
    alone = ["--backend", "cpu_ref", "--load", folder / "saved", "--run-dir", folder / "alone", "--sample-tokens", 0]
    assert main([str(word) for word in alone]) == 0
    assert [loss for _, loss in json.loads((folder / "alone" / "run.json").read_text())["losses"]] == rest
    assert len(command(folder, "--train-iters", 12, load="saved", run="shorter")) == 2


def epoch(folder: Path, *words: object) -> tuple[float, float | None]:
    """Loss and gradient norm of a step over all examples."""
    data = folder / "completions.jsonl"
    count = finetuning.trainer(folder / "llama", "--data-path", data, *words).data["train"].dataset.sequences
    run = finetuning.trainer(folder / "llama", "--data-path", data, *words, "--global-batch-size", count)
    step = run.step()
    return step.loss, step.grad_norm


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_packed_examples_train_as_alone(
    family: str, folder: Path, cpu_ref: hal.Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "gpt2":  # only learned positions show whether they restart
        shutil.rmtree(folder / "llama")
        finetuning.save_gpt2(folder / "llama")
    one = ["--micro-batch-size", 1]
    alone = epoch(folder, *one, "--seq-length", 96)
    with monkeypatch.context() as patch:
        patch.setattr(Documents, "mask", None)  # no mask of full sequences is made
        packed = epoch(folder, *one, *PACKED)
    assert packed == pytest.approx(alone, rel=1e-6)
    for path in (["--no-flash-attn"], ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "linear"]):
        assert epoch(folder, *one, *PACKED, *path) == pytest.approx(alone, rel=1e-6)


def test_ids_that_pad_the_vocabulary_do_not_change_the_loss(folder: Path, cpu_ref: hal.Backend) -> None:
    one = ["--micro-batch-size", 1, *PACKED]
    exact = epoch(folder, *one)
    for fused in ([], ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "linear"]):
        assert epoch(folder, *one, "--make-vocab-size-divisible-by", 64, *fused) == pytest.approx(exact, rel=1e-6)


def steps(folder: Path, options: dict[str, Any], count: int) -> list[tuple[float, float | None]]:
    """(loss, gradient norm) of `count` steps and an evaluation, in the world described by a launcher."""
    hal.use("cpu_ref")
    words = [*PACKED, *BATCH, "--data-path", folder / "conversations.jsonl", "--train-iters", 20]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [value])]
    run = finetuning.trainer(folder / "llama", *words, "--eval-interval", 1, "--eval-iters", 1, "--split", "20,4,0")
    return [*((step.loss, step.grad_norm) for step in (run.step() for _ in range(count))), (run.evaluate(), None)]


FUSED_LOSS = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2-pp2": (4, {**TP2, **PP2}),
    "dp2": (2, {}),
    "dp2-zero3": (2, {"zero_stage": 3}),
    "cp2-ring": (2, CP2),
    "cp2-ulysses": (2, ULYSSES),
    "tp2-sp-cp2": (4, {**TP2, **SP, **CP2}),
    "pp2-zero-bubble": (2, ZBV),
    "tp2-fused": (2, {**TP2, **FUSED_LOSS}),
}
SLOW = ("tp2-pp2", "cp2-ring")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else pytest.mark.nightly) for n in LAYOUTS]
)
def test_every_layout_finetunes_as_one_process(name: str, folder: Path, cpu_ref: hal.Backend) -> None:
    world, layout = LAYOUTS[name]
    one = steps(folder, {}, 4)
    per_rank = run_processes(world, steps, folder, layout, 4, timeout=180.0)
    assert all(r == per_rank[0] for r in per_rank)
    close(per_rank[0], one, 1e-5, 1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--sft"], "--sft needs examples; give a file of JSON lines with --data-path"),
        (["--sft", "--text-file", "x"], "--sft and --text-file contradict each other"),
        (["--sft", "--data-path", "x", "--num-train-epochs", "2", "--train-iters", "3"], "--num-train-epochs and --tr"),
        (["--packing"], "--packing would be ignored: it needs --sft"),
        (["--num-train-epochs", "2"], "--num-train-epochs would be ignored: it needs --sft"),
        (["--sft", "--data-path", "x", "--sft-tokenizer-prompt-format", "identity"], "the tokenizer's own chat templ"),
    ],
)
def test_options_that_contradict_finetuning_are_refused(words: list[str], message: str, capsys: Any) -> None:
    assert main(["--backend", "cpu_ref", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_warm_up_longer_than_the_run_is_refused_when_the_data_are_known(folder: Path, cpu_ref: hal.Backend) -> None:
    words = ["--data-path", folder / "completions.jsonl", "--lr-warmup-iters", 6, "--lr-decay-style", "linear"]
    with pytest.raises(ConfigError, match="--lr-warmup-iters 6 must be below the 6 iters of the decay"):
        finetuning.trainer(folder / "llama", *words)
    run = finetuning.trainer(folder / "llama", *words, "--num-train-epochs", 1.5)
    assert (run.config.train_iters, run.config.lr_decay_iters, run.config.lr) == (9, 9, 2e-5)
