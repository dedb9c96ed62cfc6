"""``ncclwatch history import``, ``compact``, ``keep``: what goes into a history from files, and how much of it stays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ncclwatch.cli.history_options import LocalOption
from ncclwatch.cli.options import JsonOption
from ncclwatch.cli.output import emit, emit_json, note
from ncclwatch.errors import TargetError, UsageError
from ncclwatch.text import clean, size


def import_files(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Recordings, or files of JSON lines with verdicts.")],
    history: LocalOption,
    job: Annotated[str, typer.Option("--job", metavar="JOB", help="Name of the job that they are of.")] = "",
) -> None:
    """Take recordings (played and judged again) and verdicts ('--json' of attach or engine, --hook-log) into a history.

    Recordings that are named together are of one job, each of a node. What was taken in before is not taken in again.
    """
    from ncclwatch.cli.history_import import take_in
    from ncclwatch.history.query import need_packages

    need_packages()
    for path in paths:
        if not path.is_file():
            raise UsageError(f"no such file: {clean(str(path))}", "name a recording, or a file of JSON lines")
    for line in take_in(paths, history, job):
        emit(line)


def compact(history: LocalOption, as_json: JsonOption = False) -> None:
    """Make one file a day of many, take in what killed writers left, and remove what is too old or too much.

    Writers do it once an hour by themselves. Safe beside writers and readers, and killed at any moment.
    """
    from ncclwatch.history.compact import look_after
    from ncclwatch.history.query import need_packages

    need_packages()
    _require(history)
    done = look_after(history, wait=True)
    if done is None or (done.problem and not (done.recovered or done.made or done.removed)):
        problem = done.problem if done is not None else "somebody else looks after it"
        raise TargetError(f"{clean(str(history))} could not be looked after: {clean(problem)}", "make room, or try again")
    if as_json:
        emit_json(done)
        return
    emit(
        f"{done.merged} files became {done.made}; {done.removed} removed ({size(done.freed)}); {done.recovered} journals taken in"
    )
    if done.copied:
        emit(f"{done.copied} files copied to the store")
    if done.problem:
        note(clean(done.problem, 300))


def keep(
    history: LocalOption,
    days: Annotated[int | None, typer.Option("--days", min=1, max=100_000, help="Remove days that are older.")] = None,
    nbytes: Annotated[
        str | None, typer.Option("--size", metavar="SIZE", help="Remove the oldest beyond that: 20G. Rates and flows go first.")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option("--store", metavar="ADDRESS", help="Copy whole days there too: s3://BUCKET/PATH; '' for nowhere."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Say how much of a history is kept; without options what has been said."""
    import msgspec

    from ncclwatch.cli.record import parse_size
    from ncclwatch.history.compact import KEEP, keep_of
    from ncclwatch.history.remote import file_system, is_remote, shown

    _require(history)
    if store and not is_remote(store):
        raise UsageError(f"{clean(store)} is no address", "write it like s3://BUCKET/PATH")
    if store:
        file_system(store)
    told = keep_of(history)
    given = {"days": days, "nbytes": parse_size(nbytes) if nbytes is not None else None, "store": store}
    new = msgspec.structs.replace(told, **{name: value for name, value in given.items() if value is not None})
    if new != told:
        working = history / f"{KEEP}.new"
        # The address of a store may hold a key.
        working.touch(0o600)
        working.write_text(json.dumps(msgspec.to_builtins(new)), "utf-8")
        working.replace(history / KEEP)
    if as_json:
        emit_json(msgspec.to_builtins(new))
        return
    also = f"; whole days are copied to {shown(new.store)}" if new.store else ""
    emit(f"kept: {new.days} days, at most {size(new.nbytes)}{also}")


def _require(folder: Path) -> None:
    if not (folder / "journal").is_dir():
        hint = "name the folder that 'attach', 'engine' or 'history import' was given with --history"
        raise TargetError(f"there is no history in {clean(str(folder))}", hint)
