"""Files: recordings, snapshots, segments of a spool, keys and tokens, settings, and the ELF file of a target."""

from __future__ import annotations

import atexit
import hashlib
import importlib
import json
import lzma
import os
import random
import shutil
import signal
import tempfile
import zlib
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

from fuzz.harness import Target, scratch_file
from fuzz.mutate import of_bytes, of_json, of_lines, of_packed, of_parts, pack, parts
from fuzz.targets.messages import _bodies
from ncclwatch.cli import stated_layout
from ncclwatch.messaging import packing
from ncclwatch.messaging.keys import make_key, read_key
from ncclwatch.messaging.spool import Spool
from ncclwatch.pathprobe.token import read_token
from ncclwatch.probes import site_cache
from ncclwatch.slow_modes import SlowRule
from ncclwatch.store import container
from ncclwatch.store.replay import Recordings, Replay
from ncclwatch.target import dwarf, image
from ncclwatch.target.dwarf import find_symbols
from ncclwatch.target.elf import ElfFile
from ncclwatch.target.layout import Layout, LayoutError

ROOT = Path(__file__).parents[3]
FIXTURES = ROOT / "tests" / "fixtures"


def targets() -> list[Target]:
    """All of this module."""
    return [
        Target(
            "recording",
            "a recording: container, frames, batches",
            _recordings,
            _recording,
            of_parts(_of_frame),
            1 << 15,
            quick=80,
        ),
        Target("recording-raw", "a recording as bytes", _raw_recordings, _raw_recording, of_bytes, 1 << 14, quick=80),
        Target(
            "snapshot", "the description in a snapshot, decoded to samples", _snapshots, _snapshot, of_json, 1 << 18, quick=20
        ),
        Target("snapshot-raw", "a snapshot as bytes", _raw_snapshots, _raw_snapshot, of_bytes, 1 << 16, quick=40),
        Target("spool", "a segment that an earlier agent left", _segments, _segment, of_bytes, 1 << 12, quick=80),
        Target("settings", "keys, tokens, stated layouts, remembered sites", _settings, _setting, of_parts(_of_text), 1 << 12),
        Target("layout", "structures as the child reads them from DWARF", _layouts, _layout, of_json, 1 << 14),
        Target("dwarf", "debug information, read by drgn in a child", _elves, _dwarf, _of_debug, 1 << 15, quick=15),
        Target("elf", "an ELF file: sections, symbols, notes, code", _elves, _elf, of_bytes, 1 << 15, quick=60),
    ]


# --- recordings --------------------------------------------------------------------------------------------------------


def _recordings() -> list[bytes]:
    """Parts: a byte of kind, one of flags, then the payload; a batch as its body."""
    meta = json.dumps({"host": "b", "version": 1}).encode()
    found = []
    for stream in _bodies():
        batches = [bytes([container.Kind.BATCH, part[0]]) + part[1:] for part in parts(stream)]
        gap, end = b'{"dropped": 3}', b'{"reason": "over"}'
        found.append(
            pack(
                [
                    bytes([container.Kind.META, 0]) + meta,
                    *batches,
                    bytes([container.Kind.GAP, 0]) + gap,
                    bytes([container.Kind.END, 0]) + end,
                ]
            )
        )
    return found


def _of_frame(data: bytes, source: random.Random) -> bytes:
    if len(data) < 2 or source.random() < 0.1:
        return of_bytes(data, source)
    return data[:2] + (of_packed if data[0] == container.Kind.BATCH else of_json)(data[2:], source)


def _recording(data: bytes) -> None:
    written = [container.pack_header(container.Header(0, 0, 1))]
    for number, part in enumerate(parts(data, 8)):
        kind, flags, payload = part[0] if part else 0, part[1] if len(part) > 1 else 0, part[2:]
        if kind == container.Kind.BATCH:
            payload = packing.frame(payload, key=bool(flags & 1), level=0)
        written.append(container.pack_frame(kind, payload, segment=flags >> 4, time_ns=10**9 * (number + 1), key=bool(flags & 1)))
    with scratch_file(b"".join(written)) as path:
        _replay(path)


def _replay(path: Path) -> None:
    with Recordings([path]) as recordings:
        replay = Replay(recordings, SlowRule())
        for _time_ns, update in replay.updates():
            repr(update.verdict)
        replay.about(), recordings.problems


