"""`python benchmarks/gpu/preflight.py [PART...]`: whether this interpreter can run `make gpu`, and what it lacks.

Needs nothing but Python, installs nothing, and touches no network and no GPU. The exit code is 0 if the parts can run
(those that lack a package are named, and say so in the report), and 1 if none can.
"""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec

NEEDS = {
    "parity": {"hypothesis": "hypothesis"},
    "checks": {"hypothesis": "hypothesis"},
    "training": {
        "megatron.core": "megatron-core==0.16.1",
        "cffi": "cffi",
        "tensorboard": "tensorboard",
        "yaml": "pyyaml",
    },
    "multi": {"megatron.core": "megatron-core==0.16.1"},
}
"""Part -> module -> the pip requirement that provides it; EVERY_PART is what all parts need."""
EVERY_PART = {"torch": "torch (built with CUDA)", "numpy": "numpy", "cupy": "cupy-cuda13x"}
PEERS = {
    "triton": "cuda/flex and the peers made by torch.compile",
    "liger_kernel": "the peers made by Liger (pip install liger-kernel)",
    "transformer_engine": "the peers made by TransformerEngine (pip install transformer-engine[pytorch])",
    "flash_attn": "the peer flash-attn (pip install flash-attn --no-build-isolation)",
}
"""Module -> what is absent from the report without it."""
ALL = ("parity", "checks", "kernels", "large", "train_step", "attention", "training", "multi")


def lacking(part: str) -> str:
    """The missing packages of a part and how to install them; "" if none is missing."""
    return _named([package for module, package in NEEDS.get(part, {}).items() if not _installed(module)])


def _named(missing: Sequence[str]) -> str:
    if not missing:
        return ""
    names = " and ".join(package.split("=")[0] for package in missing)
    return f"{names} {'is' if len(missing) == 1 else 'are'} not installed: pip install {' '.join(missing)}"


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that contains the module is missing
        return False


def obstacles() -> list[str]:
    """What keeps every part from running."""
    missing = [package for module, package in EVERY_PART.items() if not _installed(module)]
    found = [f"{package} is not installed" for package in missing]
    if ctypes.util.find_library("cuda") is None and not os.path.exists("/dev/nvidiactl"):
        found.append("there is no NVIDIA driver (libcuda)")
    if _installed("torch"):
        # In a process of its own: importing torch takes seconds, and may fail.
        ask = "import torch; print(torch.version.cuda or 'none', torch.cuda.is_available())"
        done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=False)
        answer = done.stdout.split()
        if done.returncode or len(answer) != 2:
            found.append(f"torch cannot be imported: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        elif answer[0] == "none":
            found.append("this torch is built without CUDA")
        elif answer[1] != "True":
            found.append(f"torch (for CUDA {answer[0]}) finds no GPU; see nvidia-smi and CUDA_VISIBLE_DEVICES")
    return found


def main(argv: Sequence[str]) -> int:
    """Prints what is missing."""
    blocked = obstacles()
    for text in blocked:
        print(f"make gpu: {text}")
    for part in argv or ALL:
        if lacking(part):
            print(f"make gpu: the part {part} will not run: {lacking(part)}")
    for module, absent in PEERS.items():
        if not _installed(module):
            print(f"make gpu: without {module}, these are absent: {absent}")
    if blocked:
        print(
            f"make gpu: nothing can run with {sys.executable}. Choose another interpreter with PYTHON=..., or let "
            "`make gpu-environment` install what is missing (it needs a network)"
        )
    return 1 if blocked else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
