"""The progress bar is shown on terminals only; other output is printed completely with and without it."""

import io
import sys
import threading

import pytest

from hal import HalError
from hal.model.common.progress_bar import ProgressBar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_pipe_gets_the_lines_and_no_bar():
    pipe = io.StringIO()
    with ProgressBar(4, stream=pipe) as bar:
        bar.update(1, "beside")
        bar.print("[a] line")
    assert not bar.shown and pipe.getvalue() == "[a] line\n"


@pytest.mark.parametrize("counted, shown", [(True, "3/4"), (False, "75%")])
def test_a_terminal_gets_the_bar_and_lines_above_it(counted, shown):
    terminal = Terminal()
    with ProgressBar(4, stream=terminal, counted=counted) as bar:
        threads = threading.active_count()
        bar.print("before")
        assert threading.active_count() == threads  # processes may still fork
        bar.update(1, "loss 5")
        bar.print("[a] line")
        bar.update(3, "loss 2")
    text = terminal.getvalue()
    assert text.startswith("before\n") and "[a] line" in text and "loss 2" in text and shown in text


def test_no_stream_shows_nothing(capsys):
    with ProgressBar(4, stream=None) as bar:
        bar.update(4)
    assert not bar.shown and capsys.readouterr() == ("", "")


def test_without_rich_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    with pytest.raises(HalError, match=r"pip install 'torch-hal\[train\]'"):
        ProgressBar(4, stream=Terminal()).update(1)
