"""Backends for the model's tests, and a small run on a text that the test creates."""

import os
import random

import pytest
import torch
from host_backend import HostBackend

import hal
from hal.backends.cpu_ref import CpuRef
from hal.model.config.command_line import build


class References(HostBackend):
    """Runs every op's reference, so that the model is tested independently of any kernel."""

    name = "references"


@pytest.fixture(scope="session", autouse=True)
def kernels():
    """Loads cpu_ref's kernels before a test changes the cache folder, where they would be compiled once more."""
    CpuRef().build()


@pytest.fixture
def references(recwarn):
    with hal.activated(References(), fallback="reference"):
        yield


@pytest.fixture
def cpu_ref():
    """One thread: these models are too small for two, and waiting threads spin on a busy machine."""
    before, threads = os.environ.get("HAL_BACKEND"), torch.get_num_threads()
    torch.set_num_threads(1)
    with hal.activated(References(), fallback="reference"):
        yield hal.use("cpu_ref")
    torch.set_num_threads(threads)
    os.environ.pop("HAL_BACKEND", None)
    if before is not None:
        os.environ["HAL_BACKEND"] = before


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    """A file of 60 kB of words with the same content every time."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=draw.randint(2, 6))) for _ in range(40)]
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text("\n".join(" ".join(draw.choices(words, k=8)) for _ in range(1500)))
    return path


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tiny(text, cache, tmp_path, monkeypatch):
    """Creates configs of a two-layer model on `text`; keyword arguments are options given by the user, None for
    one that is not given."""

    def make(**given):
        monkeypatch.setenv("HAL_CACHE_DIR", str(cache))
        base = {
            "num_layers": 2,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "seq_length": 32,
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "train_iters": 6,
            "lr": 1e-2,
            "seed": 7,
            "text_file": str(text),
            "split": "8,1,1",
            "run_dir": str(tmp_path / "run"),
            "sample_tokens": 8,
            "log_interval": 2,
        }
        return build({name: value for name, value in {**base, **given}.items() if value is not None})

    return make
