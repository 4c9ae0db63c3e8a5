"""Background saves: the state at the time of the call is written, failures are raised, the end of a run waits."""

import errno
import fcntl
import json
import os
import signal
import stat
import threading
from pathlib import Path

import pytest
import torch
from parallel_runs import stored_values

from hal import HalError
from hal.model.checkpoint import reader, writer
from hal.model.checkpoint.reader import RELEASE
from hal.model.config.schema import ConfigError
from hal.model.training import run as command
from hal.model.training.step_result import TrainingFailed
from hal.model.training.trainer import Trainer


@pytest.fixture(autouse=True)
def backend(cpu_ref):
    return cpu_ref


@pytest.fixture
def gate(monkeypatch):
    """Writing to disk continues only when this event is set."""
    opened, fsync = threading.Event(), os.fsync

    def wait(handle):
        if threading.current_thread() is not threading.main_thread():
            assert opened.wait(30)
        fsync(handle)

    monkeypatch.setattr(os, "fsync", wait)
    yield opened
    opened.set()


def start(config):
    return command.build(config)[0]


def stored(root, names):
    folder, state = reader.read_state(root)
    tensors = {n: torch.zeros_like(t) for n, t in names.items()}
    reader.load_tensors(folder, tensors)
    return state, tensors


def test_training_goes_on_while_the_moment_of_the_call_is_written(tiny, tmp_path, gate):
    trainer = start(tiny(save=str(tmp_path), async_save=True))
    trainer.step()
    before = stored_values(trainer)
    trainer.save(tmp_path)
    trainer.step()
    assert trainer.saver.finished() == [] and reader.newest(tmp_path) is None
    gate.set()
    trainer.saver.wait()
    assert [p.name for p in trainer.saver.finished()] == ["iter_0000001"]
    state, tensors = stored(tmp_path, before)
    assert state["iteration"] == 1 and all(torch.equal(tensors[n], t) for n, t in before.items())
    assert any(not torch.equal(t, before[n]) for n, t in stored_values(trainer).items())


def test_one_save_at_a_time_and_the_oldest_are_removed(tiny, tmp_path):
    trainer = start(tiny(save=str(tmp_path), async_save=True, keep_checkpoint_max=2))
    for _ in range(4):
        trainer.step()
        trainer.save(tmp_path)
    trainer.saver.wait()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000003", "iter_0000004", reader.LATEST]
    assert reader.newest(tmp_path) == 4 and len(trainer.saver.finished()) == 4


def fail(*args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("owner", "moment"), [(os, "fsync"), (Path, "rename")], ids=["fsync", "rename"])
@pytest.mark.parametrize("background", [False, True])
def test_a_failed_save_surfaces_and_leaves_the_one_before(tmp_path, monkeypatch, owner, moment, background):
    tensors = {"a": torch.ones(3)}
    writer.save(tmp_path, 1, tensors, {"iteration": 1})
    saver = writer.Saver(background=background)
    with monkeypatch.context() as broken:
        broken.setattr(owner, moment, fail)
        with pytest.raises(writer.SaveFailed, match=r"iter_0000002 could not be written: .*No space left"):
            saver.save(tmp_path, 2, tensors, {"iteration": 2})
            saver.wait()
    assert stored(tmp_path, tensors)[0] == {"iteration": 1}
    assert not list(tmp_path.glob(".*")) and saver.finished() == []
    saver.save(tmp_path, 3, tensors, {"iteration": 3})
    saver.wait()
    assert stored(tmp_path, tensors)[0] == {"iteration": 3}


def test_a_run_ends_soon_after_a_save_in_the_background_failed(tiny, tmp_path, monkeypatch, capsys):
    """The losses of the run up to that point are also kept."""
    config = tiny(save=str(tmp_path / "save"), async_save=True, save_interval=1, train_iters=200, log_interval=1)
    monkeypatch.setattr(torch.distributed.checkpoint.filesystem, "_write_item", fail)
    with pytest.raises(writer.SaveFailed, match="No space left"):
        command.train(config)
    assert (tmp_path / "run" / "run.json").is_file() and " saved " not in capsys.readouterr().out
    assert reader.newest(tmp_path / "save") is None


def test_a_run_that_fails_waits_for_the_save_under_way(tiny, tmp_path, gate, monkeypatch):
    config = tiny(save=str(tmp_path / "save"), async_save=True, save_interval=1)
    build = command.build

    def broken(config):
        trainer, tokenizer = build(config)
        norm = trainer.optimizer.grad_norm

        def grad_norm():
            if trainer.iteration < 1:
                return norm()
            threading.Timer(0.2, gate.set).start()
            return torch.tensor(float("nan"))

        trainer.optimizer.grad_norm = grad_norm
        return trainer, tokenizer

    monkeypatch.setattr(command, "build", broken)
    with pytest.raises(TrainingFailed):
        command.train(config)
    assert reader.newest(tmp_path / "save") == 1


