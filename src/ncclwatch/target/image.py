"""Snapshot files: the pages read from one or more processes at two or more moments, enough to decode them again anywhere.

A file holds what was read and no more, but pages are kept whole: it can contain other data of the process that lies beside
NCCL's. The layouts are inside, so a file decodes without the library and without privileges.

Form: :data:`MAGIC`, then version, lengths and a digest (:data:`HEADER`), then two LZMA streams: JSON that describes processes,
samples, maps and layouts, and the distinct pages one after the other.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import struct
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from ncclwatch import __version__
from ncclwatch.errors import TargetError, TargetGoneError, UsageError
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import CpuLimit, ProcessInfo, ProcessSample, VersionSource
from ncclwatch.model.traits import Traits
from ncclwatch.target.layout import Layout, LayoutError
from ncclwatch.target.maps import Mapping
from ncclwatch.target.recorded import BLOCK, ImageReader
from ncclwatch.target.sampler import ProcessFacts, Sampler

MAGIC = b"ncclwatch-image\n"
VERSION = 1
HEADER = struct.Struct("<16sIIQQ32s")
"""Magic, version, zero, compressed bytes of the description and of the pages, SHA-256 of both."""

MAX_FILE = 64 << 20
"""Bytes of a file that is accepted; one process takes well under 2 MiB."""

MAX_DESCRIPTION = 256 << 20
MAX_PAGES = 512 << 20
"""Bytes of the two parts when unpacked: a small file must not fill the memory."""

MIN_SAMPLES = 2
"""One sample says nothing about progress."""

_OF_THE_KERNEL = ("time_ns", "wall_ns", "run_state", "cpu_time_ns", "context_switches", "run_queue_wait_ns", "cpu_limit")
"""Facts that a sample takes from the kernel, not from memory."""

_MEANINGLESS = (
    KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, lzma.LZMAError, LayoutError, RecursionError,
    msgspec.MsgspecError,
)  # fmt: skip
"""What taking a description apart raises that is none."""


@dataclass(frozen=True, slots=True)
class RecordedSample:
    """One sample as recorded: pages by address, the communicators that were found, and what the kernel said.

    ``torn`` and ``truncated`` are those of the live sample: decoding stable pages again cannot find them.
    """

    facts: ProcessFacts
    duration_ns: int
    found: dict[int, str]
    pages: dict[int, bytes]
    torn: int = 0
    truncated: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedProcess:
    """One process as recorded."""

    info: ProcessInfo
    layout: Layout
    load_bias: int | None
    mappings: tuple[Mapping, ...]
    samples: tuple[RecordedSample, ...]

    def decode(self) -> list[ProcessSample]:
        """The samples, by the code that reads live processes. Where nothing was written in between, which is so of whoever hangs,
        the sample before holds, at another time.
        """
        decoded: list[ProcessSample] = []
        for number, sample in enumerate(self.samples):
            before = self.samples[number - 1] if number else None
            if before is not None and (before.pages, before.found) == (sample.pages, sample.found):
                told = {name: getattr(sample.facts, name) for name in _OF_THE_KERNEL}
                decoded.append(replace(decoded[-1], **told, **_as_recorded(sample)))
            else:
                decoded.append(self._decode(sample))
        return decoded

    def _decode(self, sample: RecordedSample) -> ProcessSample:
        sampler = Sampler(ImageReader(sample.pages, self.mappings), self.layout, self.load_bias, keep=False)
        sampler.expect(sample.found)
        return replace(sampler.sample(self.info, sample.facts), **_as_recorded(sample))


def _as_recorded(sample: RecordedSample) -> dict[str, Any]:
    """What decoding stable pages cannot find again."""
    return {"duration_ns": sample.duration_ns, "torn": sample.torn, "truncated": sample.truncated}


def record_snapshot(pids: Sequence[int], path: Path | str, samples: int = 2, interval: float = 1.0) -> None:
    """Read the processes ``samples`` times, ``interval`` seconds apart, and write the file (mode 0600, all of it or nothing).

    A process that goes away in the middle keeps its samples and gets one more with run state ``X``. Raises what opening a
    process raises, and :class:`UsageError` when the file cannot be written.
    """
    # Late, because live targets need more of the machine than reading a file does.
    from ncclwatch.target.session import TargetProcess

    if not pids or samples < MIN_SAMPLES:
        raise UsageError(f"a snapshot needs a process and at least {MIN_SAMPLES} samples", "give --pid PID")
    targets: list[TargetProcess] = []
    try:
        targets += [TargetProcess.open(pid, recording=True) for pid in dict.fromkeys(pids)]
        recorded: list[list[RecordedSample]] = [[] for _ in targets]
        for number in range(samples):
            begin = time.monotonic()
            for target, done in zip(targets, recorded, strict=True):
                if not done or done[-1].facts.run_state != "X":
                    done.append(_record(target))
            if number + 1 < samples:
                time.sleep(max(0.0, begin + interval - time.monotonic()))
        processes = [
            RecordedProcess(target.info, target.layout, target.load_bias, tuple(target.mappings()), tuple(done))
            for target, done in zip(targets, recorded, strict=True)
        ]
    finally:
        for target in targets:
            target.close()
    write_image(processes, Path(path))


def _record(target: Any) -> RecordedSample:
    try:
        sample, pages, found = target.record()
    except TargetGoneError:
        return RecordedSample(ProcessFacts(time.monotonic_ns(), time.time_ns(), "X"), 0, {}, {})
    facts = ProcessFacts(
        sample.time_ns, sample.wall_ns, sample.run_state, sample.cpu_time_ns, sample.context_switches,
        run_queue_wait_ns=sample.run_queue_wait_ns, cpu_limit=sample.cpu_limit,
    )  # fmt: skip
    return RecordedSample(facts, sample.duration_ns, found, pages, sample.torn, sample.truncated)


def load_snapshot(path: Path | str) -> list[list[ProcessSample]]:
    """Per process, its samples in order of time. Raises :class:`TargetError` for a file that is damaged, foreign or too new."""
    return [process.decode() for process in read_image(Path(path))]


def is_snapshot(path: Path | str) -> bool:
    """Whether a file begins like a snapshot."""
    try:
        with Path(path).open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


# -- the file --------------------------------------------------------------------------------------------------------------------


def write_image(processes: Sequence[RecordedProcess], path: Path) -> None:
    """Write a file so that it is complete or not there, readable by its owner only."""
    store: dict[bytes, int] = {}
    layouts: list[Layout] = []
    described = [_describe(process, store, layouts) for process in processes]
    description = {
        "tool": __version__,
        "processes": described,
        "layouts": [layout.to_json() for layout in layouts],
        "page_size": BLOCK,
    }
    packed_description = lzma.compress(json.dumps(description, separators=(",", ":")).encode())
    packed_pages = lzma.compress(b"".join(store))
    digest = hashlib.sha256(packed_description + packed_pages).digest()
    header = HEADER.pack(MAGIC, VERSION, 0, len(packed_description), len(packed_pages), digest)
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            try:
                file.write(header + packed_description + packed_pages)
                file.flush()
                os.fsync(file.fileno())
                temporary.rename(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    except OSError as error:
        raise UsageError(f"cannot write {path} ({error.strerror})", "name a file in a folder that you may write to") from None


def read_image(path: Path) -> list[RecordedProcess]:
    """Read a file back; raises :class:`TargetError` with one line for whatever is wrong with it."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as error:
        raise TargetError(f"cannot read {path} ({error.strerror})", "name a file that 'ncclwatch snapshot' wrote") from None
    if len(data) < HEADER.size or not data.startswith(MAGIC):
        raise TargetError(f"{path} is no ncclwatch snapshot", "make one with 'ncclwatch snapshot --pid PID -o FILE'")
    _, version, _, description_size, pages_size, digest = HEADER.unpack_from(data)
    if version != VERSION:
        raise TargetError(f"{path} is of snapshot version {version}, this ncclwatch reads {VERSION}", "use a matching ncclwatch")
    body = memoryview(data)[HEADER.size :]
    if len(body) != description_size + pages_size or hashlib.sha256(body).digest() != digest:
        raise TargetError(f"{path} is damaged or incomplete", "copy it again or record it again")
    try:
        description = msgspec.json.decode(_unpack(body[:description_size], MAX_DESCRIPTION), type=_Description)
        pages = _unpack(body[description_size:], MAX_PAGES)
        return _processes(description, pages)
    except _MEANINGLESS as error:
        raise TargetError(
            f"{path} cannot be understood ({type(error).__name__})", "record it again with this ncclwatch"
        ) from None


