"""One Flight Recorder dump: a pickle, or JSON, of one rank of a PyTorch job, taken in as plain data within bounds.

The dump is a dictionary (``FlightRecorder::dump_dict`` and ``dump_json``, torch/csrc/distributed/c10d/FlightRecorderDetail.hpp;
in older releases ``NCCLTraceBuffer``, FlightRecorder.hpp there): ``version`` of the format (2.0 to 2.10), ``entries``, and later
``pg_config`` (the process groups with their ranks) and ``pg_status`` (counts of each). PyTorch writes pickles of protocol 2
without a single class, so none is allowed here.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import re
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from ncclwatch.gc_pause import collector_at_rest
from ncclwatch.ingest.base import IngestError, changed_ns
from ncclwatch.text import clean

LONGEST_BYTES = 64 << 20
"""Bound: a file; 20,000 entries with stacks are a quarter of it."""
MOST_ENTRIES = 200_000
"""Bound: entries of a dump; PyTorch keeps 2,000 by default."""
FREE_BYTES, BYTES_A_BYTE = 128 << 20, 16
"""Bound: memory that reading one file may take, and more for each of its bytes: the smallest opcodes make objects of 64 bytes,
and one opcode alone may ask for 64 GB (LONG_BINPUT, the unpickler's list of what it remembers).
"""
LONGEST_S, BYTES_A_SECOND = 10.0, 2 << 20
"""Bound: CPU time that reading one file may take, and a second more for so many of its bytes (25 MB of a dump take one): the hash
of tuples in tuples, each twice in the next, takes twice as long with each.
"""
BUFFER_BYTES = 1 << 17
"""Fact: what the unpickler asks a file for at a time (``PREFETCH``, CPython, Modules/_pickle.c)."""
_PICKLED = re.compile(rb"\x80.(?:\x95.{8})?\}", re.DOTALL)
"""A pickle of a dictionary. From protocol 4 on a frame begins before it: PyTorch writes protocol 2, who loads a dump and keeps it
with Python's own pickle a later one.
"""
MARKS = (b"pg_config", b"pg_status", b"profiling_name", b"collective_seq_id", b"record_id", b"nccl_comm_state")
"""Keys of which a dump has some near its beginning."""


@dataclass(frozen=True, slots=True)
class Dump:
    """What a dump holds, as it was read: untrusted but for the types named here."""

    path: Path
    version: str
    entries: Sequence[Mapping[str, Any]]
    config: Mapping[str, Mapping[str, Any]]
    """Process groups by name, with ``name``, ``desc`` and ``ranks`` (as text: ``[0, 1, 2]``)."""
    status: Mapping[str, Mapping[str, Any]]
    """Counts of operations by ``pg_id``."""
    written_ns: int
    """When the file was last written, CLOCK_REALTIME."""
    library: str = ""
    """Release of the communication library (``nccl_version`` from 2.7 on, ``comm_lib_version`` from 2.10 on)."""


class _NoClasses(pickle.Unpickler):
    """An unpickler of numbers, texts, lists, tuples and dictionaries."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names a class ({clean(f'{module}.{name}', 60)}), which no dump does")

    def persistent_load(self, _: object) -> NoReturn:
        raise pickle.UnpicklingError("it names an object of elsewhere, which no dump does")


def looks_like_dump(head: bytes) -> bool:
    """Whether a file begins as a dump does: a pickle or a JSON object with keys of a dump, or the beginning of one."""
    pickled = _PICKLED.match(head) is not None
    written = head.lstrip()[:1] == b"{"
    named = any(mark in head for mark in MARKS)
    return (pickled or written) and named and (b"version" in head or b"entries" in head)


