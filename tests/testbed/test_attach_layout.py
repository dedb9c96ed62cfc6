"""Layouts and discovery on real builds of NCCL: their debug information, stripped copies, containers, replaced files.

The libraries are those of the cache folder; a version that is not there is skipped, by name.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ncclwatch.model.state import VersionSource
from ncclwatch.target import dwarf, manifest
from ncclwatch.target.discover import examine, find_processes, layout_of
from ncclwatch.target.elf import ElfFile
from ncclwatch.target.layout import Layout
from ncclwatch.target.resolve import LayoutCache, resolve_layout
from ncclwatch.target.version import find_version
from testbed.job import Job, available, cache_folder, library

pytestmark = pytest.mark.attach

VERSIONS = ("2.19.3", "2.21.5", "2.27.5", "2.32.3")

# Maps a file the way the dynamic linker does, without running it: NCCL's constructors want a CUDA driver.
MAP = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
fd = os.open(sys.argv[1], os.O_RDONLY)
address = libc.mmap(None, os.fstat(fd).st_size & ~4095, 5, 2, fd, 0)  # PROT_READ | PROT_EXEC, MAP_PRIVATE
print(hex(address), flush=True)
time.sleep(120)
"""


def cached(version: str) -> Path:
    if not available(version):
        pytest.skip(f"NCCL {version} is not in {cache_folder()}")
    return library(version)


@pytest.fixture(scope="module", params=VERSIONS)
def real(request: pytest.FixtureRequest) -> Path:
    return cached(str(request.param))


def from_debug_info(path: Path) -> Layout:
    with ElfFile.open(path) as elf:
        version = find_version(elf)
        assert version is not None
        return dwarf.extract(elf, version.number)


@contextmanager
def mapped_by_a_process(*command: str) -> Iterator[int]:
    """A process that maps a file and sleeps; its pid."""
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline().startswith(b"0x")
        yield child.pid
    finally:
        child.kill()
        child.communicate()


def test_debug_information_and_manifest_agree(real: Path) -> None:
    layout = from_debug_info(real)
    known = manifest.load().by_build_id(layout.build_id)
    assert known is not None, "a wheel of PyPI"
    assert known.version == layout.version
    assert known.structs == layout.structs and known.enums == layout.enums and known.symbols == layout.symbols
    assert len(layout.structs) > 60 and len(layout.symbols) >= 18


def test_stripped_copy_is_known_by_its_build_id(real: Path, tmp_path: Path) -> None:
    stripped = tmp_path / "libnccl.so.2"
    subprocess.run(["strip", "-o", stripped, real], check=True)
    try:
        with ElfFile.open(stripped) as elf:
            assert not elf.has_debug_info and elf.is_stripped
            layout = resolve_layout(elf, cache=LayoutCache(tmp_path / "cache"))
        whole = from_debug_info(real)
        assert layout.source is VersionSource.BUILD_ID
        assert layout.structs == whole.structs and layout.symbols == whole.symbols
    finally:
        stripped.unlink()


def test_stripped_copy_without_build_id_is_known_by_its_version(real: Path, tmp_path: Path) -> None:
    stripped = tmp_path / "libnccl.so.2"
    subprocess.run(["objcopy", "--strip-all", "--remove-section=.note.gnu.build-id", real, stripped], check=True)
    try:
        with ElfFile.open(stripped) as elf:
            assert elf.build_id == ""
            layout = resolve_layout(elf, cache=LayoutCache(tmp_path / "cache"))
            exported = elf.exported("ncclAllReduce")
        whole = from_debug_info(real)
        assert (layout.source, layout.version, layout.build_id) == (VersionSource.VERSION, whole.version, "")
        assert layout.structs == whole.structs, "the only build of this version for this CUDA"
        assert "net.cc:sendProxyProgress" not in layout.symbols, "another build's addresses mean nothing"
        assert exported is not None
    finally:
        stripped.unlink()


