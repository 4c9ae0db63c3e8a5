"""The interpreter of pickles: what checkpoints contain is read; attacks are refused in one line, in little memory."""

import io
import pickle
import resource
import struct
import time
import zipfile
from pathlib import Path

import pytest
import torch
from hostile_pickles import HOSTILE, HOSTILE_STATES
from hypothesis import given, settings
from hypothesis import strategies as st

from hal import HalError
from hal.model.checkpoint import restricted_pickle
from hal.model.checkpoint.restricted_pickle import INERT, InvalidPickle
from hal.model.checkpoint.safe_unpickle import stored_tensors
from hal.model.checkpoint.torch_archive import load_state
from hal.model.checkpoint.writer import save

MEMORY = 1 << 30
"""Bytes of address space that reading a hostile file may add."""


@pytest.fixture
def limited():
    """Fails allocations beyond MEMORY, so that an attack on it fails the test and not the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def refused(read, pattern):
    started = time.process_time()
    with pytest.raises(HalError, match=pattern) as caught:
        read()
    # Work that grows with what a file claims: in processor time, which does not depend on the machine's load.
    assert time.process_time() - started < 30
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600


def archive(pickled, compression=zipfile.ZIP_STORED, **members):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", compression) as file:
        for name, value in {"data.pkl": pickled, "byteorder": b"little", **members}.items():
            file.writestr(f"archive/{name}", value)
    return content.getvalue()


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_index_is_refused_and_changes_nothing(name, tmp_path, limited):
    folder = save(tmp_path, 3, {"a": torch.arange(6.0)}, {})
    content, pattern = HOSTILE[name]
    (folder / ".metadata").write_bytes(content)
    refused(lambda: stored_tensors(folder), f"{pattern}|is not an index")
    assert list(stored_tensors(save(tmp_path, 4, {"a": torch.zeros(2)}, {}))) == ["a"]


@pytest.mark.parametrize("name", HOSTILE_STATES)
def test_a_hostile_state_is_refused(name, tmp_path, limited):
    content, pattern = HOSTILE_STATES[name]
    (tmp_path / "a.pt").write_bytes(archive(content))
    if pattern:
        refused(lambda: load_state(tmp_path / "a.pt"), f"{pattern}|non-allowlisted")
    else:
        assert not isinstance(load_state(tmp_path / "a.pt"), torch.Tensor)


@pytest.mark.parametrize(
    "content, pattern",
    [
        (archive(b"N.", zipfile.ZIP_DEFLATED, **{"data/0": bytes(1 << 26)}), "compressed"),
        (archive(b"N.", byteorder=b"big"), "big-endian"),
        (pickle.dumps(1, 2), "does not start as one"),
        (archive(b"N.")[:-30], "is not a torch.save file"),
        (archive(b"N." + bytes(65 << 20)), "data.pkl has"),
    ],
    ids=["compressed", "big-endian", "a pickle", "cut off", "a huge pickle"],
)
def test_a_hostile_archive_is_refused(content, pattern, tmp_path):
    (tmp_path / "a.pt").write_bytes(content)
    refused(lambda: load_state(tmp_path / "a.pt"), f"{pattern}|non-allowlisted")


def test_members_that_overlap_are_refused(tmp_path):
    """Two entries of the directory that share their bytes; n of them would multiply the file's size by n."""
    content = archive(b"N.", **{"data/0": bytes(4096), "data/1": b""})
    at = content.rindex(b"PK\x01\x02")
    forged = bytearray(content)
    first = content.rindex(b"PK\x01\x02", 0, at)
    forged[at + 16 : at + 28] = content[first + 16 : first + 28]  # crc and sizes of data/0
    forged[at + 42 : at + 46] = content[first + 42 : first + 46]  # and its place
    (tmp_path / "a.pt").write_bytes(forged)
    refused(lambda: load_state(tmp_path / "a.pt"), "more space than the file")


