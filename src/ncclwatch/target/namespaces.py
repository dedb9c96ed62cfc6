"""Targets in containers: their ids, their pids, and their files opened without entering a namespace.

A file is opened through the mapping itself (``/proc/PID/map_files``), which is right in any mount namespace and for deleted
files, else below ``/proc/PID/root`` with symbolic links kept inside of it. The agent never calls setns: it is threaded, and a
target's root is not to be trusted with the agent's process.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import stat
from pathlib import Path

from ncclwatch.errors import NcclwatchError, PrivilegeError, TargetError
from ncclwatch.target.maps import PROC, Mapping, read_bounded

_SYS_OPENAT2 = 437  # Linux 5.6; the same number everywhere
_RESOLVE_IN_ROOT = 0x10
_RESOLVE_NO_MAGICLINKS = 0x02
_AT_FDCWD = -100
OPEN_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
"""How every file of a target is opened: nothing blocks, nothing is inherited."""

# Docker, containerd, CRI-O, Podman and the kubelet all put a 64-digit id into the path; LXC, nspawn and Enroot put a name.
_LONG_ID = re.compile(r"(?<![0-9a-f])([0-9a-f]{64})(?![0-9a-f])")
_NAMED = re.compile(r"/(?:lxc(?:\.payload)?[./]|machine\.slice/machine-)([\w.@\\-]+?)(?:\.service|\.scope)?(?:/|$)")
_MOUNTED_ID = re.compile(r"/(?:containers|overlay-containers|sandboxes)/([0-9a-f]{64})/")
_MAX_TEXT = 4 << 20


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)


def container_id(pid: int, proc: Path = PROC) -> str:
    """The id (64 hexadecimal digits) or name of the container a process runs in; ``""`` outside of one or when it cannot be told.

    From the control group; where a cgroup namespace hides that, from the files that the engine mounts into the container.
    """
    for name, patterns in (("cgroup", (_LONG_ID, _NAMED)), ("mountinfo", (_MOUNTED_ID,))):
        try:
            text = os.fsdecode(read_bounded(proc / str(pid) / name, pid, _MAX_TEXT))
        except NcclwatchError:
            continue
        for pattern in patterns:
            # The last match: in nested engines the innermost group is the container.
            found = pattern.findall(text)
            if found:
                return str(found[-1])
    return ""


def namespace_id(pid: int, kind: str, proc: Path = PROC) -> int | None:
    """The inode of a namespace (``mnt``, ``pid``, ``net``, …) of a process, equal for all in it; ``None`` when it cannot be
    read.
    """
    try:
        return int((proc / str(pid) / "ns" / kind).readlink().name.partition("[")[2].rstrip("]"))
    except (OSError, ValueError):
        return None


def open_mapped(pid: int, mapping: Mapping, proc: Path = PROC) -> tuple[int, str]:
    """(descriptor, path that the agent can open again) of the file that a mapping shows.

    Raises :class:`TargetError` when the file cannot be reached any more, :class:`PrivilegeError` when only a privilege is
    missing.
    """
    through_map = f"{proc}/{pid}/map_files/{mapping.range_name}"
    through_root = f"{proc}/{pid}/root{mapping.file_path}"
    refused = False
    try:
        return _regular(os.open(through_map, OPEN_FLAGS)), through_map
    except OSError as error:
        # map_files needs CAP_CHECKPOINT_RESTORE or CAP_SYS_ADMIN in the first user namespace: the process's owner alone may not.
        refused = error.errno in (errno.EPERM, errno.EACCES)
    try:
        fd = _regular(open_below(f"{proc}/{pid}/root", mapping.file_path))
    except OSError as error:
        if refused or error.errno in (errno.EPERM, errno.EACCES):
            raise PrivilegeError(
                f"not allowed to open {mapping.path} of process {pid}", "run as root, or with CAP_SYS_PTRACE and CAP_SYS_ADMIN"
            ) from None
        raise TargetError(
            f"{mapping.path} of process {pid} cannot be opened ({error.strerror})", "was the file replaced?"
        ) from None
    # On overlay file systems the map may show the device of a lower layer: the inode decides.
    if os.fstat(fd).st_ino != mapping.inode:
        os.close(fd)
        raise TargetError(
            f"{mapping.path} of process {pid} was replaced since it was loaded",
            "run as root, so that the loaded file can be read",
        )
    return fd, through_root


def open_below(root: str, path: str) -> int:
    """Open a file for reading below a folder as if that were the root: symbolic links and ``..`` cannot leave it. Raises
    OSError.
    """
    root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        how = _OpenHow(OPEN_FLAGS, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
        name = os.fsencode(path.lstrip("/") or ".")
        fd = _libc.syscall(_SYS_OPENAT2, root_fd, ctypes.c_char_p(name), ctypes.byref(how), ctypes.sizeof(how))
        if fd < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), path)
        return int(fd)
    finally:
        os.close(root_fd)


def _regular(fd: int) -> int:
    """The descriptor, if it is of a regular file: a device or a pipe named like a library is not touched."""
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    raise OSError(errno.EINVAL, "not a regular file")