class _Description(msgspec.Struct):
    """The first part of a file. Layouts stay text: files of one job carry the same ones, and each is taken apart once."""

    page_size: int
    layouts: list[msgspec.Raw]
    processes: list[dict[str, Any]]


@lru_cache(maxsize=64)
def _layout(text: bytes) -> Layout:
    """The layout that is written so; what is compiled for one of them then serves every file that has it."""
    return Layout.from_json(msgspec.json.decode(text))


def _unpack(data: memoryview, limit: int) -> bytes:
    unpacker = lzma.LZMADecompressor(format=lzma.FORMAT_XZ)
    unpacked = unpacker.decompress(data, max_length=limit)
    if not unpacker.eof:
        raise ValueError("larger than any snapshot, or cut off")
    return unpacked


def _describe(process: RecordedProcess, store: dict[bytes, int], layouts: list[Layout]) -> dict[str, Any]:
    if process.layout not in layouts:
        layouts.append(process.layout)
    return {
        "info": asdict(process.info),
        "layout": layouts.index(process.layout),
        "load_bias": process.load_bias,
        "maps": [[m.start, m.end, m.perms, m.offset, m.dev, m.inode, m.path] for m in process.mappings],
        "samples": [
            {
                "facts": asdict(sample.facts),
                "duration_ns": sample.duration_ns,
                "found": [[address, how] for address, how in sample.found.items()],
                "torn": sample.torn,
                "truncated": list(sample.truncated),
                "pages": [[address, store.setdefault(page, len(store))] for address, page in sorted(sample.pages.items())],
            }
            for sample in process.samples
        ],
    }


