"""Packed files among other tools' records (gzip, xz, bzip2, zip, tar): unpacked into a folder of their own, within bounds.

An archive is untrusted: only plain files are taken out, never links or devices, and no name leads out of the folder. What is
damaged or cut off is told; what could be unpacked of it until there is kept.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import shutil
import struct
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast

from ncclwatch.text import clean

MOST_BYTES = 8 << 30
"""Bound: bytes that are unpacked of all archives together; and never more than half of what the disk has left."""
MOST_FILES, DEEPEST, LONGEST_NAME = 65_536, 8, 200
"""Bound: files that are unpacked, folders in folders of an archive, bytes of a name."""
PART = 1 << 20
TAR_AT = 257
"""Fact: where ``ustar`` stands in the first block of a tar file (POSIX.1-2001, pax)."""
_MAGIC = {b"\x1f\x8b": "gzip", b"\xfd7zXZ\x00": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip"}
_OPEN: dict[str, Callable[[IO[bytes]], Any]] = {"gzip": gzip.open, "xz": lzma.open, "bzip2": bz2.open}
_DAMAGE = (
    OSError, EOFError, ValueError, LookupError, RuntimeError, struct.error,
    zlib.error, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile,
)  # fmt: skip
"""What the libraries raise for archives that are damaged, encrypted or of a kind they do not know."""


def kind_of(head: bytes) -> str:
    """How a file that begins so is packed; empty where it is not."""
    if head[TAR_AT : TAR_AT + 5] == b"ustar":
        return "tar"
    return next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "")


class Unpacking:
    """A folder with what was unpacked; it goes with this object. ``problems``: what could not be unpacked, a line each."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ncclwatch-", ignore_cleanup_errors=True)
        self._left = min(MOST_BYTES, shutil.disk_usage(self._folder.name).free // 2)
        self._files = self._archives = 0
        self._begun: Path | None = None
        """The file that is being written."""

    @property
    def place(self) -> Path:
        """The folder."""
        return Path(self._folder.name).resolve()

    def files(self, archive: Path) -> Iterator[Path]:
        """The files that were unpacked of one archive, one after the other. Never raises for what is in it."""
        self._archives += 1
        place = self.place / str(self._archives) / archive.name[:LONGEST_NAME]
        try:
            with archive.open("rb") as raw:
                kind = kind_of(raw.read(512))
                raw.seek(0)
                if kind == "zip":
                    yield from self._of_zip(raw, place)
                elif kind == "tar":
                    yield from self._of_tar(raw, place)
                else:
                    yield from self._of_stream(kind, raw, place, archive)
        except _DAMAGE as error:
            self.problems.append(f"{clean(str(archive), 160)} is damaged, cut off or too large: {clean(str(error), 100)}")
            if self._begun is not None:
                yield self._begun
                self._begun = None

    def _of_stream(self, kind: str, raw: IO[bytes], place: Path, archive: Path) -> Iterator[Path]:
        with cast("IO[bytes]", _OPEN[kind](raw)) as stream:
            if kind_of(stream.read(512)) == "tar":
                stream.seek(0)
                yield from self._of_tar(stream, place)
                return
            stream.seek(0)
            name = archive.stem if archive.suffix in (".gz", ".xz", ".bz2") else archive.name
            yield self._write(stream, place / name, archive.stat().st_mtime)

    def _of_tar(self, stream: IO[bytes], place: Path) -> Iterator[Path]:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                target = _inside(place, member.name)
                inner = tar.extractfile(member) if member.isfile() and target is not None else None
                if inner is not None and target is not None:
                    yield self._write(inner, target, member.mtime)

    def _of_zip(self, raw: IO[bytes], place: Path) -> Iterator[Path]:
        with zipfile.ZipFile(raw) as archive:
            for member in archive.infolist():
                target = None if member.is_dir() else _inside(place, member.filename)
                if target is not None:
                    with archive.open(member) as inner:
                        yield self._write(inner, target, None)

    def _write(self, source: IO[bytes], target: Path, changed_s: float | None) -> Path:
        """One file; what was read of it before damage stays. Raises ``ValueError`` past the bounds."""
        self._files += 1
        if self._files > MOST_FILES:
            raise ValueError(f"more than {MOST_FILES} files")
        target.parent.mkdir(parents=True, exist_ok=True)
        self._begun = target
        with target.open("wb") as file:
            while part := source.read(PART):
                self._left -= len(part)
                if self._left < 0:
                    raise ValueError("it holds more than may be unpacked")
                file.write(part)
        if changed_s is not None:
            # When a dump was written tells how long its waits had lasted.
            with suppress(OverflowError, OSError):
                os.utime(target, (changed_s, changed_s))
        self._begun = None
        return target


def _inside(place: Path, name: str) -> Path | None:
    """Where a file of an archive goes; ``None`` for names that are not taken."""
    parts = [part for part in PurePosixPath(name.replace("\\", "/")).parts if part not in ("/", "..", ".")]
    if not parts or len(parts) > DEEPEST or "\0" in name or any(len(os.fsencode(part)) > LONGEST_NAME for part in parts):
        return None
    return place.joinpath(*parts)