def test_cache_gives_the_same_layout(real: Path, tmp_path: Path) -> None:
    cache = LayoutCache(tmp_path)
    with ElfFile.open(real) as elf:
        first, second = resolve_layout(elf, cache=cache), resolve_layout(elf, cache=cache)
    assert first.structs == second.structs and first.enums == second.enums and first.symbols == second.symbols
    assert len(list(tmp_path.iterdir())) == 1


def test_every_exported_call_is_there(real: Path) -> None:
    known = subprocess.run(["nm", "-D", "--defined-only", str(real)], check=True, capture_output=True, text=True).stdout
    names = {line.split()[2] for line in known.splitlines() if "nccl" in line}
    with ElfFile.open(real) as elf:
        exports = elf.exports(r"p?nccl[A-Z]\w*")
        assert {"ncclAllReduce", "pncclAllReduce", "ncclSend", "ncclGroupEnd", "ncclCommInitRankConfig"} <= set(exports)
        assert set(exports) == {name for name in names if name.removeprefix("p").startswith("nccl")}
        assert exports["ncclAllReduce"].address == exports["pncclAllReduce"].address


def test_a_process_in_its_own_mount_namespace(tmp_path: Path) -> None:
    """The target sees its library at a path that leads nowhere, or elsewhere, outside of its namespace."""
    real = cached("2.21.5")
    hidden = tmp_path / "opt"
    hidden.mkdir()
    (hidden / "libnccl.so.2").write_text("what the agent would see at that path")
    script = f"mount --bind {real.parent} {hidden} && exec {sys.executable} -c '{MAP}' {hidden}/libnccl.so.2"
    with mapped_by_a_process("unshare", "--mount", "sh", "-c", script) as pid:
        found = examine(pid)
        assert found.info.library == str(hidden / "libnccl.so.2") and found.info.version == (2, 21, 5)
        layout = layout_of(found, LayoutCache(tmp_path / "cache"))
        assert layout.size("ncclComm") == 16288
        address, size = layout.symbols["netTransport"]
        assert size > 0 and found.binary.bias + address > found.binary.base


def test_a_process_in_its_own_pid_namespace(tmp_path: Path) -> None:
    real = cached("2.21.5")
    command = ("unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", MAP, str(real))
    with mapped_by_a_process(*command) as launcher:
        (info,) = [
            info
            for info in find_processes()
            if info.command[-1] == str(real) and info.name.startswith("python") and info.pid_in_target == 1
        ]
        assert info.pid not in (1, launcher)


def test_a_library_that_was_replaced_while_the_job_runs(tmp_path: Path) -> None:
    """An upgrade under a running job: the loaded file is read, not the one that now has its name."""
    path = tmp_path / "libnccl.so.2"
    shutil.copyfile(cached("2.21.5"), path)
    with mapped_by_a_process(sys.executable, "-c", MAP, str(path)) as pid:
        path.unlink()
        path.symlink_to(cached("2.27.5"))
        found = examine(pid)
        assert found.info.version == (2, 21, 5) and found.binary.deleted
        assert layout_of(found, LayoutCache(tmp_path / "cache")).size("ncclComm") == 16288


def test_ranks_of_a_real_job(tmp_path: Path) -> None:
    """Every rank is found with its rank, and NCCL's own tables lie where symbols and load bias say."""
    cached("2.27.5")
    with Job(nccl="2.27.5", ranks=3) as job:
        found = {info.pid: info for info in find_processes() if info.pid in job.pids}
        assert [found[pid].rank for pid in job.pids] == [0, 1, 2]
        assert {info.version for info in found.values()} == {(2, 27, 5)}
        for pid in job.pids:
            process = examine(pid)
            layout = layout_of(process, LayoutCache(tmp_path / "cache"))
            with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
                for symbol, name in (("netTransport", b"NET\0"), ("shmTransport", b"SHM\0"), ("p2pTransport", b"P2P\0")):
                    memory.seek(process.binary.bias + layout.symbols[symbol][0] + layout.member("ncclTransport.name").offset)
                    assert memory.read(4) == name