def _processes(description: _Description, pages: bytes) -> list[RecordedProcess]:
    if description.page_size != BLOCK or len(pages) % BLOCK:
        raise ValueError("page size")
    layouts = [_layout(bytes(layout)) for layout in description.layouts]
    return [
        RecordedProcess(
            info=_info(process["info"]),
            layout=layouts[_index(process["layout"], len(layouts))],
            load_bias=None if process["load_bias"] is None else int(process["load_bias"]),
            mappings=tuple(_mapping(row) for row in process["maps"]),
            samples=tuple(_sample(sample, pages) for sample in process["samples"]),
        )
        for process in description.processes
    ]


def _sample(data: Any, pages: bytes) -> RecordedSample:
    count = len(pages) // BLOCK
    return RecordedSample(
        facts=_facts(dict(data["facts"])),
        duration_ns=int(data["duration_ns"]),
        found={int(address): str(how) for address, how in data["found"]},
        torn=int(data["torn"]),
        truncated=tuple(str(line) for line in data["truncated"]),
        pages={int(address): pages[_index(number, count) * BLOCK : (number + 1) * BLOCK] for address, number in data["pages"]},
    )


def _index(value: Any, count: int) -> int:
    if not isinstance(value, int) or not 0 <= value < count:
        raise ValueError("index")
    return value


def _facts(data: dict[str, Any]) -> ProcessFacts:
    limit = data.pop("cpu_limit", None)  # files written before it was read have none
    known = None if limit is None else CpuLimit(int(limit["periods"]), int(limit["throttled"]), int(limit["group"]))
    return ProcessFacts(cpu_limit=known, **{name: _number_or_text(value) for name, value in data.items()})


def _number_or_text(value: Any) -> Any:
    if value is not None and not isinstance(value, int | str):
        raise ValueError("fact")
    return value


def _mapping(row: Any) -> Mapping:
    start, end, perms, offset, dev, inode, name = row
    if not 0 <= int(start) < int(end) <= 1 << 64 or len(perms) != len("rwxp"):
        raise ValueError("mapping")
    return Mapping(int(start), int(end), str(perms), int(offset), int(dev), int(inode), str(name))


def _info(data: Any) -> ProcessInfo:
    fields = dict(data)
    version = fields.pop("version")
    return ProcessInfo(
        key=ProcessKey(**fields.pop("key")),
        command=tuple(str(word) for word in fields.pop("command")),
        version=None if version is None else (int(version[0]), int(version[1]), int(version[2])),
        version_source=VersionSource(fields.pop("version_source")),
        # Snapshots of earlier releases have none.
        traits=None if (found := fields.pop("traits", None)) is None else msgspec.convert(found, Traits),
        **fields,
    )