@cache
def _raw() -> bytes:
    data = (FIXTURES / "stopped-8-ranks.recording").read_bytes()
    return data[: 1 << 13]


def _raw_recordings() -> list[bytes]:
    ring = container.pack_header(container.Header(512, 4, 1)).ljust(64 + 2048, b"\0")
    frame = container.pack_frame(container.Kind.META, b'{"host": "b"}', segment=3, time_ns=1, key=True)
    batch = container.pack_frame(container.Kind.BATCH, packing.frame(b"\x80", key=True), segment=3, time_ns=2, key=True)
    return [_raw(), ring[:64] + (frame + batch).ljust(512, b"\0") + ring[576:]]


def _raw_recording(data: bytes) -> None:
    # The header's checksum is put right, or nothing behind it would ever be read.
    size = container.HEADER_BYTES
    if len(data) >= size and data[0] != 0:
        data = data[: size - 4] + zlib.crc32(data[: size - 4]).to_bytes(4, "little") + data[size:]
    with scratch_file(data) as path, Recordings([path]) as recordings:
        for _ in recordings.batches():
            pass


# --- snapshots ---------------------------------------------------------------------------------------------------------


@cache
def _snapshot_parts() -> tuple[bytes, bytes]:
    """(description, packed pages) of the smallest fixture."""
    data = min((path.read_bytes() for path in FIXTURES.glob("hung-*.ncclwatch")), key=len)
    _, _, _, size, _, _ = image.HEADER.unpack_from(data)
    body = data[image.HEADER.size :]
    return lzma.decompress(body[:size]), body[size:]


def _snapshots() -> list[bytes]:
    """The description without the structures that the decoder never asks for, so that it fits."""
    tree = json.loads(_snapshot_parts()[0])
    tree["processes"] = tree["processes"][:1]
    for process in tree["processes"]:
        process["samples"] = process["samples"][:2]
        process["maps"] = process["maps"][:60]
    return [json.dumps(tree, separators=(",", ":")).encode()]


def _snapshot(data: bytes) -> None:
    pages = _snapshot_parts()[1]
    packed = lzma.compress(data, preset=0)
    digest = hashlib.sha256(packed + pages).digest()
    with scratch_file(image.HEADER.pack(image.MAGIC, image.VERSION, 0, len(packed), len(pages), digest) + packed + pages) as path:
        for samples in image.load_snapshot(path):
            repr(samples)


def _raw_snapshots() -> list[bytes]:
    return [min((path.read_bytes() for path in FIXTURES.glob("hung-*.ncclwatch")), key=len)]


def _raw_snapshot(data: bytes) -> None:
    size = image.HEADER.size
    if len(data) > size and data[-1] % 2:
        data = data[: size - 32] + hashlib.sha256(data[size:]).digest() + data[size:]
    with scratch_file(data) as path:
        image.load_snapshot(path)


# --- small files -------------------------------------------------------------------------------------------------------


