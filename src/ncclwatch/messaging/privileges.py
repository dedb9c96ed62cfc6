"""Giving up privileges once an agent has started: what it keeps, it needs for what it does from then on.

Kept: CAP_SYS_PTRACE (memory and /proc of other users' processes), CAP_DAC_READ_SEARCH (their files: libraries, environment),
CAP_PERFMON and CAP_BPF (attaching to libraries of processes that come later), CAP_NET_ADMIN (sockets and NICs of other network
namespaces: sock_diag shows TCP details to it only), and CAP_SYS_ADMIN only where the kernel insists on it for uprobes (the stable
kernels of 2025 do for perf-based ones) or for reading other namespaces. Everything else is dropped from every set of every thread
to come, and the process can gain nothing by exec.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import stat
import struct
from pathlib import Path

from ncclwatch.errors import PrivilegeError, UsageError
from ncclwatch.target.machine import SYS_PERF_EVENT_OPEN, this_machine
from ncclwatch.text import clean

# include/uapi/linux/capability.h
CAPABILITIES = {
    "CAP_DAC_READ_SEARCH": 2,
    "CAP_NET_ADMIN": 12,
    "CAP_SYS_PTRACE": 19,
    "CAP_SYS_ADMIN": 21,
    "CAP_PERFMON": 38,
    "CAP_BPF": 39,
}
KEPT = ("CAP_SYS_PTRACE", "CAP_DAC_READ_SEARCH", "CAP_PERFMON", "CAP_BPF", "CAP_NET_ADMIN")
_LAST = 63
_PR_SET_KEEPCAPS, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 8, 24, 38, 47, 4
_VERSION_3 = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def drop_privileges(user: str | None = None, folder: Path | None = None) -> str:
    """Keep only what the agent needs, for this thread and those it starts; optionally become another user.

    ``folder`` (the spool) is given to that user. Returns a line that says what was kept. A process that is not root keeps what it
    has of the list.
    """
    has = effective()
    if user is not None:
        _become(user, folder)
    if not has:
        return "privileges: none to give up"
    admin = "CAP_SYS_ADMIN" in _names(has) and not uprobes_without_admin()
    wanted = [*KEPT, *(["CAP_SYS_ADMIN"] if admin else [])]
    kept = sum(1 << CAPABILITIES[name] for name in wanted) & has
    _drop_bounding(kept)
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    _set(kept)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    names = ", ".join(name.removeprefix("CAP_") for name in _names(kept))
    why = " (SYS_ADMIN because this kernel wants it for uprobes)" if kept & 1 << CAPABILITIES["CAP_SYS_ADMIN"] else ""
    return f"privileges kept: {names}{why}" + (f", as user {clean(user, 40)}" if user else "")


def effective() -> int:
    """The effective capabilities of this process, one bit each."""
    try:
        text = Path("/proc/self/status").read_text("ascii")
    except OSError:
        return 0
    line = next((line for line in text.splitlines() if line.startswith("CapEff:")), "CapEff: 0")
    return int(line.split()[1], 16)


def _names(mask: int) -> list[str]:
    return [name for name, number in CAPABILITIES.items() if mask >> number & 1]


def _become(user: str, folder: Path | None) -> None:
    try:
        entry = pwd.getpwnam(user)
    except KeyError as error:
        raise UsageError(f"there is no user '{clean(user, 40)}'", "choose another with --user") from error
    try:
        if folder is not None:
            _give(folder, entry.pw_uid, entry.pw_gid)
        _libc.prctl(_PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setgroups([])
        os.setresgid(entry.pw_gid, entry.pw_gid, entry.pw_gid)
        os.setresuid(entry.pw_uid, entry.pw_uid, entry.pw_uid)
    except OSError as error:
        raise PrivilegeError(f"cannot become user '{clean(user, 40)}': {error.strerror}", "start the agent as root") from error


def _give(folder: Path, uid: int, gid: int) -> None:
    """The folder and the plain files in it: who has had it before may have put in a link to somebody else's."""
    os.chown(folder, uid, gid)
    for path in folder.glob("*"):
        try:
            file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            about = os.fstat(file)
            if stat.S_ISREG(about.st_mode) and about.st_nlink == 1:
                os.fchown(file, uid, gid)
        finally:
            os.close(file)


def _drop_bounding(kept: int) -> None:
    for number in range(_LAST + 1):
        if not kept >> number & 1:
            # Of a number the kernel does not know it says EINVAL, which is as good.
            _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)


def _set(kept: int) -> None:
    header = struct.pack("<Ii", _VERSION_3, 0)
    low, high = kept & 0xFFFFFFFF, kept >> 32
    data = struct.pack("<6I", low, low, 0, high, high, 0)
    if _libc.capset(header, data) != 0:
        raise PrivilegeError(f"cannot give up privileges: {os.strerror(ctypes.get_errno())}", "run 'ncclwatch doctor'")


def uprobes_without_admin() -> bool:
    """Whether this kernel opens a perf-based uprobe with CAP_PERFMON alone; tried in a child, on a library of our own."""
    try:
        kind = int(Path("/sys/bus/event_source/devices/uprobe/type").read_text("ascii"))
    except (OSError, ValueError):
        return False
    child = os.fork()
    if child == 0:
        status = 1
        try:
            kept = sum(1 << CAPABILITIES[name] for name in KEPT)
            _set(kept & effective())
            status = 0 if _open_uprobe(kind) else 1
        finally:
            os._exit(status)
    _, code = os.waitpid(child, 0)
    return code == 0


def _open_uprobe(kind: int) -> bool:
    path = ctypes.create_string_buffer(os.fsencode("/proc/self/exe"))
    # struct perf_event_attr of 128 bytes: type, size, config, …, config1 at 56 (path), config2 at 64 (offset); include/uapi.
    attribute = bytearray(128)
    struct.pack_into("<II", attribute, 0, kind, 128)
    struct.pack_into("<QQ", attribute, 56, ctypes.addressof(path), 0x1000)
    buffer = ctypes.create_string_buffer(bytes(attribute), 128)
    machine = this_machine()
    if machine is None:
        return False
    number = SYS_PERF_EVENT_OPEN[machine]
    opened = _libc.syscall(ctypes.c_long(number), buffer, ctypes.c_int(-1), ctypes.c_int(0), ctypes.c_int(-1), ctypes.c_ulong(0))
    if opened < 0:
        # Anything but a refusal means that the permission check was passed.
        return ctypes.get_errno() not in (1, 13)
    os.close(opened)
    return True
