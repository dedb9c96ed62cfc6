"""A process whose memory map is locked, as a stuck file system or driver leaves it: ``ps`` hangs on it.

A file system of our own (FUSE, spoken here in its raw form: ``linux/fuse.h``) takes no writes. The victim maps its file, makes a
page dirty and maps something else over it: the kernel writes the page back under the victim's mmap lock, and waits for ever.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_INIT, _LOOKUP, _FORGET, _GETATTR, _OPEN, _READ, _WRITE, _OPENDIR, _FORGETS = 26, 1, 2, 3, 14, 15, 16, 27, 42
_PAGE, _ROOT, _FILE, _ENOSYS = 4096, 1, 2, 38
_MAP_SHARED, _MAP_OVER = 1, 0x32  # private, fixed, anonymous


def can_lock() -> bool:
    """Whether this machine lets us make such a process."""
    return os.geteuid() == 0 and Path("/dev/fuse").exists()


def serve(folder: str) -> None:
    """The file system, until it is killed."""
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0"
    if libc.mount(b"ncclwatch", folder.encode(), b"fuse", 0, options.encode()):
        raise OSError(ctypes.get_errno(), "mount")
    print("mounted", flush=True)
    while True:
        asked = os.read(device, 1 << 20)
        operation, unique, node = struct.unpack_from("<4xIQQ", asked)
        if operation in (_WRITE, _FORGET, _FORGETS):
            continue
        answer = _answer(operation, node)
        head = struct.pack("<IiQ", 16 + len(answer or b""), 0 if answer is not None else -_ENOSYS, unique)
        os.write(device, head + (answer or b""))


def _answer(operation: int, node: int) -> bytes | None:
    attributes = {
        number: struct.pack("<6Q3I7I", number, _PAGE, 8, 0, 0, 0, 0, 0, 0, mode, 1, 0, 0, 0, _PAGE, 0)
        for number, mode in ((_ROOT, 0o40755), (_FILE, 0o100644))
    }
    if operation == _INIT:
        return struct.pack("<IIIIHHI", 7, 31, 0, 0, 0, 0, 1 << 16) + bytes(40)
    if operation == _LOOKUP:
        return struct.pack("<QQQQII", _FILE, 0, 1000, 1000, 0, 0) + attributes[_FILE]
    if operation == _GETATTR:
        return struct.pack("<QII", 1000, 0, 0) + attributes[node]
    return {_OPEN: struct.pack("<QII", 1, 0, 0), _OPENDIR: struct.pack("<QII", 1, 0, 0), _READ: bytes(_PAGE)}.get(operation)


def be_stuck(file: str) -> None:
    """The victim: it does not come back."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    page = libc.mmap(None, _PAGE, 3, _MAP_SHARED, os.open(file, os.O_RDWR), 0)
    ctypes.memset(page, 1, _PAGE)
    libc.mmap(page, _PAGE, 3, _MAP_OVER, -1, 0)


@contextmanager
def mounted(folder: Path) -> Iterator[Path]:
    """The file that holds whoever is stuck in it. At the end its file system is killed, which lets all of them go."""
    server = subprocess.Popen([sys.executable, __file__, "serve", str(folder)], stdout=subprocess.PIPE)
    try:
        assert server.stdout is not None and server.stdout.readline() == b"mounted\n"
        yield folder / "file"
    finally:
        server.kill()
        server.wait()
        ctypes.CDLL(None).umount2(str(folder).encode(), 2)


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """The pid of such a process."""
    with mounted(folder) as file:
        victim = subprocess.Popen([sys.executable, __file__, "stuck", str(file)])
        wait_until_held(victim.pid)
        yield victim.pid
    victim.kill()
    victim.wait()


def wait_until_held(pid: int, seconds: float = 60.0) -> None:
    """Until a process sleeps with its memory map locked."""
    until = time.monotonic() + seconds
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "D":
        assert time.monotonic() < until, "it was not held"
        time.sleep(0.05)


if __name__ == "__main__":
    {"serve": serve, "stuck": be_stuck}[sys.argv[1]](sys.argv[2])
