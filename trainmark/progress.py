"""Progress on the terminal: rate and remaining time, on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """Millions a second."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        self._unit = unit

    def render(self, task: Task) -> Text:
        millions = (task.finished_speed or task.speed or 0) / 1e6
        return Text(f"{millions:,.0f} {self._unit}/s" if millions >= 1 else "")


@contextmanager
def rate_bar(name: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """A bar with its rate, in a unit that stands for a million; the context gives a function to
    advance it, by ones."""
    columns = [TextColumn(name), BarColumn(), TextColumn("{task.percentage:>3.0f}%"), _Rate(unit)]
    console = SafeConsole(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task(name, total=max(total, 1))
        yield lambda amount: progress.advance(task, amount)


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
