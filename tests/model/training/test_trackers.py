"""A run's metrics are sent to Weights & Biases only on request; nothing else needs its package."""

import json
import sys
from types import SimpleNamespace

import pytest

import hal
from hal.model.training.run import train


class Fake:
    """Replaces the wandb package: stores what it receives."""

    class Error(Exception):
        pass

    def __init__(self):
        self.rows, self.finished, self.settings = [], False, None

    def init(self, **settings):
        self.settings = settings
        return SimpleNamespace(log=lambda values, step: self.rows.append((step, values)), finish=self.finish)

    def finish(self):
        self.finished = True


def test_a_projects_run_gets_every_iteration_and_the_options(tiny, cpu_ref, monkeypatch, tmp_path):
    fake = Fake()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(tiny(backend="cpu_ref", train_iters=3, eval_interval=2, eval_iters=1, wandb_project="p", sample_tokens=0))
    assert fake.settings["project"] == "p" and fake.settings["name"] == "run" and fake.finished
    assert fake.settings["config"]["hidden_size"] == 32
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert [[n, row["lm loss"]] for n, row in fake.rows if "lm loss" in row] == record["losses"]
    assert [[n, row["lm loss validation"]] for n, row in fake.rows if "lm loss validation" in row] == record[
        "evaluations"
    ]
    assert [n for n, _ in record["step_seconds"]] == [1, 2, 3] and all(s > 0 for _, s in record["step_seconds"])


def test_events_have_megatrons_tags_and_lie_where_the_user_says(tiny, cpu_ref, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path / "logs" / "gpt_4_layers"
    options = {"fp16": True, "initial_loss_scale": 1024.0, "eval_interval": 2, "eval_iters": 1, "sample_tokens": 0}
    train(tiny(backend="cpu_ref", train_iters=3, tensorboard_dir=str(folder), **options))
    assert not list((tmp_path / "run").glob("events*"))
    events = EventAccumulator(str(folder))
    events.Reload()
    assert {"lm loss", "learning-rate", "loss-scale", "grad-norm", "lm loss validation"} <= set(
        events.Tags()["scalars"]
    )
    losses = [[event.step, event.value] for event in events.Scalars("lm loss")]
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert losses == [[n, pytest.approx(value)] for n, value in record["losses"]]


def test_it_is_needed_only_when_it_is_asked_for(tiny, cpu_ref, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    train(tiny(backend="cpu_ref", train_iters=1, sample_tokens=0))
    with pytest.raises(hal.HalError, match=r"pip install 'torch-hal\[wandb\]'"):
        train(tiny(backend="cpu_ref", train_iters=1, wandb_project="p"))


def test_a_refusal_of_the_service_is_one_line(tiny, cpu_ref, monkeypatch):
    fake = Fake()

    def init(**settings):
        raise Fake.Error("no API key\nconfigured")

    fake.init = init
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with pytest.raises(hal.HalError, match="no API key configured; log in with `wandb login`, or set WANDB_MODE"):
        train(tiny(backend="cpu_ref", train_iters=1, wandb_project="p"))


def test_a_name_without_a_project_is_noted(tiny):
    assert "--wandb-exp-name n has no effect: it needs --wandb-project" in tiny(wandb_exp_name="n").notes


@pytest.mark.slow
def test_the_real_package_offline(tiny, cpu_ref, monkeypatch, tmp_path):
    pytest.importorskip("wandb", reason="needs wandb (extra: wandb)")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    train(tiny(backend="cpu_ref", train_iters=2, wandb_project="p", sample_tokens=0))
    assert list((tmp_path / "run" / "wandb").glob("offline-run-*/*.wandb"))
