"""Two simulated hosts."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def two_hosts():
    """Two network namespaces connected by a virtual cable: hosts with separate addresses."""
    if shutil.which("ip") is None:
        pytest.skip("two simulated hosts need the `ip` command (package iproute2)")
    a, b = (f"hal{os.getpid()}{side}" for side in "ab")
    try:
        _ip("netns", "add", a)
        _ip("netns", "add", b)
        _ip("link", "add", a, "type", "veth", "peer", "name", b)
    except subprocess.CalledProcessError as error:
        subprocess.run(["ip", "netns", "del", a], capture_output=True)
        pytest.skip(f"network namespaces are not permitted here: {error.stderr.decode().strip()}")
    try:
        for side, address in ((a, "10.77.0.1/24"), (b, "10.77.0.2/24")):
            _ip("link", "set", side, "netns", side)
            _ip("-n", side, "addr", "add", address, "dev", side)
            _ip("-n", side, "link", "set", "lo", "up")
            _ip("-n", side, "link", "set", side, "up")
        yield a, b
    finally:
        for side in (a, b):
            subprocess.run(["ip", "netns", "del", side], capture_output=True)
