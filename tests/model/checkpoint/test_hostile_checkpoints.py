"""Hostile checkpoints of every format raise a HalError that names the file and no other error, and execute no code.

A change that happens to leave a checkpoint readable may pass."""

from __future__ import annotations

import argparse
import contextlib
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from model_options import LLAMA_OPTIONS
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, ChunkStorageMetadata, MetadataIndex

from hal import HalError
from hal.model.apps.convert import convert, hal_format, huggingface, megatron_distributed, megatron_ranks
from hal.model.apps.convert.weights import Weights
from hal.model.checkpoint import reader
from hal.model.config.schema import Config
from hal.model.gpt.model import GPT

COMMON = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
GPT2 = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "seq_length": 4}
LLAMA = {**GPT2, **LLAMA_OPTIONS, "hidden_dropout": 0.0}
WORD = "embedding.word_embeddings.weight"
STACK = "decoder.layers.mlp.linear_fc1.weight"


class Bomb:
    """Creates a file if it is ever unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


def _weights(options: dict[str, Any]) -> Weights:
    config = Config(**options, make_vocab_size_divisible_by=1)
    config.set_vocabulary(12)
    tensors = {n: p.detach() for n, p in GPT(config, torch.device("cpu")).named_parameters()}
    return Weights(dict(options), tensors)


@pytest.fixture(scope="module")
def good(tmp_path_factory: Any) -> Path:
    """A valid checkpoint of every format, each in the folder of its name."""
    pytest.importorskip("safetensors", reason="needs safetensors (extra: convert)")
    root = tmp_path_factory.mktemp("good")
    hal_format.write(_weights(GPT2), root / "hal", divisible_by=1)
    megatron_ranks.write(_weights(LLAMA), root / "megatron", divisible_by=1)
    megatron_distributed.write(_weights(GPT2), root / "megatron-core", divisible_by=1)
    huggingface.write(_weights(LLAMA), root / "huggingface")
    return root


@pytest.fixture
def place(tmp_path: Path, good: Path) -> Any:
    def fresh(name: str) -> Path:
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        shutil.copytree(good / name, tmp_path / name)
        return tmp_path / name

    return fresh


def _whole(read: Any) -> Any:
    """A reader that also loads every tensor, which some formats read one at a time."""

    def run(folder: Path) -> Weights:
        weights: Weights = read(folder)
        weights.tensors = dict(weights.tensors)
        return weights

    return run


READ = {
    "hal": _whole(hal_format.read),
    "megatron": _whole(megatron_ranks.read),
    "megatron-core": _whole(megatron_distributed.read),
    "huggingface": _whole(huggingface.read),
}


def _update_checksums(root: Path) -> None:
    """Updates the checksums of one of HAL's own checkpoints after a change, as an attacker could."""
    path = root / "release" / "hal.json"
    try:
        manifest = json.loads(path.read_text())
        files = {p.name: reader.file_checksum(p) for p in path.parent.iterdir() if p.name != "hal.json"}
        manifest["sha256"] = {**files, "hal.json": reader.state_checksum(manifest["state"])}
        path.write_text(json.dumps(manifest))
    except (ValueError, TypeError, KeyError, AttributeError):
        pass


def _refused(root: Path, words: str) -> None:
    if (root / "release" / "hal.json").exists():
        _update_checksums(root)
    with pytest.raises(HalError, match=words) as caught:
        READ[root.name](root)
    assert "\n" not in str(caught.value).split(" (see ")[0]


