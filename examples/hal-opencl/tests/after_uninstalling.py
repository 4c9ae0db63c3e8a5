"""Run by `make test-opencl` after uninstalling hal-opencl: its name must be unknown and other backends must work."""

import subprocess
import sys


def hal(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "hal", *arguments], capture_output=True, text=True, check=False)


def main() -> None:
    info = hal("info")
    assert info.returncode == 0, info.stderr
    lines = info.stdout.splitlines()
    assert not [line for line in lines if line.startswith("opencl")], info.stdout
    assert "cpu_ref (in-tree): 1 device" in lines, info.stdout
    gone = hal("parity", "--backend", "opencl")
    assert gone.returncode != 0, gone.stdout
    assert "no backend is called 'opencl'" in gone.stderr, gone.stderr
    for command in (["doctor", "--backend", "cpu_ref"], ["parity", "--backend", "cpu_ref", "--op", "layer_norm"]):
        done = hal(*command)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "PASS" in done.stdout.upper(), done.stdout
    print("without hal-opencl: its name is unknown, cpu_ref works")


if __name__ == "__main__":
    main()
