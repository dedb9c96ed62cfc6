"""What forbids looking into a process: said where the kernel refuses, because "run as root" helps nobody who is root.

The kernel asks for ptrace access (ptrace(2), "Ptrace access mode checking"): the same user, or CAP_SYS_PTRACE in the user
namespace of the process, then what its security modules say. Each is looked at here in that order; the first that explains it is
named.
"""

from __future__ import annotations

import os
from pathlib import Path

_SYS_PTRACE = 19
_ALL_IDS = 4294967295
_SECCOMP_FILTER = 2


def hint(pid: int, proc: Path = Path("/proc"), *, euid: int | None = None) -> str:
    """What to do about a process that the kernel does not let this user read."""
    scope = _number(proc / "sys/kernel/yama/ptrace_scope")
    if scope == 3:
        return "kernel.yama.ptrace_scope is 3: nobody may, until the machine is booted with another"
    status = _fields(proc / "self/status")
    capable = bool(int(status.get("CapEff", "0") or "0", 16) >> _SYS_PTRACE & 1)
    root = (os.geteuid() if euid is None else euid) == 0
    if not capable and not root:
        restricted = " (kernel.yama.ptrace_scope restricts the same user too)" if scope else ""
        return f"run as root, or with CAP_SYS_PTRACE{restricted}"
    if not capable:
        return "root has no CAP_SYS_PTRACE here: start the container with --cap-add SYS_PTRACE, or the unit with that capability"
    if not _has_all_ids(proc):
        return "root of a user namespace may not look into a process outside of it: run as root of the machine, with --pid=host"
    module = _confined(proc)
    if module:
        return f"the security module confines this process ({module}): run it unconfined"
    if status.get("Seccomp") == str(_SECCOMP_FILTER):
        return "a seccomp filter of this process may forbid process_vm_readv: run it with --security-opt seccomp=unconfined"
    theirs = _fields(proc / str(pid) / "status")
    if _hides_processes(proc) and not theirs:
        return "/proc is mounted with hidepid: mount it without, or with the gid of this user"
    return "a security module of the kernel forbids it (see dmesg or the audit log for the refusal)"


def _number(file: Path) -> int | None:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _fields(file: Path) -> dict[str, str]:
    try:
        pairs = (line.partition(":") for line in file.read_text("utf-8", "replace").splitlines())
    except OSError:
        return {}
    return {name: value.strip() for name, _, value in pairs}


def _has_all_ids(proc: Path) -> bool:
    """Whether this is the initial user namespace: only there do all user ids mean themselves."""
    try:
        words = (proc / "self/uid_map").read_text().split()
    except OSError:
        return True
    return words == ["0", "0", str(_ALL_IDS)]


def _confined(proc: Path) -> str:
    try:
        text = (proc / "self/attr/current").read_text("utf-8", "replace").strip("\0\n ")
    except OSError:
        return ""
    return "" if not text or text.startswith("unconfined") or ":unconfined_t" in text or text == "kernel" else text[:80]


def _hides_processes(proc: Path) -> bool:
    try:
        lines = (proc / "self/mounts").read_text("utf-8", "replace").splitlines()
    except OSError:
        return False
    options = [word for line in lines if (words := line.split())[2:3] == ["proc"] for word in words[3].split(",")]
    return any(option.startswith("hidepid=") and option not in ("hidepid=0", "hidepid=off") for option in options)
