"""A JSON file read item by item: the top-level object's members, and of one array among them each element, in bounded
memory.
"""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from ncclwatch.ingest.base import IngestError
from ncclwatch.text import clean

PART = 1 << 20
"""Characters that are read at once."""
LONGEST = 1 << 24
"""Bound: characters of one value."""
_DECODER = json.JSONDecoder()
_AFTER = " \t\r\n,:]}"
"""What may stand behind a value."""
_GZIP = b"\x1f\x8b"


@contextmanager
def opened(path: Path) -> Iterator[IO[bytes]]:
    """A file's bytes, unpacked where it is gzip'ed."""
    with path.open("rb") as raw:
        packed = raw.read(2) == _GZIP
        raw.seek(0)
        if packed:
            with gzip.GzipFile(fileobj=raw) as unpacked:
                yield cast("IO[bytes]", unpacked)
        else:
            yield raw


def head_of(head: bytes) -> bytes:
    """The beginning of a file's contents, unpacked where it is gzip'ed; empty where that fails."""
    if not head.startswith(_GZIP):
        return head
    try:
        return zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(head, 1 << 16)
    except zlib.error:
        return b""


class _Reader:
    """The text of a file, as far as it is needed."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path, self._file = path, file
        self.text, self.at = "", 0
        self.passed = 0
        """Characters that are no longer kept."""
        self.ended = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def fill(self) -> bool:
        """Read more; whether there was any. What lies behind is dropped."""
        try:
            data = self._file.read(PART)
        except (OSError, EOFError, zlib.error) as error:
            raise self.error(f"cannot be unpacked: {error}") from None
        self.ended = not data
        self.passed += self.at
        self.text, self.at = self.text[self.at :] + self._decoder.decode(data, self.ended), 0
        return bool(data)

    def error(self, why: str) -> IngestError:
        """What is wrong, with file and place."""
        return IngestError(f"{clean(str(self._path), 200)}: at character {self.passed + self.at}: {why}", "the rest was not read")

    def peek(self) -> str:
        """The next character that is no white space; empty at the end."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in " \t\r\n":
                self.at += 1
            if self.at < len(self.text):
                return self.text[self.at]
            if not self.fill():
                return ""

    def take(self, wanted: str) -> None:
        """The next character must be this one."""
        found = self.peek()
        if found != wanted:
            raise self.error(f"{wanted!r} was expected, not {found!r}" if found else "the file ends here")
        self.at += 1

    def value(self) -> Any:
        """The next value, whole."""
        self.peek()
        while True:
            whole = False
            found: Any = None
            end = len(self.text)
            try:
                found, end = _DECODER.raw_decode(self.text, self.at)
                whole = True
            except RecursionError:
                raise self.error("values lie too deep in one another") from None
            except ValueError:
                pass
            # A number at the end of what was read may go on.
            if whole and (self.ended or (end < len(self.text) and self.text[end] in _AFTER)):
                self.at = end
                return found
            if len(self.text) - self.at > LONGEST:
                raise self.error("a value is no JSON, or longer than 16 MiB")
            if whole and end < len(self.text) - 3:
                raise self.error("a value is followed by what is none")
            if not self.fill() and not whole:
                raise self.error("a value is no JSON, or the file ends in it")


def members(path: Path, file: IO[bytes], array: str) -> Iterator[tuple[str, Any]]:
    """The members of the top-level object (name, value), and for the one named ``array`` one item an element. A file that is an
    array itself has its elements under that name. Raises :class:`IngestError` with the place where it is no JSON.
    """
    reader = _Reader(path, file)
    if reader.peek() == "[":
        yield from ((array, element) for element in _elements(reader))
        return
    reader.take("{")
    while reader.peek() != "}":
        name = reader.value()
        if not isinstance(name, str):
            raise reader.error("the name of a member is no text")
        reader.take(":")
        if name == array and reader.peek() == "[":
            yield from ((array, element) for element in _elements(reader))
        else:
            yield name, reader.value()
        if reader.peek() == ",":
            reader.at += 1
        elif reader.peek() != "}":
            raise reader.error("the object does not go on")


def _elements(reader: _Reader) -> Iterator[Any]:
    reader.take("[")
    while reader.peek() != "]":
        yield reader.value()
        if reader.peek() == ",":
            reader.at += 1
        elif reader.peek() != "]":
            raise reader.error("the array does not go on")
    reader.at += 1
