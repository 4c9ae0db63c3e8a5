"""hal completion: scripts that a real shell accepts, and the completions that it then offers."""

import importlib
import shutil
import subprocess
import sys

import pytest

from hal.cli import COMMANDS
from hal.cli.completion import SHELLS, tree


@pytest.mark.parametrize("shell", SHELLS)
def test_a_script_for_each_shell(run, shell):
    code, out, _ = run("completion", shell)
    assert code == 0
    assert all(name in out for name in COMMANDS)
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=out, text=True, check=True)


def module_of(command):
    return importlib.import_module(f"hal.cli.{command.replace('-', '_')}")


@pytest.fixture(scope="module")
def offered():
    """offered("hal", "parity", "--bac") -> what bash would offer for the last word."""
    completion = subprocess.run([sys.executable, "-m", "hal", "completion", "bash"], capture_output=True, text=True)
    assert completion.returncode == 0, completion.stderr

    def ask(*words):
        quoted = " ".join(f"'{w}'" for w in words)
        script = f"""{completion.stdout}
        COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; COMP_LINE="${{COMP_WORDS[*]}}"
        COMP_POINT=${{#COMP_LINE}}; COMP_TYPE=9
        function=$(complete -p hal | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        $function hal "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD-1]}}"
        printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.split()

    return ask


def test_commands_options_backends_and_ops_are_offered(offered):
    assert set(COMMANDS) <= set(offered("hal", ""))
    assert offered("hal", "doc") == ["doctor"]
    assert offered("hal", "parity", "--tod") == ["--todo"]
    assert "--hidden-size" in offered("hal", "train", "--hid")
    assert offered("hal", "parity", "--backend", "cpu") == ["cpu_ref"]
    assert offered("hal", "why", "flash") == ["flash_attention"]


def test_every_command_shows_its_options():
    # Commands that are missing here have subcommands, or are completed by name.
    without = {name for name in COMMANDS if not hasattr(module_of(name), "parser")}
    assert without <= {"data", "config"}


def test_choices_are_for_the_shell_only(run):
    """The commands' own messages about an unknown name are more informative than argparse's."""
    assert tree()
    assert "no op is called 'softmax'" in run("why", "softmax", "--backend", "healthy")[2]
    assert "Did you mean 'healthy'?" in run("parity", "--backend", "helthy")[2]


def test_without_shtab_it_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    code, _, err = run("completion", "bash")
    assert code == 2
    assert "pip install shtab" in err
