"""How far a measurement is, as a bar in the terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

__all__ = ["profile_bar"]


@contextmanager
def profile_bar(console: Console | None = None) -> Iterator[Callable[[float], None]]:
    """Draw a bar while the block runs, and remove it; give what is told the share that is done.

    It is drawn when it is told, and not from a thread beside, which would disturb what is measured.
    Where there is no terminal nothing is drawn.
    """
    console = console or Console(stderr=True)
    columns = TextColumn("measuring"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    quiet = not console.is_terminal
    bar = Progress(*columns, console=console, transient=True, auto_refresh=False, disable=quiet)
    with bar:
        task = bar.add_task("", total=1.0)
        yield lambda share: bar.update(task, completed=share, refresh=True)
