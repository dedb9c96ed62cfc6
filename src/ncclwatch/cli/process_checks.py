"""What can be read and probed of each NCCL process, for ``doctor``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from ncclwatch.cli import labels
from ncclwatch.cli.findings import Finding, Level
from ncclwatch.errors import NcclwatchError
from ncclwatch.model.state import ProcessInfo, VersionSource
from ncclwatch.text import clean

if TYPE_CHECKING:
    from ncclwatch.probes.sites import FunctionSites

# A node runs one process a GPU; doctor is about kinds of trouble, not about each of a thousand test processes.
MAX_PROCESSES = 64


def process_findings(pids: Sequence[int]) -> Iterator[Finding]:
    """Findings for the given processes, or for every NCCL process of the node when none is given."""
    from ncclwatch.target.discover import find_processes, inspect_process

    infos: list[ProcessInfo] = []
    if pids:
        for pid in pids:
            try:
                infos.append(inspect_process(pid))
            except NcclwatchError as error:
                yield Finding(f"pid {pid}", Level.MISSING, error.message, error.hint)
    else:
        infos = sorted(find_processes(), key=labels.sort_key)
        if not infos:
            yield Finding(
                "processes", Level.INFO, "no NCCL process found", "start a job and run doctor again to check its libnccl"
            )
    for info in infos[:MAX_PROCESSES]:
        yield from _reading(info)
    if len(infos) > MAX_PROCESSES:
        yield Finding("processes", Level.INFO, f"{len(infos) - MAX_PROCESSES} more were not checked")
    checked: set[str] = set()
    for info in infos[:MAX_PROCESSES]:
        if info.key.build_id not in checked:
            checked.add(info.key.build_id)
            yield from _sites(info)
            yield from _graph_sites(info)


def _reading(info: ProcessInfo) -> Iterator[Finding]:
    """Whether the process can be read now, proved by one good read."""
    from ncclwatch.cli.wire_checks import wire_findings
    from ncclwatch.target.session import TargetProcess

    name = f"pid {info.pid}"
    about = f"NCCL {labels.version(info)} in {clean(info.library, 120)}"
    data = {"pid": info.pid, "library": info.library, "version": labels.version(info), "build_id": info.key.build_id}
    wire: list[Finding] = []
    try:
        target = TargetProcess.open(info.pid)
        try:
            sample = target.sample()
            wire += wire_findings(target)
        finally:
            target.close()
    except NcclwatchError as error:
        yield Finding(name, Level.MISSING, f"{about}: {error.message}", error.hint, data)
        return
    source = sample.process.version_source
    seen = f"{len(sample.communicators)} communicator{'s' if len(sample.communicators) != 1 else ''}"
    detail = f"{about}: read in {sample.duration_ns / 1e6:.1f} ms, {seen}, layout by {source}"
    data |= {"version_source": str(source), "communicators": len(sample.communicators), "unavailable": sample.unavailable}
    if source in (VersionSource.DEBUG_INFO, VersionSource.BUILD_ID):
        yield Finding(name, Level.OK, detail, data=data)
    else:
        hint = "use NCCL from PyPI's wheels, or install its debug information, for a layout that is certain"
        yield Finding(name, Level.GAP, detail, hint, data)
    yield from _shim(info)
    for signal, reason in sample.unavailable.items():
        yield Finding(f"{name} {signal}", Level.INFO, f"not available: {reason}")
    yield from wire


def _shim(info: ProcessInfo) -> Iterator[Finding]:
    """Whether the process has loaded the counter shim, and what that shows."""
    from ncclwatch.collect.device import decode, summary
    from ncclwatch.target.frame import FrameFile

    name = f"pid {info.pid} shim"
    try:
        frame = FrameFile.find(info.pid)
        if frame is None:
            how = f"'ncclwatch shim --print-env --pid {info.pid}' says how to load it; the job has to be started anew"
            yield Finding(name, Level.INFO, "no counter shim: kernels and NVLink counters are not seen", how, {"shim": None})
            return
        with frame:
            device = decode(frame.read())
    except NcclwatchError as error:
        yield Finding(name, Level.GAP, error.message, error.hint)
        return
    level = Level.GAP if device.sampler == "failed" or device.copy_engine_silent else Level.OK
    yield Finding(name, level, summary(device), data={"shim": device.entry, "interface": device.interface})


def _sites(info: ProcessInfo) -> Iterator[Finding]:
    """Probe sites of one file that carries NCCL: first instruction and cost class of each function."""
    from ncclwatch.probes.functions import FUNCTIONS, GRAPHS, function_name
    from ncclwatch.probes.sites import find_sites
    from ncclwatch.target.discover import examine

    name = clean(info.library.rpartition("/")[2], 40)
    try:
        with examine(info.pid).binary.open() as elf:
            found = find_sites(elf)
    except NcclwatchError as error:
        yield Finding(f"probes {name}", Level.GAP, error.message, error.hint)
        return
    missing = [function_name(number) for number in FUNCTIONS.keys() - GRAPHS - {sites.function for sites in found}]
    yield Finding(
        f"probes {name}",
        Level.OK if found else Level.GAP,
        f"NCCL {labels.version(info)}, build {info.key.build_id[:12]}: {len(found)} functions can be probed",
        "" if found else "its functions are hidden: calls are not seen, memory is",
        {"build_id": info.key.build_id, "not_in_this_build": sorted(missing)},
    )
    yield from _each_site(found)


def _graph_sites(info: ProcessInfo) -> Iterator[Finding]:
    """The same of the file that captures and launches the CUDA graphs of a process, where it has one."""
    from ncclwatch.probes.graph_library import graph_library
    from ncclwatch.probes.sites import find_sites
    from ncclwatch.target.elf import ElfFile

    try:
        file = graph_library(info.pid)
        if file is None:
            return
        with ElfFile.open(file[0]) as elf:
            found = find_sites(elf)
    except NcclwatchError as error:
        yield Finding("probes CUDA graphs", Level.GAP, error.message, error.hint)
        return
    yield Finding("probes CUDA graphs", Level.OK, f"{len(found)} functions that capture and launch graphs can be probed")
    yield from _each_site(found)


def _each_site(found: Iterable[FunctionSites]) -> Iterator[Finding]:
    """First instruction and cost class of each function."""
    from ncclwatch.probes.functions import function_name
    from ncclwatch.probes.instructions import CostClass

    for sites in found:
        entry = sites.entry
        where = f"{entry.instruction or '?'} at {entry.offset:#x}: {entry.cost}, about {entry.cost.typical_ns:,} ns a call"
        returns = f"{len(sites.returns)} returns" if sites.returns else "leave not seen"
        data = {
            "function": function_name(sites.function),
            "symbol": sites.symbol,
            "offset": entry.offset,
            "instruction": entry.instruction,
            "cost_class": str(entry.cost),
            "typical_ns": entry.cost.typical_ns,
            "returns": [{"offset": s.offset, "instruction": s.instruction, "cost_class": str(s.cost)} for s in sites.returns],
            "problem": sites.problem,
        }
        level = Level.OK if entry.cost is not CostClass.SINGLE_STEPPED else Level.INFO
        problem = f"; {sites.problem}" if sites.problem else ""
        yield Finding(f"  {sites.symbol}", level, f"{where}; {returns}{problem}", data=data)