def read_dump(path: Path) -> Dump:
    """One dump. Raises :class:`IngestError`, which names the file and, where that is known, the place."""
    name = clean(str(path), 160)
    try:
        # Not read as a whole first: of half a megabyte that is a copy more, in pages that nobody had yet.
        with io.BufferedReader(io.FileIO(path), BUFFER_BYTES) as file:
            status = os.fstat(file.fileno())
            size = status.st_size
            if size > LONGEST_BYTES:
                raise IngestError(f"{name} is larger than {LONGEST_BYTES >> 20} MB", "no Flight Recorder dump is")
            with collector_at_rest(), _interpreter_silent(), bounded_memory(FREE_BYTES + BYTES_A_BYTE * size):
                found = _unpickled(file) if file.peek(1)[:1] == b"\x80" else msgspec.json.decode(file.read(size))
    except IngestError:
        raise
    except OSError as error:
        raise IngestError(f"{name}: {error.strerror or error}") from error
    except MemoryError as error:
        raise IngestError(f"{name}: it asks for more memory than a dump of {size} bytes needs") from error
    except Exception as error:
        raise IngestError(f"{name} is damaged or cut off: {clean(str(error) or type(error).__name__, 120)}") from error
    return _checked(path, name, found, changed_ns(status))


def _unpickled(file: io.BufferedReader[io.FileIO]) -> Any:
    """Plain data from a pickle, read on from here. Raises whatever the unpickler does; the place is in the message."""
    begun = file.tell()
    try:
        return _NoClasses(file).load()
    except MemoryError:
        raise
    except Exception as error:
        file.seek(begun)
        place = _place(file.read(LONGEST_BYTES))
        raise pickle.UnpicklingError(f"{error or type(error).__name__} (before byte {place})") from error


def _place(data: bytes) -> int:
    """Up to where a damaged pickle was read: byte for byte this time, which takes longer."""
    source = io.BytesIO(data)
    try:
        _NoClasses(source).load()
    except Exception:
        return source.tell()
    return len(data)


def _checked(path: Path, name: str, found: Any, written_ns: int) -> Dump:
    if not isinstance(found, dict) or not isinstance(found.get("version", ""), str):
        raise IngestError(f"{name} holds no Flight Recorder dump", "it has no version and entries")
    if "version" not in found and "entries" not in found:
        raise IngestError(f"{name} holds no Flight Recorder dump", "it has no version and entries")
    entries = found.get("entries", [])
    if not isinstance(entries, list) or len(entries) > MOST_ENTRIES or set(map(type, entries)) - {dict}:
        raise IngestError(f"{name}: its entries are no list of at most {MOST_ENTRIES} dictionaries")
    tables = []
    for key in ("pg_config", "pg_status"):
        table = found.get(key, {})
        if not isinstance(table, dict) or not all(type(row) is dict for row in table.values()):
            raise IngestError(f"{name}: its {key} is no table")
        tables.append({str(number): row for number, row in table.items() if type(number) in (str, int)})
    library = found.get("comm_lib_version") or found.get("nccl_version")
    told = clean(library, 20) if isinstance(library, str) and library[:1].isdecimal() else ""
    return Dump(path, clean(found.get("version", ""), 20), entries, tables[0], tables[1], written_ns, told)


@contextmanager
def _interpreter_silent() -> Iterator[None]:
    """Within this block the interpreter prints no error that it does not raise: without memory for a bytearray it frees
    one that it never made, and complains of that (``PyByteArray_FromStringAndSize``, CPython 3.11).
    """
    before = sys.excepthook
    sys.excepthook = _ignore
    try:
        yield
    finally:
        sys.excepthook = before


def _ignore(*_: object) -> None:
    """The failure itself is raised, and told."""


@contextmanager
def bounded_time(path: Path) -> Iterator[None]:
    """Within this block SIGXCPU ends the process where it takes longer than a dump of this size may. For a process that was begun
    for the work.
    """
    try:
        size = min(path.stat().st_size, LONGEST_BYTES)
    except OSError:
        size = 0
    before = resource.getrlimit(resource.RLIMIT_CPU)
    limits = [
        time.process_time() + LONGEST_S + size / BYTES_A_SECOND,
        *(each for each in before if each != resource.RLIM_INFINITY),
    ]
    # Its memory is nobody's business.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(min(limits)), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CPU, before)


@contextmanager
def bounded_memory(more: int) -> Iterator[None]:
    """Within this block the process may grow by so many bytes; what would take more raises ``MemoryError``."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()
    limits = [held + more, *(limit for limit in before if limit != resource.RLIM_INFINITY)]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
