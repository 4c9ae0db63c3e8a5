"""The `hal` command itself: answers that need no torch, and suggestions for what does not exist."""

import os
import subprocess
import sys

import pytest

from hal import errors
from hal.cli import explain

LOADED = (
    "import sys; from hal.cli import main; code = main(sys.argv[1:]); print('torch' in sys.modules); sys.exit(code)"
)


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_what_needs_no_torch_does_not_import_it(word):
    done = subprocess.run([sys.executable, "-c", LOADED, word], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.endswith("\nFalse\n"), done.stdout + done.stderr


def test_the_module_is_the_command():
    command = [sys.executable, "-m", "hal", "trian"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("hal: there is no command 'trian'. Did you mean `hal train`? The commands are info, ")


def test_every_error_is_explained(run):
    kinds = [c.__name__ for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]
    assert sorted(explain.sections()) == sorted(kinds)
    code, out, _ = run("explain")
    assert code == 0 and [line.partition(":")[0] for line in out.splitlines()] == list(explain.sections())
    for kind in kinds:
        code, out, _ = run("explain", kind.lower())
        assert code == 0 and "**What to do**" in out and "## " not in out


def test_an_unknown_error_is_suggested(run):
    code, _, err = run("explain", "UnsuportedOp")
    assert code == 2 and "there is no error 'UnsuportedOp'. Did you mean UnsupportedOp?" in err


@pytest.mark.parametrize("words", [["--help"], ["explain", "UnsupportedOp"]])
def test_a_reader_that_stops_reading_is_no_error(words):
    """As in `hal --help | head -1`."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "hal", *words]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
