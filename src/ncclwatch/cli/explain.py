"""``ncclwatch explain``: what is known of a cause, a class of verdicts or a release of NCCL, from the tables of knowledge."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from ncclwatch.cli.options import JsonOption
from ncclwatch.cli.output import emit, emit_json
from ncclwatch.errors import UsageError
from ncclwatch.knowledge.rows import LISTS, Release, Row, parse_release, placed, release_text, rows
from ncclwatch.text import Style, columns, wrap


def explain(
    cause: Annotated[
        str | None,
        typer.Argument(metavar="[CAUSE]", help="Id of a row, a cause, a class of verdicts, what a rank was doing."),
    ] = None,
    release: Annotated[
        str | None, typer.Option("--release", metavar="RELEASE", help="Known defects of this release of NCCL: 2.27.5.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say what is known: what was seen, the likely cause, what to do, and who says so. Without an argument everything is listed.

    \b
    Examples:
      ncclwatch explain                      a list of all rows
      ncclwatch explain not-entered          all that is known of ranks that have not entered an operation
      ncclwatch explain --release 2.28.9     known defects that this release of NCCL has
    """
    found = list(rows())
    if release is not None:
        found = with_defect(found, parse_release(release))
    if cause is not None:
        found = about(found, cause.lower())
        if not found:
            raise UsageError(f"nothing is known of '{cause}'", "'ncclwatch explain' lists what there is")
    if as_json:
        emit_json([row.to_json() for row in found])
        return
    whole = cause is not None or (release is not None and len(found) <= 3)
    lines = (line for row in found for line in row_lines(row, Style())) if whole else listing(found)
    for line in lines:
        # A file or a pager gets whole lines, which can be searched.
        emit("\n".join(wrap(line, shutil.get_terminal_size().columns)) if sys.stdout.isatty() else line)


def with_defect(found: Sequence[Row], release: Release) -> list[Row]:
    """The known defects that a release has, whatever the machine."""
    from ncclwatch.knowledge.match import affects

    return [row for row in found if row.defect and row.when.by_release and affects(row.when, release)]


def about(found: Sequence[Row], word: str) -> list[Row]:
    """The row of this id, else every row whose pattern speaks of the word."""
    return [row for row in found if row.id == word] or [
        row for row in found if any(word in values for values in row.when.lists.values())
    ]


def listing(found: Sequence[Row]) -> Iterator[str]:
    """A line a row."""
    table = [(row.id, _affected(row) if row.defect else "", row.seen) for row in found]
    yield from columns(("ID", "NCCL", "SEEN"), table)
    yield ""
    yield f"{len(found)} rows, {sum(row.defect for row in found)} of them known defects of NCCL: 'ncclwatch explain ID' tells one"


def row_lines(row: Row, style: Style) -> Iterator[str]:
    """A row in full."""
    yield style.bold(row.id) + (f"  known defect of NCCL {_affected(row)}" if row.defect else "")
    yield f"  seen     {row.seen}"
    yield f"  likely   {row.cause}  (judged {row.confidence:.0%} likely)"
    if row.defect:
        yield f"  to tell  {placed(row.check)}"
        yield f"  fixed    {'in ' + row.fixed_in if row.fixed_in else 'in no release that is known'}"
    for number, step in enumerate(row.do):
        yield f"  {'do' if number == 0 else '':<8} {placed(step)}"
    keys = [(key, row.when.lists[key]) for key in LISTS if key in row.when.lists]
    words = [f"{key} {' or '.join(sorted(value or 'none' for value in values))}" for key, values in keys]
    words += [f"at least {row.when.min_ranks} ranks"] if row.when.min_ranks else []
    words += [f"at most {row.when.max_ranks} ranks"] if row.when.max_ranks is not None else []
    yield f"  fits     {'; '.join(words) or 'any verdict'}" + (f"; NCCL {_affected(row)}" if row.when.by_release else "")
    yield f"  sources  {'; '.join(row.sources)}"
    yield ""


def _affected(row: Row) -> str:
    since, before = row.when.since, row.when.before
    first = f"{release_text(since)} to " if since is not None else ""
    return f"{first}before {release_text(before)}" if before is not None else f"{release_text(since)} on" if since else "any"