def test_a_run_ends_when_its_last_checkpoint_is_whole(tiny, tmp_path, gate, capsys):
    threading.Timer(0.5, gate.set).start()
    command.train(tiny(save=str(tmp_path / "save"), async_save=True, save_interval=4, train_iters=6, sample_tokens=0))
    saved = [line for line in capsys.readouterr().out.splitlines() if line.startswith(" saved ")]
    assert [line[-1] for line in saved] == ["4", "6"]
    assert reader.read_state(tmp_path / "save")[1]["iteration"] == 6


@pytest.mark.parametrize(
    "change, words",
    [
        ({"rng": 5}, "no rng"),
        ({"consumed_samples": "x", "skipped": -1}, "no consumed_samples, skipped"),
        ({"optimizer_steps": None}, "no optimizer_steps"),
        ({"loss_scaler": {"scale": "x"}}, "no loss_scaler"),
        ({"loss_scaler": {"another": 1}}, "no loss_scaler"),
        ({"iteration": "x"}, "with an iteration number"),
    ],
)
def test_a_state_that_training_cannot_continue_from_is_refused(tiny, tmp_path, change, words):
    before = start(tiny())
    folder = before.save(tmp_path)
    path = folder / "hal.json"
    manifest = json.loads(path.read_text())
    manifest["state"] |= change
    manifest["sha256"]["hal.json"] = reader.state_checksum(manifest["state"])
    path.write_text(json.dumps(manifest))
    after = start(tiny(load=str(tmp_path)))
    with pytest.raises(HalError, match=words):
        after.load(tmp_path)


def test_of_a_release_only_the_weights_are_taken(tiny, tmp_path):
    before = start(tiny(seed=3))
    before.step()
    weights = {n: p.detach().clone() for n, p in before.model.named_parameters()}
    writer.save(tmp_path, RELEASE, weights, {"iteration": 0, "rng": [3, 0]})
    assert (tmp_path / reader.LATEST).read_text() == "release\n" and (tmp_path / "release").is_dir()
    for low in ({}, {"bf16": True}):
        after = start(tiny(load=str(tmp_path), seed=9, **low))
        after.load(tmp_path)
        assert (after.iteration, after.consumed, after.optimizer.steps) == (0, 0, 0)
        for name, parameter in after.model.named_parameters():
            assert torch.equal(parameter, weights[name].to(parameter.dtype)), name
            assert torch.equal(after.optimizer.main[name], weights[name]), "float32 weights are not rounded"
    trained = command.train(tiny(load=str(tmp_path), save=str(tmp_path), train_iters=1, sample_tokens=0))
    assert trained.iteration == 1 and (tmp_path / reader.LATEST).read_text() == "1\n"
    assert (tmp_path / "release").is_dir()


def test_a_run_with_nothing_left_says_so(tiny, tmp_path, capsys):
    command.train(tiny(save=str(tmp_path), train_iters=1, sample_tokens=0))
    assert "iterations 1 to 1" in capsys.readouterr().out
    ended = command.train(tiny(load=str(tmp_path), train_iters=1, sample_tokens=0))
    assert ended.iteration == 1 and "at iteration 1: --train-iters 1 leaves none to do" in capsys.readouterr().out


@pytest.mark.parametrize("there, here", [({}, {"bf16": True}), ({"bf16": True}, {}), ({"bf16": True}, {"bf16": True})])
def test_another_precision_goes_on_from_the_float32_weights(tiny, tmp_path, there, here):
    before, after = start(tiny(**there)), start(tiny(**here))
    before.step()
    before.save(tmp_path)
    after.load(tmp_path)
    for attribute in ("main", "exp_avg", "exp_avg_sq"):
        for name, tensor in getattr(before.optimizer, attribute).items():
            assert torch.equal(tensor, getattr(after.optimizer, attribute)[name]), (attribute, name)
    for name, parameter in after.model.named_parameters():
        assert torch.equal(parameter, before.optimizer.main[name].to(parameter.dtype))


def test_two_runs_do_not_save_in_one_folder(tiny, tmp_path, monkeypatch):
    config = tiny(save=str(tmp_path / "save"), train_iters=2, sample_tokens=0)
    advance = Trainer.advance

    def meanwhile(self):
        with pytest.raises(ConfigError, match="another run is saving there"):
            command.train(config)
        return advance(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "advance", meanwhile)
        assert command.train(config).iteration == 2
    assert command.train(tiny(save=config.save, load=config.save, train_iters=3, sample_tokens=0)).iteration == 3


