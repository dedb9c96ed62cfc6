"""How processes of a job differ: releases, settings, CPUs, GPUs, NICs; only what is not the same for all.

Pure functions of samples: the same for a live node, snapshots and recordings, as far as these carry it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from ncclwatch.knowledge.rows import release_text
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.traits import NicTrait, Traits
from ncclwatch.text import bus_text, clean, ranges

UNSET = "not set"
OWN = ("CUDA_VISIBLE_DEVICES",)
"""Settings that each rank has of its own: their values are not compared."""
OF_A_HOST = frozenset({"NCCL_HOSTID", "NCCL_DEBUG_FILE", "NCCL_TOPO_DUMP_FILE", "NCCL_GRAPH_DUMP_FILE"})
"""Settings that are another one on each host by right: worth a look, and no reason to be slower than others."""
CPUS = "CPUs it may use"
MOST_PEERS, MOST_LINES, NAMED = 64, 8, 8


class Differs(StrEnum):
    """How a process differs from most of its peers, where rows of knowledge ask for it."""

    FEWER_CPUS = "fewer CPUs"


@dataclass(frozen=True, slots=True)
class Who:
    """A process as differences name it."""

    rank: int | None
    host: str
    pid: int

    @property
    def name(self) -> str:
        """``rank 2``, or ``pid 4711`` of a process without one."""
        return f"rank {self.rank}" if self.rank is not None else f"pid {self.pid}"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that is not the same for all. ``values``: each with who has it, that of most first; ``unknown``: of whom it is
    not known. ``each_its_own``: no two have the same, as with what names a process: nobody stands out.
    """

    what: str
    values: tuple[tuple[str, tuple[Who, ...]], ...]
    unknown: tuple[Who, ...] = ()

    @property
    def each_its_own(self) -> bool:
        """Whether no two of three or more have the same."""
        return len(self.values) > 2 and all(len(who) == 1 for _, who in self.values)


def facts(sample: ProcessSample) -> dict[str, str]:
    """What is compared of a process: a text for each thing that is known."""
    info, traits = sample.process, sample.process.traits
    found = {"NCCL": release_text(info.version) if info.version else "", "NCCL build": info.key.build_id[:12]}
    if traits is not None:
        found |= {
            "CUDA driver": traits.driver, "Python": traits.python, "machine": traits.machine, "kernel": traits.kernel,
            "CPU model": traits.cpu_model, CPUS: _cpus(traits.cpus), "CPUs of its control group": _cpus(traits.cpu_group),
            "CPU limit": f"{traits.cpu_quota:g} CPUs" if traits.cpu_quota is not None else "none",
            **_gpu(sample, traits), **_nics(traits.nics),
        }  # fmt: skip
    return {what: value for what, value in found.items() if value}


def _cpus(text: str) -> str:
    """``16`` of ``0-7,32-39``: ranks are pinned to CPUs of their own, so their number is compared."""
    total = 0
    for part in text.split(",") if text else ():
        first, _, last = part.partition("-")
        total += int(last or first) - int(first) + 1 if first.isdigit() and (last or "0").isdigit() else 0
    return str(total) if total > 0 else ""


def _gpu(sample: ProcessSample, traits: Traits) -> dict[str, str]:
    """Of the GPUs that its communicators drive, or of the node's where that is not known."""
    wanted = {bus_text(one.bus_id) for one in sample.communicators if one.bus_id is not None}
    gpus = [gpu for gpu in traits.gpus if gpu.bus_id in wanted] or list(traits.gpus)
    return {"GPU": _counted(gpu.model for gpu in gpus), "PCIe of its GPU": _counted(gpu.link for gpu in gpus)}


def _nics(nics: Sequence[NicTrait]) -> dict[str, str]:
    return {
        "NICs": _counted(nic.model or nic.name.rstrip("0123456789") for nic in nics),
        "NIC rate": _counted(nic.rate for nic in nics),
        "NIC firmware": _counted(nic.firmware for nic in nics), "PCIe of its NICs": _counted(nic.link for nic in nics),
        "NIC MTU": _counted(nic.mtu for nic in nics),
    }  # fmt: skip


