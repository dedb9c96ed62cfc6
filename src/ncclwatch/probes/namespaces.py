"""Pid namespaces: how the numbers a BPF program sees relate to those the agent sees.

``bpf_get_current_pid_tgid`` gives the numbers of the initial namespace. Where ``/proc`` shows that one (the agent runs on the
host, or in a container with ``--pid=host``), they are the agent's. Elsewhere the program asks for the number in a given
namespace (``bpf_get_ns_current_pid_tgid``, Linux 5.7), which answers only for the very namespace a thread lives in.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ncclwatch.errors import PrivilegeError, TargetError, TargetGoneError
from ncclwatch.probes.map_layouts import CONFIG_DTYPE, MAX_NAMESPACES, PROCESS_DTYPE, Numbering

INITIAL_PID_NAMESPACE = 0xEFFFFFFC
"""``PROC_PID_INIT_INO`` (include/linux/proc_ns.h): the inode of the initial pid namespace on every kernel."""


@dataclass(frozen=True, slots=True)
class NamespaceId:
    """The identity of a namespace: device (in the kernel's encoding) and inode of its file in nsfs."""

    device: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> NamespaceId:
        """The namespace behind ``/proc/PID/ns/pid``; raises :class:`OSError`."""
        status = path.stat()
        return cls(os.major(status.st_dev) << 20 | os.minor(status.st_dev), status.st_ino)


@dataclass
class PidTranslation:
    """How BPF programs must number processes so that the agent knows whom they mean.

    The first of ``namespaces`` is the one that ``/proc`` shows to the agent; children of it are added as targets turn up in them.
    """

    proc: Path
    initial: bool
    namespaces: list[NamespaceId] = field(default_factory=list)

    @classmethod
    def detect(cls, proc: Path = Path("/proc")) -> PidTranslation:
        """Find out which namespace ``proc`` shows.

        It is the one of every process for which ``NSpid`` lists a single number: our own, mostly, else (``unshare --pid`` without
        a ``/proc`` of its own) some other's. Process 1 would be the natural witness, but it may have more privileges than we.
        """
        witnesses = [proc / "self"]
        try:
            if len(_pids(proc / "self/status")) > 1:
                witnesses = [entry for entry in proc.iterdir() if entry.name.isdigit()]
        except OSError as error:
            raise TargetError(f"cannot read {proc}/self/status: {error.strerror}", "mount proc") from None
        for witness in witnesses:
            try:
                if len(_pids(witness / "status")) == 1:
                    shown = NamespaceId.of(witness / "ns/pid")
                    return cls(proc, shown.inode == INITIAL_PID_NAMESPACE, [shown])
            except OSError:
                continue
        raise PrivilegeError("cannot tell which pid namespace /proc shows", "run as root")

    def key(self, pid: int) -> bytes:
        """``struct nw_process`` of a process, given its number in ``/proc``.

        Adds its namespace to the list when it is new (the programs must then be told, see :meth:`pack_config`). Raises
        :class:`TargetGoneError` when there is no such process, :class:`TargetError` when the list is full.
        """
        if self.initial:
            return process_key(0, pid)
        try:
            namespace = NamespaceId.of(self.proc / f"{pid}/ns/pid")
            if namespace == self.namespaces[0]:
                return process_key(0, pid)
            inner = _innermost_pid(self.proc / f"{pid}/status")
        except (FileNotFoundError, ProcessLookupError):
            raise TargetGoneError(f"process {pid} is gone", "attach to a running process") from None
        except PermissionError:
            raise PrivilegeError(f"cannot read the namespaces of process {pid}", "run as root") from None
        if namespace not in self.namespaces:
            if len(self.namespaces) >= MAX_NAMESPACES:
                raise TargetError(
                    f"process {pid} lives in one more pid namespace than the {MAX_NAMESPACES} that can be watched from here",
                    "run ncclwatch in the host's pid namespace (--pid=host)",
                )
            self.namespaces.append(namespace)
        return process_key(self.namespaces.index(namespace), inner)

    def pack_config(self, *, watch_all: bool, every_exec: bool) -> bytes:
        """``struct nw_config``."""
        row = np.zeros((), CONFIG_DTYPE)
        row["numbering"] = Numbering.INIT if self.initial else Numbering.NAMESPACE
        row["namespaces"] = len(self.namespaces)
        row["all"] = watch_all
        row["every_exec"] = every_exec
        for index, namespace in enumerate(self.namespaces):
            row["namespace_list"][index] = (namespace.device, namespace.inode)
        return row.tobytes()

    def find(self, namespace_index: int, pid: int) -> int | None:
        """The number in ``/proc`` of a process that a program named by its namespace's; ``None`` when it is gone."""
        if namespace_index == 0:
            return pid
        if namespace_index >= len(self.namespaces):
            return None
        wanted = self.namespaces[namespace_index]
        for entry in self.proc.iterdir():
            if not entry.name.isdigit():
                continue
            try:
                if NamespaceId.of(entry / "ns/pid") == wanted and _innermost_pid(entry / "status") == pid:
                    return int(entry.name)
            except OSError:
                continue
        return None


def process_key(namespace_index: int, pid: int) -> bytes:
    """``struct nw_process``."""
    return np.array((namespace_index, pid), PROCESS_DTYPE).tobytes()


def _innermost_pid(status: Path) -> int:
    """The number of a process in the namespace it lives in."""
    return _pids(status)[-1]


def _pids(status: Path) -> list[int]:
    """``NSpid``: the numbers of a process from the namespace that ``/proc`` shows down to its own."""
    for line in status.read_text("utf-8", "replace").splitlines():
        if line.startswith("NSpid:"):
            return [int(number) for number in line.split()[1:]]
    raise TargetError(f"{status} has no NSpid", "ncclwatch needs a kernel with pid namespaces")