@cache
def _folder() -> Path:
    folder = tempfile.mkdtemp(prefix="ncclwatch-fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _segments() -> list[bytes]:
    folder = _folder() / "made"
    spool = Spool("LIFE", folder)
    for number in range(3):
        spool.append(number, b"batch %d" % number, relevant=number == 1)
    spool.close()
    return [path.read_bytes() for path in sorted(folder.glob("*.seg"))][-1:]


def _segment(data: bytes) -> None:
    folder = _folder() / "left"
    folder.mkdir(exist_ok=True)
    (folder / "OLD-00000000.seg").write_bytes(data)
    spool = Spool("NEW", folder)
    for entry in spool.after(0):
        assert len(entry.data) <= len(data)
    spool.append(0, b"x", relevant=True)
    for life in spool.lives:
        spool.acknowledge(life, 1 << 62)
    spool.close()
    for path in folder.iterdir():
        path.unlink()


def _settings() -> list[bytes]:
    key = make_key("agent", "agent")
    sites = [[1, "ncclAllReduce", "", ["entry", 4096, 4096, "push rbp", "55", "cheap"]]]
    return [
        pack([b"key", key.text(secret=True).encode()]),
        pack([b"token", b"abcdef0123456789\n"]),
        pack([b"stated", b'{"tp": 2, "pipeline_model_parallel_size": 4, "dp": 1}']),
        pack([b"command", b"python\0train.py\0--tensor-model-parallel-size\0" + b"2\0--pp=4"]),
        pack([b"sites", json.dumps(sites).encode()]),
    ]


def _of_text(data: bytes, source: random.Random) -> bytes:
    return (of_json if data[:1] in (b"{", b"[") else of_lines)(data, source)


def _setting(data: bytes) -> None:
    kind, content = [*parts(data), b"", b""][:2]
    path = _folder() / "setting"
    path.write_bytes(content)
    path.chmod(0o600)
    if kind == b"key":
        read_key(path, secret=True)
        read_key(path)
    elif kind == b"token":
        read_token(path)
    elif kind == b"stated":
        stated_layout.from_file(path)
    elif kind == b"command":
        stated_layout.from_command(content.decode("utf-8", "replace").split("\0"))
    elif kind == b"sites":
        try:
            site_cache._from_json(json.loads(content))
        except (ValueError, RecursionError):
            return  # the cache of images takes no such file: its own reader says so


def _layouts() -> list[bytes]:
    tree = json.loads(_snapshot_parts()[0])["layouts"][0]
    for name in list(tree["structs"]):
        if name not in ("ncclComm", "ncclChannel", "ncclProxyArgs", "ncclProxySubArgs"):
            del tree["structs"][name]
    return [json.dumps(tree).encode()[: 1 << 14], json.dumps(_small(tree)).encode()]


def _small(tree: Any) -> Any:
    return {**tree, "structs": {name: tree["structs"][name] for name in list(tree["structs"])[:2]}}


def _layout(data: bytes) -> None:
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return  # whoever reads such a file says so: see the targets "snapshot" and "settings"
    layout = Layout.from_json(tree)
    for path in ("ncclComm.rank", "ncclComm.channels[1].ring.prev", "ncclProxyArgs.subs[7].posted"):
        layout.has(path)


# --- ELF ---------------------------------------------------------------------------------------------------------------


@cache
def _elf_seed() -> bytes:
    return (Path(__file__).parent / "tiny.elf").read_bytes()


def _elves() -> list[bytes]:
    return [_elf_seed()]


def _elf(data: bytes) -> None:
    with scratch_file(data) as path, ElfFile.open(path) as elf:
        _ = elf.segments, elf.sections, elf.build_id, elf.has_debug_info, elf.is_stripped, elf.static_names_size
        elf.exported("ncclAllReduce")
        elf.exports("nccl.*")
        elf.versions("ncclGetVersion")
        elf.find("sendProxyProgress", "net.cc")
        elf.symbols("nccl[A-Z].*")
        elf.parts("ncclAllReduce")
        elf.load_bias(0x7F0000000000, 0)
        elf.address_at(4096)
        find_symbols(elf)
        _code(elf)


def _code(elf: ElfFile) -> None:
    from ncclwatch.probes.sites import find_sites
    from ncclwatch.target.version import find_version

    find_version(elf)
    find_sites(elf)


def _of_debug(data: bytes, source: random.Random) -> bytes:
    """Mostly the debug sections, which lie behind the code."""
    middle = len(data) // 3
    return data[:middle] + of_bytes(data[middle:], source) if source.random() < 0.8 else of_bytes(data, source)


CHILD_S = 5
"""CPU time that the child may take for a library of 28 KB; its own limit is :data:`ncclwatch.target.dwarf.TIMEOUT_S`."""


def _dwarf(data: bytes) -> None:
    """As :func:`ncclwatch.target.dwarf.extract`, with a child that is forked: to start one takes 0.4 s."""
    with scratch_file(data) as path, ElfFile.open(path) as elf, mock.patch.object(dwarf, "_run_child", _forked):
        layout = dwarf.extract(elf, None)
        for name in layout.structs:
            layout.size(name)


def _forked(elf: ElfFile) -> Any:
    importlib.import_module("drgn")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        _be_the_child(elf, writing)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        said = file.read(dwarf.MAX_OUTPUT)
    _, status, used = os.wait4(child, 0)
    assert used.ru_utime + used.ru_stime < CHILD_S, f"{used.ru_utime:.1f} s in the child"
    if status:
        raise LayoutError("the child says that this cannot be read, or has crashed")
    return json.loads(said)


def _be_the_child(elf: ElfFile, writing: int) -> None:
    """What it makes of the file, whatever that is; never returns."""
    status = 1
    try:
        signal.setitimer(signal.ITIMER_PROF, 0)
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 2)
        os.write(writing, json.dumps(dwarf.types_of(elf.fd)).encode())
        status = 0
    finally:
        os._exit(status)
