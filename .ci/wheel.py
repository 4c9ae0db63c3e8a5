#!/usr/bin/env python3
"""Builds a wheel with prebuilt kernels of cpu_ref, for users without a compiler: .ci/wheel.py OUT [aarch64]

Run with a Python that has HAL, setuptools and wheel installed. The wheel for x86-64 has kernels for x86-64-v3, -v4 and
-v4 with bfloat16 products, of which HAL loads the best for the processor; the wheel for aarch64 needs the cross
compiler (Debian: gcc-aarch64-linux-gnu). One wheel serves all versions of Python, because the modules use the stable
ABI. Its platform tag names the oldest glibc that has all the symbols which the modules need.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from hal import backend_tools
from hal.backends.cpu_ref import build, prebuilt

ROOT = Path(__file__).resolve().parent.parent


def glibc(modules: list[Path]) -> tuple[int, int]:
    """The newest version of glibc's symbols that the modules refer to, at least manylinux's oldest (2.17)."""
    newest = (2, 17)
    for module in modules:
        listing = subprocess.run(["objdump", "-p", str(module)], check=True, capture_output=True, text=True).stdout
        newest = max([newest, *((2, int(minor)) for minor in re.findall(r"\bGLIBC_2\.(\d+)", listing))])
    return newest


def main(out: Path, machine: str) -> None:
    """Writes the wheel into the folder `out`."""
    compiler = ["aarch64-linux-gnu-gcc"] if machine == "aarch64" else build.find_compiler()
    if shutil.which(compiler[0]) is None:
        sys.exit(f"{compiler[0]} was not found; Debian/Ubuntu: apt install gcc-aarch64-linux-gnu")
    with tempfile.TemporaryDirectory() as temporary:
        source = Path(temporary) / "source"
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, check=True, capture_output=True, text=True, cwd=ROOT).stdout.split("\0")
        for name in filter(None, names):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name, follow_symlinks=False)
        for variant in prebuilt.VARIANTS:
            if variant.machine == machine:
                print(f"kernels for {variant.name}", flush=True)
                build.build_variant(variant, compiler, source / "backends/cpu_ref/prebuilt" / variant.name)
        modules = sorted(source.glob("backends/cpu_ref/prebuilt/*/*.so"))
        wheels = Path(temporary) / "wheels"
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "--no-build-isolation", "-w", str(wheels), str(source)], check=True)
        major, minor = glibc(modules)
        tags = ["--platform-tag", f"manylinux_{major}_{minor}_{machine}", "--remove", *map(str, wheels.glob("*.whl"))]
        subprocess.run([sys.executable, "-m", "wheel", "tags", *tags], check=True)
        out.mkdir(parents=True, exist_ok=True)
        for wheel in wheels.glob("*.whl"):
            print(shutil.copy2(wheel, out))


if __name__ == "__main__":
    backend_tools.cache_directory("cpu_ref")  # says what is wrong with it before anything is compiled
    if len(sys.argv) not in (2, 3) or (len(sys.argv) == 3 and sys.argv[2] != "aarch64"):
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) == 3 else "x86_64")
