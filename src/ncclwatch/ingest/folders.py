"""Which files are records of which tool: told by content, in whatever files, folders and archives were named."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ncclwatch.ingest.base import HEAD_BYTES, Format, Ingested, IngestError
from ncclwatch.ingest.formats import FORMATS
from ncclwatch.ingest.packed import Unpacking, kind_of
from ncclwatch.text import clean

MOST_FILES, DEEPEST = 65_536, 6
"""Bound: files that are looked at in folders, and folders in folders."""
NESTED = 2
"""Bound: archives in archives."""
LARGEST_PACKED = 256 << 20
"""Bound: bytes of an archive that is unpacked though nobody named it: it only lies in a folder that was named."""
_NO_RECORDS = frozenset({".pt", ".pth", ".ckpt", ".npz", ".whl", ".egg", ".jar", ".docx", ".xlsx", ".pptx"})
"""Archives by their form, and never of records: weights, libraries, documents."""


@dataclass(slots=True)
class Found:
    """Files by their format; ``unknown``: files of none. ``unpacked`` holds what archives had in them."""

    files: dict[str, list[Path]] = field(default_factory=dict)
    unknown: list[Path] = field(default_factory=list)
    unpacked: Unpacking | None = None
    unopened: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        """Files that could not be opened and archives that could not be unpacked, a line each."""
        return [*self.unopened, *(self.unpacked.problems if self.unpacked is not None else ())]


@dataclass(frozen=True, slots=True)
class Record:
    """One job as one format tells it."""

    format: Format
    ingested: Ingested


def format_of(path: Path, formats: Sequence[Format] = FORMATS) -> Format | None:
    """The format of a file, ``None`` where it is of none, or cannot be read."""
    head = _head(path, [])
    return next((one for one in formats if head and one.recognises(head, path)), None)


def _head(path: Path, problems: list[str]) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(HEAD_BYTES)
    except FileNotFoundError:
        # It went since it was listed: who watches a folder sees that at the next look.
        return b""
    except OSError as error:
        problems.append(f"{clean(str(path), 160)}: {error.strerror or error}")
        return b""


def find(paths: Sequence[Path], formats: Sequence[Format] = FORMATS) -> Found:
    """The files among paths and in the folders and archives among them. Files that nobody named and nobody knows are left out."""
    found = Found()
    for path in paths:
        for file in files_in(path) if path.is_dir() else (path,):
            if not _take(found, file, formats, NESTED if file == path or _worth_unpacking(file) else 0):
                found.unknown.append(file)
    return found


def _worth_unpacking(file: Path) -> bool:
    try:
        return file.suffix.lower() not in _NO_RECORDS and file.stat().st_size <= LARGEST_PACKED
    except OSError:
        return False


def _take(found: Found, file: Path, formats: Sequence[Format], nested: int) -> bool:
    """Whether a file is of any format, or an archive of such files."""
    head = _head(file, found.unopened)
    known = next((one for one in formats if head and one.recognises(head, file)), None)
    if known is not None:
        found.files.setdefault(known.name, []).append(file)
        return True
    if not nested or not kind_of(head):
        return False
    found.unpacked = found.unpacked or Unpacking()
    taken = [_take(found, inner, formats, nested - 1) for inner in found.unpacked.files(file)]
    return True in taken


def files_in(folder: Path) -> Iterator[Path]:
    """Files of a folder and of the folders in it, in order. Raises :class:`IngestError` when there are too many."""
    number = 0
    for root, folders, names in os.walk(folder):
        here = Path(root)
        if len(here.relative_to(folder).parts) >= DEEPEST:
            folders.clear()
        folders.sort()
        for name in sorted(names):
            file = here / name
            if name.startswith(".") or not file.is_file():
                continue
            number += 1
            if number > MOST_FILES:
                raise IngestError(f"{clean(str(folder), 160)} holds more than {MOST_FILES} files", "name a folder of one job")
            yield file


def read(found: Found, formats: Sequence[Format] = FORMATS) -> tuple[list[Record], list[str]]:
    """What the files say, a record for each job and format, and what could not be read.

    Raises :class:`IngestError` when nothing could be read at all.
    """
    records: list[Record] = []
    problems: list[str] = [*found.problems]
    for one in formats:
        files = found.files.get(one.name)
        if not files:
            continue
        try:
            told = one.read(files)
        except IngestError as error:
            problems.append(str(error))
            continue
        for ingested in told:
            records.append(Record(one, ingested))
            problems += ingested.problems
    if not records:
        raise IngestError(problems[0] if problems else "no record of a tool that is known", "docs/ingest.md lists the formats")
    return records, problems
