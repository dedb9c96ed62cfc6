"""Whom to look at because of a verdict that stands, and what was seen of them since, put beside it.

Asked for once a verdict, of its culprits and a few of those that wait for them. A node that cannot look, or does not answer,
leaves the verdict as it is.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ncclwatch.knowledge.looks import MEANWHILE, PEERS, SUSPECTS, with_gpus, with_stacks
from ncclwatch.model.gpu import GpuLook
from ncclwatch.model.looks import ProcessLook
from ncclwatch.model.work import WorkOrder

if TYPE_CHECKING:
    from ncclwatch.collect.batch import NodeBatch
    from ncclwatch.model.state import ProcessSample
    from ncclwatch.model.verdict import Verdict

AGAIN_NS = 300 * 10**9
"""A verdict that stands has its suspects looked at again after so long."""
KEPT_S = 600.0
"""A look older than that is not told any more."""
BEFORE_S = 2.0
"""Looks so long before a verdict's trouble began are of it: when that was is known to a look at memory."""
MOST_KEPT = 4096
"""Looks, and verdicts for which looks were asked for, that are remembered."""
LOOKS = "stacks"
"""The plane of a node that looks where processes stand when that is ordered."""
FIRST_NUMBER = 1 << 61
"""Numbers of orders from here on are for looks; those of counts begin at 1."""

Process = tuple[str, int]
"""(host, pid)"""


@dataclass(slots=True)
class _Asked:
    """For whom a verdict has asked: its peers, and when."""

    peers: tuple[Process, ...]
    time_ns: int
    told: int = 0
    """What it was told with: 1 with the look at a culprit, 2 with that at a peer as well."""


class Suspects:
    """Takes looks from batches, asks for more, and puts them beside verdicts."""

    def __init__(self) -> None:
        self._looks: OrderedDict[Process, ProcessLook] = OrderedDict()
        self._gpus: OrderedDict[str, GpuLook] = OrderedDict()
        self._asked: OrderedDict[str, _Asked] = OrderedDict()
        self._ranks: OrderedDict[Process, int | None] = OrderedDict()
        self._number = FIRST_NUMBER

    def feed(self, batch: NodeBatch) -> None:
        """Take the looks of a batch; times become those of the engine's clock."""
        offset = (batch.clock_offset_ns or 0) / 1e9
        for look in batch.looks:
            _keep(self._looks, (look.host, look.pid), replace(look, time=look.time + offset))
        if batch.gpus is not None:
            _keep(self._gpus, batch.host, batch.gpus)

    def beside(self, verdict: Verdict) -> Verdict:
        """The verdict with what was seen of those it names."""
        asked = self._asked.get(verdict.id)
        if asked is None or not verdict.verdict_class.accuses:
            return verdict
        now = verdict.time or 0.0
        # What it was doing before this trouble began explains another.
        begun = (verdict.since or now - KEPT_S) - BEFORE_S
        fresh = {place: look for place, look in self._looks.items() if begun < look.time < now + KEPT_S}
        if any(one.pid is not None and (one.host, one.pid) in fresh for one in verdict.culprits):
            verdict = with_stacks(verdict, fresh, [fresh[place] for place in asked.peers if place in fresh], self._name)
        return with_gpus(verdict, self._gpus)

    def newest(self, most: int) -> list[ProcessLook]:
        """What was seen last, the newest first."""
        return list(self._looks.values())[: -most - 1 : -1]

    def _name(self, look: ProcessLook) -> str:
        rank = self._ranks.get((look.host, look.pid))
        return f"pid {look.pid} on {look.host}" if rank is None else f"rank {rank}"

    def news(self, verdicts: Iterable[Verdict]) -> Iterator[Verdict]:
        """Verdicts that say for the first time what those they name were doing, or what one that waits was doing. The nodes of
        these may answer one after the other.
        """
        for verdict in verdicts:
            asked = self._asked.get(verdict.id)
            seen = any(one.doing or one.gpu_trouble for one in verdict.culprits)
            beside = seen and any(line.startswith(MEANWHILE) for line in verdict.evidence)
            if asked is not None and seen + beside > asked.told:
                asked.told = seen + beside
                yield verdict

    def orders(
        self, verdicts: Sequence[Verdict], samples: Iterable[ProcessSample], now_ns: int, looking: Collection[str]
    ) -> list[WorkOrder]:
        """Whom to look at now, an order a host, of hosts that do."""
        due = [verdict for verdict in verdicts if verdict.verdict_class.accuses and self._is_due(verdict, now_ns)]
        if not due:
            return []
        alive = {
            (one.process.host, one.process.pid): one.rank
            for one in samples
            if one.run_state not in "ZX" and one.process.host in looking
        }
        by_rank: dict[int | None, Process] = {rank: place for place, rank in alive.items()}
        hosts: dict[str, dict[int, None]] = {}
        for verdict in due:
            culprits = [place for one in verdict.culprits if (place := (one.host, one.pid or 0)) in alive][:SUSPECTS]
            waiting = [by_rank[rank] for rank in verdict.victims if rank in by_rank and by_rank[rank] not in culprits]
            peers = tuple(waiting[:PEERS]) if culprits else ()
            before = self._asked.get(verdict.id)
            _keep(self._asked, verdict.id, _Asked(peers, now_ns, before.told if before is not None else 0))
            for host, pid in (*culprits, *peers):
                _keep(self._ranks, (host, pid), alive[host, pid])
                hosts.setdefault(host, {})[pid] = None
        self._number += len(hosts)
        return [
            WorkOrder(self._number - place, host, tuple(pids), look=True) for place, (host, pids) in enumerate(hosts.items())
        ]  # fmt: skip

    def _is_due(self, verdict: Verdict, now_ns: int) -> bool:
        asked = self._asked.get(verdict.id)
        return asked is None or now_ns - asked.time_ns > AGAIN_NS


def _keep(known: OrderedDict[Any, Any], key: object, value: object) -> None:
    known[key] = value
    known.move_to_end(key)
    while len(known) > MOST_KEPT:
        known.popitem(last=False)