@pytest.mark.parametrize("name", READ)
@COMMON
@given(draw=st.data())
def test_bytes_changed_and_files_cut_off_at_random(name: str, draw: Any, place: Any) -> None:
    root = place(name)
    path = draw.draw(st.sampled_from(sorted(p for p in root.rglob("*") if p.is_file())))
    content = bytearray(path.read_bytes())
    if draw.draw(st.booleans()):
        del content[draw.draw(st.integers(0, len(content) - 1)) :]
    else:
        for at in draw.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
            content[at] = draw.draw(st.integers(0, 255))
    path.write_bytes(content)
    if name == "hal":
        _update_checksums(root)
    try:
        convert.detect(root)
        READ[name](root).check()
    except HalError:
        pass


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from([0, 1, 2, 10**12]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@COMMON
@given(draw=st.data())
def test_any_value_in_a_config_of_hugging_face(draw: Any, place: Any) -> None:
    path = place("huggingface") / "config.json"
    content = json.loads(path.read_text())
    more = ["rope_scaling", "sliding_window", "logits_scaling"]
    for name in draw.draw(st.lists(st.sampled_from([*content, *more]), min_size=1, max_size=3)):
        content[name] = draw.draw(VALUES)
    path.write_text(json.dumps(content))
    with contextlib.suppress(HalError):
        huggingface.read(path.parent)


@pytest.mark.parametrize("name, file", [("megatron", "mp_rank_00/model_optim_rng.pt"), ("megatron-core", "common.pt")])
@COMMON
@given(draw=st.data())
def test_any_value_in_what_megatron_says_of_its_model(name: str, file: str, draw: Any, place: Any) -> None:
    path = place(name) / "release" / file
    state = torch.load(path, weights_only=False)
    tensors = st.sampled_from([torch.ones(2), torch.ones(0)])
    for option in draw.draw(st.lists(st.sampled_from(sorted(vars(state["args"]))), max_size=3)):
        setattr(state["args"], option, draw.draw(VALUES | tensors))
    for option in draw.draw(
        st.lists(st.sampled_from(["args", "iteration", "checkpoint_version", "model"]), max_size=1)
    ):
        state[option] = draw.draw(VALUES | tensors)
    torch.save(state, path)
    with contextlib.suppress(HalError):
        READ[name](path.parents[1 if name == "megatron-core" else 2])


@COMMON
@given(draw=st.data())
def test_any_value_in_the_state_of_our_own(draw: Any, place: Any) -> None:
    root = place("hal")
    path = root / "release" / "hal.json"
    manifest = json.loads(path.read_text())
    config = manifest["state"]["config"]
    for option in draw.draw(st.lists(st.sampled_from(sorted(config)), max_size=3)):
        config[option] = draw.draw(VALUES)
    for option in draw.draw(st.lists(st.sampled_from(["iteration", "config"]), max_size=1)):
        manifest["state"][option] = draw.draw(VALUES)
    path.write_text(json.dumps(manifest))
    _update_checksums(root)
    with contextlib.suppress(HalError):
        hal_format.read(root)


# An index file: of megatron-core's checkpoints and of HAL's own.


def _first(index: Any, word: str) -> Any:
    return next(info for key, info in index.storage_data.items() if key.fqn == word)


def _set(target: Any, **values: Any) -> None:
    for name, value in values.items():
        object.__setattr__(target, name, value)


def _size(index: Any, word: str, size: Any) -> None:
    index.state_dict_metadata[word].size = size


def _parts(index: Any, word: str, offsets: Any, sizes: Any) -> None:
    index.state_dict_metadata[word].chunks = [ChunkStorageMetadata(offsets, sizes)]
    key = next(key for key in index.storage_data if key.fqn == word)
    index.storage_data[MetadataIndex(word, offsets)] = index.storage_data.pop(key)


INDEXES: dict[str, tuple[Any, str]] = {
    "an offset below 0": (lambda i: _set(_first(i, WORD), offset=-5), "was it cut off"),
    "a far offset": (lambda i: _set(_first(i, WORD), offset=10**12), "was it cut off"),
    "a far length": (lambda i: _set(_first(i, WORD), length=10**12), "was it cut off"),
    "a length below 0": (lambda i: _set(_first(i, WORD), length=-1), "was it cut off"),
    "an offset of text": (lambda i: _set(_first(i, WORD), offset="x"), "was it cut off"),
    "places in one another": (
        lambda i: [_set(p, offset=0, length=_first(i, WORD).length) for p in i.storage_data.values()],
        "is not stored|places more in|was it cut off",
    ),
    "a file that is not there": (lambda i: _set(_first(i, WORD), relative_path="__9_9.distcp"), "does not exist"),
    "a file elsewhere": (lambda i: _set(_first(i, WORD), relative_path="../x"), "outside its folder"),
    "no file name": (lambda i: _set(_first(i, WORD), relative_path=5), "no storage location for"),
    "an unknown coding": (lambda i: _set(_first(i, WORD), transform_descriptors=["zstd"]), "which is not supported"),
    "a huge size": (lambda i: _size(i, WORD, torch.Size([10**12, 8])), "elements are stored"),
    "an overflowing size": (lambda i: _size(i, WORD, torch.Size([2**62, 2**62])), "elements are stored"),
    "an endless stack": (lambda i: _size(i, WORD, torch.Size([2**40, 0])), "elements are stored|has a chunk"),
    "a size below 0": (lambda i: _size(i, WORD, torch.Size([-5, 8])), "has size"),
    "a size that is none": (lambda i: _size(i, WORD, ["x"]), "has size"),
    "a huge part": (
        lambda i: (
            _size(i, WORD, torch.Size([10**12, 8])),
            _parts(i, WORD, torch.Size([0, 0]), torch.Size([10**12, 8])),
        ),
        "is not stored",
    ),
    "a part before the start": (
        lambda i: _parts(i, WORD, torch.Size([-1, 0]), torch.Size([12, 8])),
        "has a chunk of size",
    ),
    "a part past the end": (lambda i: _parts(i, WORD, torch.Size([1, 0]), torch.Size([12, 8])), "has a chunk of size"),
    "parts that are none": (lambda i: _set(i.state_dict_metadata[WORD], chunks=[5]), "has a chunk of size"),
    "no type": (lambda i: _set(i.state_dict_metadata[WORD].properties, dtype=None), "type None"),
    "places in a list": (lambda i: _set(i, storage_data=[1]), "is not an index"),
    "no places": (lambda i: _set(i, storage_data=None), "is not an index"),
    "tensors in a list": (lambda i: _set(i, state_dict_metadata=[1]), "is not an index"),
    "a number for a tensor": (lambda i: i.state_dict_metadata.update({WORD: 5}), "does not describe"),
}


@pytest.mark.parametrize("kind", INDEXES)
@pytest.mark.parametrize("name", ["hal", "megatron-core"])
def test_an_index_that_asks_for_what_is_not_there(name: str, kind: str, place: Any) -> None:
    root = place(name)
    change, words = INDEXES[kind]
    path = root / "release" / ".metadata"
    index = pickle.loads(path.read_bytes())
    change(index)
    path.write_bytes(pickle.dumps(index))
    _refused(root, words)
    with pytest.raises(HalError, match=r"\.metadata"):
        READ[name](root)


@pytest.mark.parametrize("name", ["hal", "megatron-core"])
def test_bytes_that_pass_for_a_tensor_are_not_unpickled(name: str, place: Any, tmp_path: Path) -> None:
    """torch unpickles entries of bytes without restriction: one with a size must not be mistaken for a tensor."""
    root = place(name)
    path = root / "release" / ".metadata"
    index = pickle.loads(path.read_bytes())
    bomb, tensor = BytesStorageMetadata(), index.state_dict_metadata[WORD]
    bomb.size, bomb.properties, bomb.chunks = tensor.size, tensor.properties, tensor.chunks  # type: ignore[attr-defined]
    index.state_dict_metadata[WORD] = bomb
    where = _first(index, WORD)
    index.storage_data[MetadataIndex(WORD)] = where
    torch.save(Bomb(tmp_path / "ran"), tmp_path / "bomb")
    data = root / "release" / where.relative_path
    _set(where, offset=data.stat().st_size, length=(tmp_path / "bomb").stat().st_size)
    data.write_bytes(data.read_bytes() + (tmp_path / "bomb").read_bytes())
    path.write_bytes(pickle.dumps(index))
    _refused(root, WORD if name == "megatron-core" else f"{WORD}|places more")
    folder = root / "release"
    with pytest.raises(HalError):
        reader.load_tensors(folder, {WORD: torch.zeros(tensor.size)})
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["hal", "megatron-core"])
@pytest.mark.parametrize("how", ["cut off", "missing", "a pickle", "empty", "of other shapes"])
def test_the_tensors_file_of_an_index(name: str, how: str, place: Any, tmp_path: Path) -> None:
    root = place(name)
    path = root / "release" / "__0_0.distcp"
    size = path.stat().st_size
    if how == "missing":
        path.unlink()
    elif how == "a pickle":
        path.write_bytes(pickle.dumps(Bomb(tmp_path / "ran")).ljust(size, b"."))
    elif how == "of other shapes":
        torch.save(torch.ones(3), path)
        path.write_bytes(path.read_bytes().ljust(size, b"\0"))
    else:
        path.write_bytes(path.read_bytes()[: size // 2 if how == "cut off" else 0])
    _refused(root, "distcp|cannot be read")
    assert not (tmp_path / "ran").exists()


# Values of the wrong type, and the error message for each.


@pytest.mark.parametrize(
    "change, words",
    [
        ({"args": [1]}, "args should be options by name; found list"),
        ({"args": 5}, "args should be options by name; found int"),
        ({"args": argparse.Namespace(num_layers=torch.ones(2))}, "args should be options"),
        ({"iteration": "x"}, "iteration should be an integer of at least 0; found 'x'"),
        ({"iteration": [1]}, r"iteration should be an integer of at least 0; found \[1\]"),
        ({"iteration": -1}, "iteration should be an integer of at least 0; found -1"),
        ({"checkpoint_version": "three"}, "checkpoint_version should be a number from 0 to 100; found 'three'"),
        ({"checkpoint_version": float("nan")}, "checkpoint_version should be a number from 0 to 100; found nan"),
    ],
)
@pytest.mark.parametrize("name, file", [("megatron", "mp_rank_00/model_optim_rng.pt"), ("megatron-core", "common.pt")])
def test_wrong_types_in_megatrons_files(name: str, file: str, change: Any, words: str, place: Any) -> None:
    root = place(name)
    path = root / "release" / file
    torch.save({**torch.load(path, weights_only=False), **change}, path)
    _refused(root, words)


def test_tensors_that_repeat_what_is_stored_are_refused(place: Any) -> None:
    root = place("megatron")
    path = root / "release" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    for wrong in (torch.ones(1).expand(10**12, 8), torch.empty(10**12, 8, device="meta"), torch.ones(2, 2).to_sparse()):
        torch.save({**state, "model": {**state["model"], WORD: wrong}}, path)
        _refused(root, "is not a (dense )?tensor|not a torch.save file|could run code")


@pytest.mark.parametrize(
    "state, words",
    [
        ([1], "state should be an object"),
        ({"config": {}}, "with an iteration number"),
        ({"iteration": "x", "config": {}}, "with an iteration number"),
        (
            {"iteration": 1, "config": {"padded_vocab_size": "x"}},
            "padded_vocab_size should be a count of rows; found 'x'",
        ),
        ({"iteration": 1, "config": [1]}, "does not contain the options of its model"),
        ({"iteration": 1}, "does not contain the options of its model"),
    ],
)
def test_wrong_types_in_our_own_state(state: Any, words: str, place: Any) -> None:
    root = place("hal")
    (root / "release" / "hal.json").write_text(json.dumps({"state": state, "sha256": {}}))
    _refused(root, words)


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"sha256": [1], "state": {}}', "{}", '{"state": 1, "sha256": "x"}']
)
def test_a_manifest_that_is_none(content: str, place: Any) -> None:
    root = place("hal")
    (root / "release" / "hal.json").write_text(content)
    with pytest.raises(HalError, match="cannot be read"):
        hal_format.read(root)


@pytest.mark.parametrize("name", ["hal", "megatron", "megatron-core"])
@pytest.mark.parametrize("content", ["9" * 5000, "9" * 300, "-1", "1e3", "\x00", "٣"])
def test_a_tracker_file_that_names_nothing(name: str, content: str, place: Any) -> None:
    root = place(name)
    (root / "latest_checkpointed_iteration.txt").write_text(content)
    if name == "hal":  # the newest checkpoint is used
        with pytest.warns(RuntimeWarning, match="should contain an iteration number"):
            assert READ[name](root).tensors
        return
    with pytest.raises(HalError, match="should contain an iteration number"):
        READ[name](root)