def test_a_run_may_save_where_index_maps_are_made_and_while_a_fork_lives(tiny, tmp_path, monkeypatch):
    build, forks = command.build, []

    def building(config):
        folder = os.open(tmp_path, os.O_RDONLY)
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as files.made_once does, which would wait for ever
        os.close(folder)
        if (fork := os.fork()) == 0:
            signal.pause()
        forks.append(fork)
        return build(config)

    monkeypatch.setattr(command, "build", building)
    try:
        for iterations in (1, 2):
            config = tiny(save=str(tmp_path), load=str(tmp_path), train_iters=iterations, sample_tokens=0)
            assert command.train(config).iteration == iterations
    finally:
        for fork in forks:
            os.kill(fork, signal.SIGKILL)
            os.waitpid(fork, 0)


@pytest.mark.parametrize("there", [{}, {"fp16": True, "loss_scale": 512.0}, {"fp16": True}])
@pytest.mark.parametrize("here, scale", [({}, 1.0), ({"bf16": True}, 1.0), ({"fp16": True, "loss_scale": 64.0}, 64.0)])
def test_a_constant_loss_scale_is_this_runs_whatever_the_checkpoint_had(tiny, tmp_path, there, here, scale):
    start(tiny(**there)).save(tmp_path)
    after = start(tiny(**here))
    after.load(tmp_path)
    assert after.optimizer.scaler.scale == scale and not after.optimizer.scaler.dynamic
    expected = start(tiny(**here)).step().grad_norm
    assert after.step().grad_norm == pytest.approx(expected, rel=2e-2)


def test_a_dynamic_loss_scale_goes_on_under_this_runs_options(tiny, tmp_path):
    def options(**more):
        return tiny(fp16=True, initial_loss_scale=256.0, **more)

    before = start(options(loss_scale_window=9))
    for _ in range(3):
        before.step()
    before.save(tmp_path)
    same, shorter = start(options(loss_scale_window=9)), start(options(loss_scale_window=2, min_loss_scale=64.0))
    same.load(tmp_path)
    shorter.load(tmp_path)
    assert same.optimizer.scaler == before.optimizer.scaler
    assert (shorter.optimizer.scaler.window, shorter.optimizer.scaler.minimum) == (2, 64.0)
    shorter.step()
    assert shorter.optimizer.scaler.scale == 512.0, "three good steps and this one exceed the window of 2"


def test_modes_are_the_same_whatever_the_umask(tmp_path):
    for umask in (0, 0o077):
        root = tmp_path / f"deep{umask}" / "save"
        before = os.umask(umask)
        try:
            writer.save(root, 1, {"a": torch.ones(3)}, {})
        finally:
            os.umask(before)
        folders = [root.parent, root, root / "iter_0000001"]
        files = [p for p in root.rglob("*") if p.is_file()]
        assert len(files) == 4
        assert {stat.S_IMODE(p.stat().st_mode) for p in folders} == {0o750}
        assert {stat.S_IMODE(p.stat().st_mode) for p in files} == {0o640}


def test_a_run_leaves_nothing_open_under_umask_0(tiny, tmp_path, monkeypatch):
    """Also TensorBoard's event files, which HAL does not write itself."""
    config = tiny(save=str(tmp_path / "save"), train_iters=1, sample_tokens=0)
    monkeypatch.setattr(command, "build_config", lambda values: config)
    config.backend, before = "cpu_ref", os.umask(0)
    try:
        assert command.main([]) == 0 and os.umask(0) == 0
    finally:
        os.umask(before)
    paths = [p for root in ("run", "save") for p in (tmp_path / root, *(tmp_path / root).rglob("*"))]
    assert any("tfevents" in p.name for p in paths)
    modes = {(p.is_dir(), stat.S_IMODE(p.stat().st_mode)) for p in paths}
    assert modes == {(True, 0o750), (False, 0o640)}


def test_a_changed_bit_anywhere_is_noticed_and_the_file_named(tmp_path):
    writer.save(tmp_path, 1, {"a": torch.ones(3)}, {"iteration": 1, "rng": [5, 0]})
    for path in (tmp_path / "iter_0000001").iterdir():
        content = path.read_bytes()
        for at in range(0, len(content), max(1, len(content) // 40)):
            damaged = bytearray(content)
            damaged[at] ^= 2
            path.write_bytes(damaged)
            with pytest.raises(reader.HalError) as error:
                reader.read_state(tmp_path)
            # A flipped bit in the list of checksums may affect the entry of any file; nothing is loaded in any case.
            assert path.name in str(error.value) or path.name == reader.MANIFEST
        path.write_bytes(content)
    assert reader.read_state(tmp_path)[1]["iteration"] == 1


def test_megatrons_own_files_are_not_taken_for_damage(tmp_path):
    (tmp_path / "release" / "mp_rank_00").mkdir(parents=True)
    (tmp_path / reader.LATEST).write_text("release")
    with pytest.raises(reader.HalError, match="`hal convert`"):
        reader.read_state(tmp_path)