def _counted(values: Iterable[str]) -> str:
    """``400 Gb/sec × 7, 200 Gb/sec``, the most frequent first."""
    counted = sorted(Counter(value for value in values if value).items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{value} × {number}" if number > 1 else value for value, number in counted)


def differences(samples: Sequence[ProcessSample]) -> list[Difference]:
    """What is not the same for all of them, settings last; a setting that one has and another lacks counts."""
    every = [(Who(one.process.rank, one.process.host, one.process.pid), facts(one), _settings(one)) for one in samples]
    found = []
    for what in dict.fromkeys(what for _, known, _ in every for what in known):
        found += _difference(what, [(who, known.get(what)) for who, known, _ in every])
    for name in sorted({name for _, _, known in every for name in known or () if name not in OWN}):
        found += _difference(name, [(who, None if known is None else known.get(name, UNSET)) for who, _, known in every])
    return found


def _settings(sample: ProcessSample) -> Mapping[str, str] | None:
    return None if sample.process.traits is None else dict(sample.process.traits.settings)


def _difference(what: str, values: Sequence[tuple[Who, str | None]]) -> list[Difference]:
    by_value: dict[str, list[Who]] = {}
    for who, value in values:
        if value is not None:
            by_value.setdefault(value, []).append(who)
    if len(by_value) < 2:
        return []
    ordered = sorted(by_value.items(), key=lambda item: (-len(item[1]), item[0]))
    unknown = tuple(who for who, value in values if value is None)
    return [Difference(what, tuple((value, tuple(whose)) for value, whose in ordered), unknown)]


def names(whose: Sequence[Who]) -> str:
    """``ranks 0-1, 3``, or hosts and pids where ranks are not known."""
    known = [who.rank for who in whose if who.rank is not None]
    if len(known) == len(whose):
        return f"rank{'s' if len(set(known)) != 1 else ''} {ranges(known)}"
    shown = ", ".join(f"{clean(who.host, 40)} pid {who.pid}" for who in whose[:NAMED])
    return shown + (f" and {len(whose) - NAMED} more" if len(whose) > NAMED else "")


@dataclass(frozen=True, slots=True)
class Unlike:
    """One thing in which a process has not what most of its peers have: so many of so many ``peers`` of whom it is known."""

    what: str
    own: str
    most: str
    alike: int
    peers: int

    @property
    def line(self) -> str:
        """For people."""
        return f"{self.what}: {clean(self.own, 80)}; of most peers ({self.alike} of {self.peers}): {clean(self.most, 80)}"

    @property
    def kind(self) -> Differs | None:
        """What rows of knowledge call it."""
        return Differs.FEWER_CPUS if self.what == CPUS and int(self.own) < int(self.most) else None


def of_culprit(culprit: ProcessSample, peers: Sequence[ProcessSample]) -> list[Unlike]:
    """In which things one process differs from what most of its peers have, at most :data:`MOST_LINES`.

    Where the peers themselves are divided, nothing follows; more than half of them, of whom it is known, must agree.
    """
    step = max(len(peers) // MOST_PEERS, 1)
    others = list(peers[::step])[:MOST_PEERS]
    if len(others) < 2:
        return []
    place = culprit.process.host, culprit.process.pid
    found = []
    for one in differences([culprit, *others]):
        own = next((value for value, who in one.values if any((w.host, w.pid) == place for w in who)), None)
        of_peers = [(value, sum((w.host, w.pid) != place for w in who)) for value, who in one.values]
        most, alike = max(of_peers, key=lambda held: held[1])
        known = sum(number for _, number in of_peers)
        if own is not None and own != most and 2 * alike > known and one.what not in OF_A_HOST:
            found.append(Unlike(one.what, own, most, alike, known))
    return found[:MOST_LINES]
