"""The binaries of a process that carry NCCL: a libnccl under any name, or NCCL linked statically into a library or program.

What tells NCCL is a defined ``ncclAllReduce`` or ``pncclAllReduce``; names of files only decide where to look first. Files are
read through the process's own mappings, so mount namespaces and deleted files do not matter, and what was learned of a file is
kept by its identity.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ncclwatch.errors import NcclwatchError, TargetError
from ncclwatch.model.state import VersionSource
from ncclwatch.target import manifest
from ncclwatch.target.elf import ElfError, ElfFile
from ncclwatch.target.maps import PROC, Mapping, parse_maps
from ncclwatch.target.namespaces import OPEN_FLAGS, open_below, open_mapped
from ncclwatch.target.version import NcclVersion, find_version

SIGNS = ("ncclAllReduce", "pncclAllReduce")
"""Functions that every NCCL defines; plugins (libnccl-net.so) and users of NCCL do not."""

SHIM_SIGN = "ncclwatchCounters"
"""What our own counter shim defines: it hands NCCL's functions on under their names, and is not NCCL."""

STATIC_MIN_SIZE = 1 << 20
"""A binary with less code (bytes in one mapping) does not carry NCCL statically: NCCL's own is over 1 MB since 2.18."""

MAX_STATIC_NAMES = 128 << 20
"""Bytes of symbol names of a binary that are searched for what it does not export (libtorch_cuda exports what it carries)."""

