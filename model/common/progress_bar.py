"""The progress bar of all commands: drawn by rich on a terminal; nothing is shown if the output is redirected."""

from __future__ import annotations

from typing import Any, TextIO

from hal import HalError


class ProgressBar:
    """A bar that starts at the first `update`, so that processes forked before do not inherit rich's drawing thread.

    total: the value at which the bar is full. stream: where to draw; None to show nothing. counted: show "3/10" instead
    of a percentage. Use as a context manager, or call `close`.
    """

    def __init__(self, total: float, *, stream: TextIO | None, counted: bool = False) -> None:
        self.shown = stream is not None and stream.isatty()
        self._total, self._stream, self._counted = total, stream, counted
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def update(self, completed: float, text: str = "") -> None:
        """Moves the bar; text: shown next to it."""
        if self.shown:
            if self._bar is None:
                self._start()
            self._bar.update(self._task, completed=completed, text=text)

    def print(self, text: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, file=self._stream, flush=True)

    def close(self) -> None:
        """Stops updating; the bar remains on the terminal."""
        if self._bar is not None:
            self._bar.stop()

    def _start(self) -> None:
        try:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TaskProgressColumn,
                TextColumn,
                TimeRemainingColumn,
            )
        except ImportError as error:
            raise HalError(f"the progress bar needs rich ({error}); pip install 'torch-hal[train]'") from None
        share = MofNCompleteColumn() if self._counted else TaskProgressColumn()
        columns = (BarColumn(), share, TextColumn("{task.fields[text]}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=Console(file=self._stream))
        self._task = self._bar.add_task("", total=self._total, text="")
        self._bar.start()
