"""The memory map: its text, and the one of this process."""

from __future__ import annotations

import mmap
import os
import subprocess
from pathlib import Path

import pytest

from ncclwatch.errors import PrivilegeError, TargetGoneError
from ncclwatch.target.maps import mapping_at, parse_maps, read_bounded, read_maps

TEXT = b"""\
00400000-00452000 r-xp 00000000 08:02 173521                             /usr/bin/dbus daemon
7f00c5e00000-7f00c5e01000 rw-s 00002000 fd:1f 9007199254740993           /dev/shm/nccl-Ab3 (deleted)
7f00d0000000-7f00d0021000 rw-p 00000000 00:00 0
7f00e0000000-7f00e0021000 rw-p 00000000 00:00 0                          [heap]
7f00f0000000-7f00f0021000 r--p 00000000 00:05 12                         /odd\\012name
this is no mapping
7f0100000000-7f00f0021000 r--p 00000000 00:05 12                         /ends/before/it/starts
7f0110000000-7f0110001000 r--p
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]
"""


def test_every_kind_of_line() -> None:
    program, shared, anonymous, heap, odd, vsyscall = parse_maps(TEXT)
    assert (program.start, program.end, program.size) == (0x400000, 0x452000, 0x52000)
    assert (program.path, program.inode, program.dev) == ("/usr/bin/dbus daemon", 173521, os.makedev(8, 2))
    assert program.executable and program.readable and not program.writable and not program.shared and program.is_file
    assert program.range_name == "400000-452000"
    assert shared.shared and shared.writable and shared.is_deleted and shared.offset == 0x2000
    assert shared.file_path == "/dev/shm/nccl-Ab3" and shared.inode == 9007199254740993
    assert anonymous.path == "" and not anonymous.is_file and not anonymous.is_deleted
    assert heap.path == "[heap]"
    assert odd.path == "/odd\nname"
    assert vsyscall.end == 0xFFFFFFFFFF601000


def test_mapping_at() -> None:
    mappings = parse_maps(TEXT)
    for mapping in mappings:
        assert mapping_at(mappings, mapping.start) is mapping
        assert mapping_at(mappings, mapping.end - 1) is mapping
    assert mapping_at(mappings, 0x400000 - 1) is None
    assert mapping_at(mappings, 0x452000) is None
    assert mapping_at(mappings, 1 << 65) is None
    assert mapping_at((), 5) is None


def test_own_map_has_what_was_just_mapped(tmp_path: Path) -> None:
    path = tmp_path / "a file"
    path.write_bytes(bytes(3 * mmap.PAGESIZE))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ):
        (mapping,) = [m for m in read_maps(os.getpid()) if m.path == str(path)]
        assert mapping.size == 3 * mmap.PAGESIZE and mapping.inode == path.stat().st_ino and not mapping.writable
        path.unlink()
        (mapping,) = [m for m in read_maps(os.getpid()) if m.file_path == str(path)]
        assert mapping.is_deleted


def test_a_process_that_is_gone() -> None:
    process = subprocess.Popen(["true"])
    process.wait()
    with pytest.raises(TargetGoneError, match=f"process {process.pid} is gone"):
        read_maps(process.pid)


def test_zombies_have_no_map() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert read_maps(process.pid) == ()
    process.wait()


def test_what_the_kernel_refuses_names_the_capability(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(PrivilegeError, match=r"not allowed to read maps of process 42: .*CAP_SYS_PTRACE"):
        read_maps(42, tmp_path)


def test_reading_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 5000)
    assert len(read_bounded(tmp_path / "file", 1, 4096)) == 4096
