"""A fresh environment like that of a new user: empty, but able to import the packages installed here (no download)."""

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


class Fresh:
    """`run(command)` runs a shell command in `folder` with the environment's python and hal first in the PATH."""

    def __init__(self, root: Path) -> None:
        self.bin = root / "venv" / "bin"
        self.folder = root / "work"
        self.folder.mkdir()
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", root / "venv"], check=True)
        (site,) = (root / "venv" / "lib").glob("python*/site-packages")
        (site / "parent.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
        script = self.bin / "hal"
        script.write_text(
            f"#!{self.bin / 'python'}\nimport sys\nfrom hal.cli import main\n"
            # As pip writes it: child processes started with "spawn" import the script of their parent again.
            "if __name__ == '__main__':\n    sys.exit(main())\n"
        )
        script.chmod(0o755)

    def run(self, command: str, **kwargs) -> subprocess.CompletedProcess:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("HAL_", "PYTHON", "PYTEST"))}
        env = {
            **clean,
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "120",
            "PIP_NO_INDEX": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # pip inverts this variable: 0 turns isolation off
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        }
        return subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=env,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            **kwargs,
        )


@pytest.fixture
def fresh(tmp_path):
    return Fresh(tmp_path)
