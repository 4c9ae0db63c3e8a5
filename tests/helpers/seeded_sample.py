"""pytest plugin: `--sample 0.15 --sample-seed TEXT` runs that share of the selected tests, the same ones for one seed.

Whether a test is in the sample is a function of its name and the seed alone, so all workers of a parallel run agree.
Tests marked `nightly` are also marked `slow`, so that `-m "not slow"` excludes them.
"""

from __future__ import annotations

import argparse
import hashlib

import pytest


def chosen(name: str, share: float, seed: str) -> bool:
    """Whether a sample of `share` (0 to 1) contains the test called `name`."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2.0**64


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"a share of the tests is above 0 and at most 1, not {text}")
    return share


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sample", "a sample of the tests")
    group.addoption("--sample", type=_share, metavar="SHARE", help="run only this share of the selected tests")
    group.addoption("--sample-seed", default="0", metavar="TEXT", help="another text chooses another sample")


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("nightly"):
        item.add_marker("slow")


@pytest.hookimpl(trylast=True)  # after -m and -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share, seed = config.option.sample, config.option.sample_seed
    if share is not None:
        left_out = [item for item in items if not chosen(item.nodeid, share, seed)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if chosen(item.nodeid, share, seed)]


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.sample is not None:
        terminalreporter.write_line(
            f"a sample of {config.option.sample:g} of the tests: the same again with --sample {config.option.sample:g} "
            f"--sample-seed {config.option.sample_seed}"
        )
