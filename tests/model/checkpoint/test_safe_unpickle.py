"""A checkpoint's index is data: other pickled classes are refused and not executed, also in HAL's own checkpoints."""

import pickle
import zipfile

import pytest
import torch

from hal import HalError
from hal.model.checkpoint import reader, safe_unpickle
from hal.model.checkpoint.restricted_pickle import Inert, UnsafeFile
from hal.model.checkpoint.safe_unpickle import SafeReader, read_tensors
from hal.model.checkpoint.torch_archive import load_state
from hal.model.checkpoint.writer import save


class Bomb:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (open, (self.path, "w"))


def test_an_index_of_our_own_that_would_run_something_is_not_run(tmp_path):
    tensors = {"a": torch.arange(6.0).view(2, 3)}
    folder = save(tmp_path / "ck", 3, tensors, {"iteration": 3, "config": {}})
    mine = {"a": torch.zeros(2, 3)}
    reader.load_tensors(folder, mine)
    assert torch.equal(mine["a"], tensors["a"])
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    # The checksums detect it first, but the author of the file could have updated them too.
    with pytest.raises(HalError, match=r"\.metadata is damaged"):
        reader.read_state(tmp_path / "ck")
    with pytest.raises(UnsafeFile, match=r"non-allowlisted global _?io\.open"):
        reader.load_tensors(folder, mine)
    assert not (tmp_path / "ran").exists()


def test_tensors_that_are_read_one_by_one_share_one_reading_of_the_index(tmp_path, monkeypatch):
    """A converter reads them so: with one reading per tensor, its time would grow with the square of their number."""
    tensors = {name: torch.full((2,), float(i)) for i, name in enumerate("abc")}
    source = SafeReader(save(tmp_path, 3, tensors, {}))
    readings = []
    monkeypatch.setattr(safe_unpickle, "check_index", lambda index, path: readings.append(path))
    mine = {name: torch.zeros(source.tensors()[name].size) for name in tensors}
    for name, tensor in mine.items():
        read_tensors(source, {name: tensor})
    assert all(torch.equal(mine[name], tensors[name]) for name in tensors)
    assert len(readings) == 1


@pytest.mark.parametrize("module, name", [("builtins", "eval"), ("os", "system"), ("torch", "load"), ("torch", "ops")])
def test_an_index_may_name_only_what_an_index_needs(tmp_path, module, name):
    folder = save(tmp_path, 3, {"a": torch.zeros(2)}, {})
    (folder / ".metadata").write_bytes(f"c{module}\n{name}\n(S'1'\ntR.".encode())
    with pytest.raises(UnsafeFile, match=rf"non-allowlisted global {module}\.{name}"):
        reader.load_tensors(folder, {"a": torch.zeros(2)})


@pytest.mark.parametrize("name", ["Te\n\x1b[2Jst", "x" * 1000])
def test_a_name_that_would_not_fit_an_error_is_refused_in_one_line(tmp_path, name):
    path = tmp_path / "state.pt"
    # STACK_GLOBAL takes any text as a name; megatron's classes are otherwise ignored.
    text = name.encode()
    content = b"\x80\x04\x8c\x0dmegatron.core\x94X" + len(text).to_bytes(4, "little") + text + b"\x94\x93."
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("state/data.pkl", content)
    with pytest.raises(HalError, match="which is not a name") as error:
        load_state(path)
    assert "\n" not in str(error.value) and "\x1b" not in str(error.value) and len(str(error.value)) < 500


def test_a_state_is_data_and_foreign_objects_are_inert(tmp_path, monkeypatch):
    import argparse
    import signal

    path = tmp_path / "state.pt"
    state = {"args": argparse.Namespace(a=1, exit_signal=signal.SIGTERM), "x": torch.ones(3), "n": [1, "two", None]}
    torch.save(state, path)
    # Globals that another package has allowlisted in this process are not allowed here.
    monkeypatch.setattr(torch._weights_only_unpickler, "_marked_safe_globals_set", {signal.Signals, Bomb, open})
    read = load_state(path)
    assert read["args"].a == 1 and read["n"] == state["n"] and torch.equal(read["x"], state["x"])
    signal_read = read["args"].exit_signal  # Python 3.10 stores it by name, later ones as a call of its class
    assert signal_read is Inert or isinstance(signal_read, Inert)
    for wrong in (Bomb(tmp_path / "ran"), torch.nn.Linear(2, 2), test_a_state_is_data_and_foreign_objects_are_inert):
        torch.save({"model": wrong}, path)
        with pytest.raises(UnsafeFile, match="could run code"):
            load_state(path)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(FileNotFoundError):
        load_state(tmp_path / "nothing")
