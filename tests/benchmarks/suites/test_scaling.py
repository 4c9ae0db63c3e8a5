"""The counted rows of `hal bench scaling` repeat exactly; `hal bench train` with a layout reports every rank."""

from __future__ import annotations

import json

import pytest
import torch

from hal.bench.harness.live_bytes import LiveBytes
from hal.cli import main

TINY = ["--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4", "--seq-length", "16"]


def test_live_bytes_counts_living_storages_and_their_peak() -> None:
    before = torch.ones(1000)
    with LiveBytes() as live:
        a = torch.zeros(100)
        b = a.view(10, 10).t()
        del a
        assert live.now() == 400, "a view keeps its storage"
        c = torch.zeros(50, dtype=torch.float64)
        assert live.now() == live.peak == 800
        del b, c
        before.mul_(2)
        assert live.now() == 0 and live.peak == 800
        d = torch.zeros(200)
        d.untyped_storage().resize_(0)
        assert live.now() == 0 and live.peak == 800


def test_live_bytes_counts_the_results_of_the_backward_pass() -> None:
    x = torch.ones(100, requires_grad=True)
    with LiveBytes() as live:
        (x * 2).sum().backward()
        assert live.now() == 400, "the gradient stays"


@pytest.mark.nightly
def test_counted_rows_are_the_same_every_time(capsys, tmp_path) -> None:
    def rows(name: str) -> list[dict]:
        file = tmp_path / name
        only = ["--only", "weights between steps DP 1", "activations of a microbatch GPT TP 1"]
        assert main(["bench", "scaling", *only, "--json", str(file), "--check"]) == 0
        return json.loads(file.read_text())

    first = rows("a")
    assert first == rows("b")
    weights, activations = first
    assert (weights["peer"], weights["unit"], weights["ratio_median"]) == ("formula", "B", 1.0)
    assert activations["ours"] > weights["ours"] > 0
    assert "MiB" in capsys.readouterr().out


@pytest.mark.nightly
def test_recorded_bubbles_and_every_ranks_state(tmp_path) -> None:
    file = tmp_path / "rows"
    only = ["--only", "bubble PP 2", "optimizer between steps DP 2", "peak of a step PP 2 interleaved"]
    assert main(["bench", "scaling", *only, "--json", str(file), "--check"]) == 0
    shares = {(r["name"], r["shape"]): r["ours"] for r in json.loads(file.read_text())}
    assert shares["bubble", "PP 2 1F1B, 8 microbatches"] == 1 / 8
    assert shares["bubble", "PP 2 zero bubble, 4 microbatches, 2 stages per rank"] == pytest.approx(1 / 24)


@pytest.mark.slow
def test_training_under_a_layout(capsys, tmp_path) -> None:
    file = tmp_path / "rows"
    assert main(["bench", "train", *TINY, "--steps", "2", "--json", str(file)]) == 0
    (record,) = json.loads(file.read_text())
    assert record["steps"] == 2 and record["tokens_per_second"] > 0
    ratio = record["model_flops_per_second"] / record["tokens_per_second"]
    assert ratio == pytest.approx(6 * (2 * 12 * 32**2 + 32 * 256) + 12 * 2 * 32 * 8.5)
    assert [r["peak_memory_bytes"] > 0 for r in record["ranks"]] == [True]
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.nightly
def test_training_under_a_layout_of_four_ranks(tmp_path) -> None:
    file = tmp_path / "rows"
    layout = ["--nproc-per-node", "4", "--tensor-model-parallel-size", "2", "--sequence-parallel"]
    assert (
        main(["bench", "train", *TINY, *layout, "--global-batch-size", "8", "--steps", "2", "--json", str(file)]) == 0
    )
    (record,) = json.loads(file.read_text())
    assert [(r["rank"], r["tp"], r["dp"]) for r in record["ranks"]] == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    assert all(r["peak_memory_bytes"] > 1e6 for r in record["ranks"])


def test_only_the_train_suite_takes_a_layout(capsys) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "scaling", "--tensor-model-parallel-size", "2"])
    assert "only `hal bench train` takes the options of hal train" in capsys.readouterr().err
    assert main(["bench", "train", "--tensor-model-parallel-size", "3", "--nproc-per-node", "2"]) == 2
    assert "world size 2 is not divisible by" in capsys.readouterr().err


def test_options_that_a_layout_does_not_use_are_refused(capsys) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "train", "--tensor-model-parallel-size", "2", "--check", "--one-thread"])
    assert caught.value.code == 2
    assert "--one-thread, --check: not available for a training layout" in capsys.readouterr().err