_NAME = re.compile(r"nccl", re.IGNORECASE)
_LIBRARY = re.compile(r"lib[\w.+-]*nccl[\w.+-]*\.so", re.IGNORECASE)
# The same, and executable mappings, in the raw text of a maps file: most processes are dismissed without parsing it.
_RAW_EXECUTABLE = re.compile(
    rb"^([0-9a-f]+)-([0-9a-f]+) [r-][w-]x[ps] [0-9a-f]+ ([0-9a-f]+:[0-9a-f]+ [1-9]\d* +/.*)$", re.MULTILINE
)
_RAW_FILE = re.compile(rb"^\S+ \S+ \S+ \S+ [1-9].*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a file that carries NCCL says about itself."""

    build_id: str
    version: NcclVersion | None
    has_debug_info: bool

    @property
    def version_source(self) -> VersionSource:
        """How well the layout of this build can be known (:mod:`ncclwatch.target.resolve`)."""
        if self.has_debug_info:
            return VersionSource.DEBUG_INFO
        if self.build_id and manifest.load().by_build_id(self.build_id):
            return VersionSource.BUILD_ID
        return VersionSource.VERSION if self.version else VersionSource.UNKNOWN


@dataclass(frozen=True)
class NcclBinary:
    """A binary that carries NCCL, as one process has it loaded.

    ``path`` is as the target sees it; ``open_path`` is one that the agent can open while the process lives (it may lie in
    ``/proc``).
    ``base`` to ``end`` are the addresses it occupies; ``bias`` is what to add to an address as linked. ``dev`` and ``inode`` are
    those of the opened file. ``deleted`` says that the path no longer leads to it.
    """

    pid: int
    path: str
    open_path: str
    base: int
    end: int
    bias: int
    dev: int
    inode: int
    facts: FileFacts
    statically_linked: bool
    deleted: bool
    proc: str = str(PROC)

    @property
    def build_id(self) -> str:
        """Hexadecimal, ``""`` when it has none."""
        return self.facts.build_id

    @cached_property
    def version_source(self) -> VersionSource:
        """How well the layout of this build can be known."""
        return self.facts.version_source

    def open(self) -> ElfFile:
        """Open the file again; raises :class:`TargetError` when it is no longer there or no longer the same."""
        # A name in map_files lasts until the mapping is split or protected anew; the path below the root is the second choice.
        for below_root in (False, True):
            try:
                fd = open_below(f"{self.proc}/{self.pid}/root", self.path) if below_root else os.open(self.open_path, OPEN_FLAGS)
            except OSError:
                continue
            status = os.fstat(fd)
            if (status.st_dev, status.st_ino) == (self.dev, self.inode):
                return ElfFile(fd, self.path)
            os.close(fd)
        raise TargetError(f"{self.path} of process {self.pid} cannot be opened again", "has the process exited?")


class BinaryIndex:
    """Finds the binaries that carry NCCL, looking into each file once however many processes map it.

    One index serves many processes and many looks; it is bounded.
    """

    MAX_FILES = 65536

    def __init__(self, proc: Path = PROC) -> None:
        self._proc = proc
        self._facts: dict[tuple[int, int, int, int], FileFacts | None] = {}
        self._clean: set[tuple[int, int, str]] = set()
        self._clean_raw: set[bytes] = set()

    def start_survey(self) -> None:
        """Forget which mapped files are free of NCCL: inodes are reused, and only within one survey is that no concern."""
        self._clean.clear()
        self._clean_raw.clear()

    def could_carry(self, text: bytes) -> bool:
        """Whether the raw text of a maps file names a file that has to be looked into."""
        for line in _RAW_EXECUTABLE.finditer(text):
            file = line[3]
            if file in self._clean_raw or not _is_suspect(line):
                continue
            if any(True for _ in self._candidates(parse_maps(line[0]))):
                return True
            self._clean_raw.add(file)
        return False

    def find(self, pid: int, text: bytes) -> list[NcclBinary]:
        """The binaries that carry NCCL in a process with this text of its maps file: dynamically linked first, then by address.

        A file that cannot be opened is passed over, unless that leaves none: then the reason is raised
        (:class:`TargetError`, :class:`ncclwatch.errors.PrivilegeError`).
        """
        mappings = parse_maps(b"\n".join(_RAW_FILE.findall(text)))
        found: list[NcclBinary] = []
        problem: NcclwatchError | None = None
        for mapping in self._candidates([m for m in mappings if m.executable]):
            try:
                binary = self._look(pid, mapping, mappings)
            except NcclwatchError as error:
                if _NAME.search(mapping.file_name):
                    problem = error
                continue
            if binary is not None and not any(other.base == binary.base for other in found):
                found.append(binary)
        if not found and problem is not None:
            raise problem
        return sorted(found, key=lambda binary: (binary.statically_linked, binary.base))

    def _candidates(self, executable: Sequence[Mapping]) -> Iterator[Mapping]:
        """Executable mappings of files that may carry NCCL, the most likely first."""
        named = [m for m in executable if _NAME.search(m.file_name)]
        large = [m for m in executable if m.size >= STATIC_MIN_SIZE and m not in named]
        for mapping in (*named, *large):
            if (mapping.dev, mapping.inode, mapping.path) not in self._clean:
                yield mapping

    def _look(self, pid: int, mapping: Mapping, mappings: Sequence[Mapping]) -> NcclBinary | None:
        fd, open_path = open_mapped(pid, mapping, self._proc)
        status = os.fstat(fd)
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        try:
            elf = ElfFile(fd, mapping.path)
        except ElfError:
            elf = None
        if elf is None:
            self._dismiss(mapping)
            return None
        with elf:
            if identity not in self._facts:
                if len(self._facts) >= self.MAX_FILES:
                    self._facts.clear()
                self._facts[identity] = _read_facts(elf)
            facts = self._facts[identity]
            if facts is None:
                self._dismiss(mapping)
                return None
            bias = elf.load_bias(mapping.start, mapping.offset)
        if bias is None:
            raise TargetError(f"{mapping.path} of process {pid} is not mapped as its headers say", "was it loaded by hand?")
        base, end = _extent(mapping, mappings)
        return NcclBinary(
            pid=pid,
            path=mapping.file_path,
            open_path=open_path,
            base=base,
            end=end,
            bias=bias,
            dev=status.st_dev,
            inode=status.st_ino,
            facts=facts,
            statically_linked=not _LIBRARY.match(mapping.file_name),
            deleted=mapping.is_deleted,
            proc=str(self._proc),
        )

    def _dismiss(self, mapping: Mapping) -> None:
        if len(self._clean) < self.MAX_FILES:
            self._clean.add((mapping.dev, mapping.inode, mapping.path))


def _is_suspect(line: re.Match[bytes]) -> bool:
    """What :meth:`BinaryIndex._candidates` asks, of a raw line."""
    return b"nccl" in line[3].lower() or int(line[2], 16) - int(line[1], 16) >= STATIC_MIN_SIZE


def _read_facts(elf: ElfFile) -> FileFacts | None:
    """The facts of a file that carries NCCL, ``None`` for any other; a damaged file carries none."""
    try:
        hidden = elf.static_names_size <= MAX_STATIC_NAMES
        if elf.exported(SHIM_SIGN) or not any(elf.exported(sign) or (hidden and elf.find(sign)) for sign in SIGNS):
            return None
        return FileFacts(elf.build_id, find_version(elf), elf.has_debug_info)
    except ElfError:
        return None


def _extent(mapping: Mapping, mappings: Sequence[Mapping]) -> tuple[int, int]:
    """(start, end) of the load of a file that a mapping is part of: neighbours in address order whose offsets do not fall.

    A file that is loaded twice (dlmopen) has two extents; the zero-initialised tail behind the last part is anonymous and not
    counted.
    """
    same = [m for m in mappings if (m.dev, m.inode) == (mapping.dev, mapping.inode)]
    first = last = same.index(mapping)
    while first > 0 and same[first - 1].offset <= same[first].offset:
        first -= 1
    while last + 1 < len(same) and same[last + 1].offset >= same[last].offset:
        last += 1
    return same[first].start, same[last].end
