"""Finding the NCCL processes of this node, and looking at one of them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

from ncclwatch.errors import NcclwatchError, PrivilegeError, TargetError, TargetGoneError
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import ProcessInfo
from ncclwatch.target import process
from ncclwatch.target.binary import BinaryIndex, NcclBinary
from ncclwatch.target.held import HeldError
from ncclwatch.target.layout import Layout
from ncclwatch.target.maps import PROC, read_maps_text
from ncclwatch.target.namespaces import container_id
from ncclwatch.target.process import Ranks
from ncclwatch.target.resolve import LayoutCache, resolve_layout
from ncclwatch.target.titles import rank_of_title
from ncclwatch.target.traits import traits

_MAX_FAMILY = 512
"""Bound of the relatives whose ranks are compared with those of a process."""


@dataclass(frozen=True, slots=True)
class FoundProcess:
    """A process that carries NCCL and what is needed to read it.

    ``binary`` is the NCCL that ``info`` describes; ``others`` are further ones in the same process (a framework's own beside the
    system's). ``ranks`` is what the environment claims, also where ``info`` does not believe it.
    """

    info: ProcessInfo
    binary: NcclBinary
    others: tuple[NcclBinary, ...]
    parent: int
    ranks: Ranks


@dataclass(frozen=True, slots=True)
class Survey:
    """All NCCL processes of a node; ``unreadable`` counts the processes that the agent may not look into. ``held``: what is said
    of those whose memory map one of their own threads holds: what they carry is not known.
    """

    found: tuple[FoundProcess, ...]
    unreadable: int
    held: tuple[HeldError, ...] = ()


def find_processes(proc: Path = PROC) -> list[ProcessInfo]:
    """The NCCL processes that the agent may look into, by pid; processes that exit meanwhile are left out."""
    return [found.info for found in survey(proc).found]


def survey(proc: Path = PROC) -> Survey:
    """Look at every process of the node once."""
    index = _index(proc)
    index.start_survey()
    found: list[FoundProcess] = []
    held: list[HeldError] = []
    unreadable = 0
    for pid in _pids(proc):
        try:
            text = read_maps_text(pid, proc)
            if text and index.could_carry(text):
                binaries = index.find(pid, text)
                if binaries:
                    found.append(_describe(pid, binaries, proc))
        except PrivilegeError:
            unreadable += 1
        except HeldError as error:
            held.append(error)
        except TargetError:
            continue
    return Survey(tuple(_without_shared_ranks(found)), unreadable, tuple(held))


def inspect_process(pid: int, proc: Path = PROC) -> ProcessInfo:
    """What is known of one process; errors as :func:`examine`."""
    return examine(pid, proc).info


def examine(pid: int, proc: Path = PROC) -> FoundProcess:
    """Look at one process.

    Raises :class:`TargetError` when it carries no NCCL (or is a zombie or a kernel thread), :class:`TargetGoneError` when there
    is no such process, :class:`PrivilegeError` when the agent may not look into it.
    """
    if pid <= 0 or not (proc / str(pid)).is_dir():
        raise TargetGoneError(f"there is no process {pid}", "list the NCCL processes with 'ncclwatch ps'")
    found = _examine_alone(pid, proc)
    if found.ranks.rank is None:
        return found
    # A rank that brothers and sisters claim too was inherited from what started them all.
    family = [found]
    for relative in (found.parent, *process.children(found.parent, proc)[:_MAX_FAMILY]):
        if relative in (pid, 0):
            continue
        with contextlib.suppress(NcclwatchError):
            # The ranks of a healthy job claim different ranks: then nobody's memory map is read for this.
            if process.ranks_from_environ(process.read_environ(relative, proc)).claim == found.ranks.claim:
                family.append(_examine_alone(relative, proc))
    return next(one for one in _without_shared_ranks(family) if one.info.pid == pid)


def each_library(found: FoundProcess) -> Iterator[FoundProcess]:
    """The process as seen by each NCCL that it has loaded, the one it was found with first; ``info.key`` stays what it is."""
    binaries = (found.binary, *found.others)
    for binary in binaries:
        version = binary.facts.version
        info = replace(
            found.info,
            library=binary.path,
            version=version.number if version else None,
            version_source=binary.version_source,
            statically_linked=binary.statically_linked,
        )
        yield replace(found, info=info, binary=binary, others=tuple(one for one in binaries if one is not binary))


def layout_of(found: FoundProcess, cache: LayoutCache | None = None) -> Layout:
    """The layout of a process's NCCL; raises :class:`ncclwatch.target.layout.LayoutError` and :class:`TargetError`."""
    with found.binary.open() as elf:
        return resolve_layout(elf, found.binary.facts.version, cache)


@lru_cache(maxsize=4)
def _index(proc: Path) -> BinaryIndex:
    """What was learned of files outlives a survey: an agent that looks every few seconds reads each file once."""
    return BinaryIndex(proc)


def _pids(proc: Path) -> list[int]:
    try:
        return sorted(int(name) for name in os.listdir(proc) if name.isdigit())  # noqa: PTH208 - a thousand names, no paths
    except OSError as error:
        raise TargetError(f"cannot list {proc} ({error.strerror})", "is /proc mounted?") from None


def _examine_alone(pid: int, proc: Path) -> FoundProcess:
    text = read_maps_text(pid, proc)
    if not text:
        stat = process.read_stat(pid, proc)
        what = "a kernel thread" if stat.is_kernel_thread else "a zombie" if stat.state == "Z" else "without memory of its own"
        raise TargetError(f"process {pid} ({stat.name}) is {what}", "list the NCCL processes with 'ncclwatch ps'")
    binaries = _index(proc).find(pid, text)
    if not binaries:
        name = process.read_stat(pid, proc).name
        raise TargetError(
            f"process {pid} ({name}) has no NCCL loaded",
            "give the pid of a rank, not of its launcher: 'ncclwatch ps' lists the NCCL processes",
        )
    return _describe(pid, binaries, proc)


def _describe(pid: int, binaries: list[NcclBinary], proc: Path) -> FoundProcess:
    binary, *others = binaries
    stat = process.read_stat(pid, proc)
    status = process.read_status(pid, proc)
    try:
        environ = process.read_environ(pid, proc)
    except PrivilegeError:
        environ = {}
    command = process.read_command(pid, proc)
    ranks = process.ranks_from_environ(environ)
    if ranks.source not in process.OF_THE_RANK and (titled := rank_of_title(command)) is not None:
        ranks = Ranks(titled, ranks.local_rank if ranks.rank is None else None, None, "title", ranks.job)
    version = binary.facts.version
    info = ProcessInfo(
        key=ProcessKey(process.boot_id(proc), pid, stat.start_time, binary.build_id),
        host=socket.gethostname(),
        name=stat.name,
        command=command,
        library=binary.path,
        version=version.number if version else None,
        version_source=binary.version_source,
        rank=ranks.rank,
        local_rank=ranks.local_rank,
        world_size=ranks.world_size,
        rank_source=ranks.source,
        container_id=container_id(pid, proc),
        pid_in_target=status.pids[-1],
        uid=status.uid,
        statically_linked=binary.statically_linked,
        traits=traits(pid, environ, proc),
    )
    return FoundProcess(info, binary, tuple(others), stat.parent, ranks)


def _without_shared_ranks(found: Iterable[FoundProcess]) -> list[FoundProcess]:
    """Take away ranks that several processes of one family claim: they come from an environment that all of them inherited.

    ``mp.spawn`` under srun is the common case: every process has the SLURM_PROCID of the one that spawned them. Forked helpers
    (data loaders) share their parent's command line and rank rightfully.
    """
    found = list(found)
    claims: dict[tuple[str, str, int | None, int | None], dict[int, FoundProcess]] = defaultdict(dict)
    for one in found:
        if one.ranks.rank is not None:
            claims[one.ranks.claim][one.info.pid] = one
    shared: set[int] = set()
    for claimants in claims.values():
        families: dict[int, list[FoundProcess]] = defaultdict(list)
        for one in claimants.values():
            families[_starter(one, claimants)].append(one)
        for family in families.values():
            independent = [one for one in family if not _is_fork(one, claimants.get(one.parent))]
            if len(independent) > 1:
                shared |= {one.info.pid for one in family}
    return [
        replace(one, info=replace(one.info, rank=None, local_rank=None, world_size=None, rank_source=""))
        if one.info.pid in shared
        else one
        for one in found
    ]


def _starter(one: FoundProcess, claimants: dict[int, FoundProcess]) -> int:
    """The pid that a family descends from: the first ancestor without the claim. Orphans of init are families of their own."""
    seen = set()
    while one.parent in claimants and one.info.pid not in seen:
        seen.add(one.info.pid)
        one = claimants[one.parent]
    return one.parent if one.parent > 1 else one.info.pid


def _is_fork(child: FoundProcess, parent: FoundProcess | None) -> bool:
    return parent is not None and child.info.command == parent.info.command