LEAVES = st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers(-(2**60), 2**60) | st.tuples(st.text(), st.integers(0, 9))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.tuples(inner, inner) | st.tuples(inner),
    max_leaves=20,
)


def nothing(module, name):
    raise InvalidPickle("a global")


@given(value=VALUES, protocol=st.integers(3, 5))  # protocol 2 has no bytes
def test_it_reads_what_pickle_writes(value, protocol):
    assert restricted_pickle.load(io.BytesIO(pickle.dumps(value, protocol)), nothing) == value


@settings(max_examples=300)
@given(content=st.lists(st.sampled_from([*b"(tl)]}NK0abesuqhrjRQ.\x80\x85\x86\x87\x88\x81\x94Xc"]), max_size=60))
def test_any_instructions_are_read_or_refused(content):
    try:
        repr(
            restricted_pickle.load(io.BytesIO(bytes(content)), lambda module, name: INERT, lambda identity: INERT.value)
        )
    except HalError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_are_read_as_torch_reads_them(dtype, zipped, tmp_path):
    tensor = torch.arange(24).reshape(4, 6).to(dtype)
    state = {"a": tensor, "b": tensor.T[1:], "c": torch.nn.Parameter(torch.ones(3)), "d": tensor[0, 0], "e": tensor[:0]}
    torch.save(state, tmp_path / "a.pt", _use_new_zipfile_serialization=zipped)
    read = load_state(tmp_path / "a.pt")
    for name, expected in torch.load(tmp_path / "a.pt", weights_only=True).items():
        assert read[name].dtype == expected.dtype and torch.equal(read[name], expected)
        assert read[name].stride() == expected.stride()


def test_tensors_of_a_shape_beyond_their_storage_are_refused(tmp_path):
    torch.save({"a": torch.arange(6.0)}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as file:
        pickled = file.read("a/data.pkl")
    assert b"K\x06\x85" in pickled
    for size in (b"K\x07\x85", b"K\xff\x85"):
        members = {"data/0": struct.pack("<6f", *range(6))}
        (tmp_path / "a.pt").write_bytes(archive(pickled.replace(b"K\x06\x85", size), **members))
        refused(lambda: load_state(tmp_path / "a.pt"), "is larger than its storage")


def test_integers_whose_hashes_collide_are_no_keys():
    """A dictionary of n of them takes time proportional to n squared."""
    multiple = pickle.dumps({k * (2**61 - 1): None for k in (1, 2)}, 4)
    in_a_tuple = pickle.dumps({(k * (2**61 - 1), 0): None for k in (1, 2)}, 4)
    for content in (multiple, in_a_tuple):
        with pytest.raises(InvalidPickle, match="a key is"):
            restricted_pickle.load(io.BytesIO(content), lambda module, name: INERT)
    largest = {2**61 - 2: None, -(2**61) + 2: None}
    assert restricted_pickle.load(io.BytesIO(pickle.dumps(largest, 4)), lambda module, name: INERT) == largest


def test_tuples_whose_hashes_collide_are_no_keys():
    """The hash of a tuple of integers is not randomised, so that its second element can be computed."""
    modulus, first, second, start = 1 << 64, 11400714785074694791, 14029467366897019727, 2870177450012600261

    def rotated(x, bits):
        return (x << bits | x >> (64 - bits)) % modulus

    target, keys = rotated(5 * pow(first, -1, modulus) % modulus, 33), []
    for a in range(1000):
        b = (target - rotated((start + a * second) % modulus, 31) * first) * pow(second, -1, modulus) % modulus
        b -= modulus if b >= modulus // 2 else 0
        if abs(b) < 2**61 - 1:
            keys.append((a, b))
    assert len({hash(key) for key in keys}) == 1 and len(keys) > 100
    for content in (dict.fromkeys(keys), set(keys)):
        with pytest.raises(InvalidPickle, match="keys of a dictionary or set have the same hash"):
            restricted_pickle.load(io.BytesIO(pickle.dumps(content, 4)), lambda module, name: INERT)
