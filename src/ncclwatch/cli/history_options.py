"""What the commands of ``ncclwatch history`` share: which history, since when, within what bounds, and how it is written."""

from __future__ import annotations

import re
import resource
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ncclwatch.cli.output import emit, note
from ncclwatch.errors import UsageError
from ncclwatch.text import clean, fit

if TYPE_CHECKING:
    from ncclwatch.history.query import History

FolderOption = Annotated[
    str,
    typer.Option(
        "--history", metavar="FOLDER", envvar="NCCLWATCH_HISTORY", help="The history: a folder, or an address (s3://BUCKET/PATH)."
    ),
]
LocalOption = Annotated[
    Path, typer.Option("--history", metavar="FOLDER", envvar="NCCLWATCH_HISTORY", help="The history's folder.")
]
SinceOption = Annotated[
    str, typer.Option("--since", metavar="WHEN", help="Only from then on: 12h, 7d, 2026-11-20, or 2026-11-20T08:00 (UTC).")
]
JobNameOption = Annotated[str, typer.Option("--job", metavar="JOB", help="Of this job only.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=0.1, max=86400.0, help="Seconds that a question may take.")]
MemoryOption = Annotated[str, typer.Option("--memory", metavar="SIZE", help="Memory that a question may take: 512M, 4G.")]
SINCE, MEMORY, TIMEOUT_S = "30d", "1G", 60.0
"""By default."""
TABLES_OF_RUNS = ("runs", "rates", "iterations", "verdicts")
"""What questions about runs read."""
ADDRESS_SPACE = 8 << 30
"""Bound: what a file that lies about its size may make this process ask for, beyond the memory of a question."""
_AGE = re.compile(r"(\d{1,6})([hdw])")
_HOURS = {"h": 1, "d": 24, "w": 168}
_FEW = 24
"""Characters that what belongs to untrusted names may take in a table."""


def parse_since(text: str) -> datetime:
    """A time in UTC, without a zone. Raises ``UsageError``."""
    age = _AGE.fullmatch(text)
    try:
        if age is not None:
            return datetime.now(UTC).replace(tzinfo=None) - timedelta(hours=int(age[1]) * _HOURS[age[2]])
        if len(text) == len("2026-11-20"):
            return datetime.combine(date.fromisoformat(text), datetime.min.time())
        told = datetime.fromisoformat(text)
        return told.astimezone(UTC).replace(tzinfo=None) if told.tzinfo is not None else told
    except (ValueError, OverflowError):
        raise UsageError(f"--since {clean(text, 40)} is no time", "write it like 12h, 7d, or 2026-11-20") from None


@contextmanager
def opened(
    folder: str, since: datetime | None = None, tables: Sequence[str] = (), memory: str = MEMORY, timeout_s: float = TIMEOUT_S
) -> Iterator[History]:
    """The history, what is wrong with it said on standard error; what it may take is bounded for this process."""
    from ncclwatch.cli.record import parse_size
    from ncclwatch.history.query import History
    from ncclwatch.history.tables import TABLES

    nbytes = parse_size(memory)
    day = f"{since:%Y-%m-%d}" if since is not None and since != datetime.min else ""
    with _bounded(nbytes + ADDRESS_SPACE):
        wanted = tables or tuple(TABLES)
        with History(folder, tables=wanted, since_day=day, memory=nbytes, timeout_s=timeout_s) as history:
            for problem in history.problems:
                note(problem)
            yield history


@contextmanager
def _bounded(nbytes: int) -> Iterator[None]:
    """This process gets no more memory than that."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    known = [limit for limit in (soft, nbytes) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(known), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def json_of(value: Any) -> Any:
    """Times as ``2026-11-25T19:24:04.212286Z``, everything else as it is."""
    if isinstance(value, dict):
        return {name: json_of(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_of(item) for item in value]
    return f"{value.isoformat()}Z" if isinstance(value, datetime) else value


def when(value: datetime | None) -> str:
    """A time for people, to the second, in UTC."""
    return f"{value:%Y-%m-%d %H:%M:%S}" if value is not None else ""


def name(text: str | None, cells: int = _FEW) -> str:
    """A job's or node's name for a table."""
    return fit(clean(text or "", 200), cells)


def number(value: Any, digits: str = ".0f", unit: str = "") -> str:
    """A number for a table; empty for none."""
    return f"{value:{digits}}{unit}" if isinstance(value, (int, float)) else ""


def show(lines: Sequence[str]) -> None:
    """Write lines; on a terminal none is longer than it is wide."""
    cells = shutil.get_terminal_size().columns
    for line in lines:
        emit(fit(line, cells) if sys.stdout.isatty() else line)
