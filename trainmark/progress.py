"""Progress on the terminal: rate and remaining time, on standard error."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class _Rate(ProgressColumn):
    def __init__(self, unit: str, size: float) -> None:
        super().__init__()
        self._unit, self._size = unit, size

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        if not speed or speed < self._size:
            return Text("")
        return Text(f"{speed / self._size:,.0f} {self._unit}/s")


@contextmanager
def _bar(name: str, total: float, rate: _Rate) -> Iterator[Callable[[int], None]]:
    columns = [TextColumn(name), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), rate]
    console = SafeConsole(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(name, total=max(total, 1))
        yield lambda amount: progress.advance(task, amount)


def bytes_bar(name: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """A bar in MB/s; the context gives a function to advance it."""
    return _bar(name, total, _Rate("MB", 1e6))


def rows_bar(name: str, total: int) -> AbstractContextManager[Callable[[int], None]]:
    """A bar in million values a second."""
    return _bar(name, total, _Rate("M values", 1e6))


@contextmanager
def share_bar(name: str) -> Iterator[Callable[[float], None]]:
    """A bar for a share from 0 to 1; it appears when the first share is reported."""
    columns = [TextColumn(name), BarColumn(), TextColumn("{task.percentage:>3.0f}%")]
    progress = Progress(*columns, TimeRemainingColumn(), console=SafeConsole(stderr=True))
    task = progress.add_task(name, total=1.0)

    def show(share: float) -> None:
        progress.start()
        progress.update(task, completed=share)

    try:
        yield show
    finally:
        if progress.live.is_started:
            progress.stop()


def say(text: str) -> None:
    SafeConsole(stderr=True).say(text)


class SafeConsole(Console):
    """Shows text as it is: names and values from files and flags are neither markup nor commands
    to the terminal."""

    def say(self, text: str, style: str | None = None) -> None:
        """Print a sentence, in one line however long it is."""
        self.print(text, style=style, highlight=False, soft_wrap=True)

    def _write_buffer(self) -> None:
        """Progress that nobody can read any more, of a closed terminal or on a full disk, ends no
        work; results do."""
        try:
            super()._write_buffer()
        except OSError:
            if not self.stderr:
                raise
            self.quiet = True

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(printable(text), **options | {"markup": False, "emoji": False})


def printable(text: str) -> str:
    """With control characters, but for tabs and line ends, and bytes that are no text, in words."""
    return text.translate(_CONTROLS)


_CONTROLS = {n: f"\\x{n:02x}" for n in (*range(32), *range(127, 160)) if chr(n) not in "\t\n"}
_CONTROLS |= {n: f"\\u{n:04x}" for n in range(0xD800, 0xE000)}
