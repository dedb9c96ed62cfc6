"""From successive readings of the accounts to windows: of each queue pair, of each port of a rank, and of each peer of a rank.

Counts are differences between two readings. Of bursts nothing counts in between (:class:`ncclwatch.wire.bursts.Bursts`), so a
difference is what the last burst counted, between two moments that are known.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ncclwatch.model.state import Direction
from ncclwatch.model.work import Counting, FlowWindow, Scope, WorkWindow
from ncclwatch.wire import layouts
from ncclwatch.wire.accounts import DEFAULT_WINDOW, QueuePairAccount, histogram_quantile, merged_bandwidth
from ncclwatch.wire.orders import Owner

QpKey = tuple[int, int, int]
"""(pid, address of the context, number of the queue pair)."""

MEAN_OF = 16
"""Windows whose spread tells how far a rate may be off."""
FEWEST = 3
"""Fewer tell nothing."""
MAX_WINDOWS = 2048
"""Windows of one reading at most: ports and peers first, then the busiest queue pairs."""

_COUNTED = ("posted", "posted_bytes", "completed", "retired_bytes", "received", "received_bytes", "receives_posted", "errors")


@dataclass(slots=True)
class _Part:
    """What one queue pair did between two readings; ``account`` is ``None`` for one that never did anything while seen."""

    key: QpKey
    owner: Owner | None
    device: str
    port: int
    role: str
    counts: dict[str, int]
    latency: npt.NDArray[Any]
    account: QueuePairAccount | None

    @property
    def is_active(self) -> bool:
        return any(self.counts.values())


@dataclass(slots=True)
class WorkWindows:
    """Feed it every reading, in order."""

    _totals: dict[QpKey, tuple[dict[str, int], npt.NDArray[Any]]] = field(default_factory=dict)
    _rates: dict[Hashable, deque[float]] = field(default_factory=dict)
    _polls: dict[int, int] = field(default_factory=dict)
    _ended: dict[int, int] = field(default_factory=dict)
    """Of each process, when its last window ended."""

    def begin(
        self, accounts: Iterable[QueuePairAccount], pids: Collection[int], now_ns: int, polls: Mapping[int, int] | None = None
    ) -> None:
        """From now on every request of these processes is counted; what is in their accounts came before."""
        for account in accounts:
            if account.pid in pids:
                self._totals[account.key] = _totals_of(account)
        self._ended |= dict.fromkeys(pids, now_ns)
        self._polls |= polls or {}

    def take(
        self,
        accounts: Iterable[QueuePairAccount],
        owners: Mapping[QpKey, Owner],
        devices: Mapping[tuple[int, int], tuple[str, int]],
        *,
        pids: Collection[int],
        counting: Counting,
        began_ns: int | None,
        ended_ns: int,
        order: int = 0,
        polls: Mapping[int, int] | None = None,
    ) -> list[FlowWindow]:
        """The windows that end at ``ended_ns``, of which the time from ``began_ns`` was seen; ``None``: all of it.

        ``devices`` are RDMA device and port by (pid, context); ``pids`` the processes whose probes were in place.
        ``polls`` is how often their threads have asked for completions in all.
        """
        parts = list(self._parts([account for account in accounts if account.pid in pids], owners, devices))
        seen = {part.key for part in parts}
        nothing = np.zeros(layouts.BUCKETS, dtype="<u8")
        for key, owner in owners.items():
            if key[0] in pids and key not in seen:
                # Nothing was posted to it, and nothing completed: that, too, was seen.
                device, port = devices.get(key[:2], ("", 0))
                role = "data" if owner.direction is Direction.SEND else "control"
                parts.append(_Part(key, owner, device, port, role, dict.fromkeys(_COUNTED, 0), nothing, None))
        frames = self._frames(pids, counting, began_ns, ended_ns, polls or {})
        flows = [
            FlowWindow(
                pid=part.key[0],
                scope=Scope.FLOW,
                work=self._window(("flow", part.key), [part], frames),
                global_rank=part.owner.global_rank if part.owner else None,
                device=part.device,
                port=part.port,
                comm_hash=part.owner.comm_hash if part.owner else None,
                rank=part.owner.rank if part.owner else None,
                channel=part.owner.channel if part.owner else None,
                peer=part.owner.peer if part.owner else None,
                direction=part.owner.direction if part.owner else None,
                connection_index=part.owner.connection_index if part.owner else None,
                queue_pair=part.key[2],
                role=part.role,
                order=order,
            )
            for part in parts
            if part.owner is not None or part.is_active
        ]
        flows.sort(key=lambda flow: -(flow.work.posted_bytes + flow.work.received_bytes))
        return [*self._ports(parts, frames, order), *self._peers(parts, frames, order), *flows][:MAX_WINDOWS]

    def _frames(
        self, pids: Collection[int], counting: Counting, began_ns: int | None, ended_ns: int, polls: Mapping[int, int]
    ) -> dict[int, _Frame]:
        """The time of each process's windows: an order may be of some, and a process that came later is counted since later."""
        found = {}
        for pid in pids:
            begin_ns = self._ended.get(pid, ended_ns if began_ns is None else began_ns)
            asked = max(polls[pid] - self._polls.get(pid, 0), 0) if pid in polls else None
            found[pid] = _Frame(counting, begin_ns, begin_ns if began_ns is None else began_ns, ended_ns, asked)
            self._ended[pid] = ended_ns
        self._polls |= {pid: total for pid, total in polls.items() if pid in found}
        return found

    def forget(self, pid: int) -> None:
        """Let go of a process."""
        self._polls.pop(pid, None)
        self._ended.pop(pid, None)
        self._totals = {key: total for key, total in self._totals.items() if key[0] != pid}
        self._rates = {key: rates for key, rates in self._rates.items() if not (isinstance(key, tuple) and pid in key[1][:1])}

    def _parts(
        self,
        accounts: Iterable[QueuePairAccount],
        owners: Mapping[QpKey, Owner],
        devices: Mapping[tuple[int, int], tuple[str, int]],
    ) -> Iterable[_Part]:
        for account in accounts:
            now, latency = _totals_of(account)
            before, before_latency = self._totals.get(account.key, ({}, np.zeros_like(latency)))
            self._totals[account.key] = now, latency
            device, port = devices.get((account.pid, account.context), ("", 0))
            counts = {name: max(count - before.get(name, 0), 0) for name, count in now.items()}
            owner = owners.get(account.key)
            yield _Part(account.key, owner, device, port, account.role(), counts, latency - before_latency, account)

    def _ports(self, parts: Iterable[_Part], frames: Mapping[int, _Frame], order: int) -> Iterable[FlowWindow]:
        groups: dict[tuple[int, str, int, int | None], list[_Part]] = {}
        for part in parts:
            if part.owner is not None:
                groups.setdefault((part.key[0], part.device, part.port, part.owner.global_rank), []).append(part)
        for (pid, device, port, rank), members in groups.items():
            work = self._window(("port", (pid, device, port, rank)), members, frames)
            yield FlowWindow(pid, Scope.PORT, work, rank, device, port, role="data", order=order)

    def _peers(self, parts: Iterable[_Part], frames: Mapping[int, _Frame], order: int) -> Iterable[FlowWindow]:
        groups: dict[tuple[int, int, int, int], list[_Part]] = {}
        for part in parts:
            if part.owner is not None:
                groups.setdefault((part.key[0], part.owner.comm_hash, part.owner.rank, part.owner.peer), []).append(part)
        for (pid, comm_hash, rank, peer), members in groups.items():
            work = self._window(("peer", (pid, comm_hash, rank, peer)), members, frames)
            owner = members[0].owner
            yield FlowWindow(
                pid,
                Scope.PEER,
                work,
                owner.global_rank if owner else None,
                comm_hash=comm_hash,
                rank=rank,
                peer=peer,
                role="data",
                order=order,
            )

    def _window(self, key: Hashable, parts: list[_Part], frames: Mapping[int, _Frame]) -> WorkWindow:
        """The window of some queue pairs of a process together: what carries data, and of the others what they receive of it.

        A latency is of requests whose posting was seen, and a throughput needs two completions of them: without, both are
        ``None`` although something completed. So it is of what was under way when the probes came.
        """
        frame = frames[parts[0].key[0]]
        posting = parts if len(parts) == 1 else [part for part in parts if part.role in ("data", "")]
        moving = [part.account for part in posting if part.account is not None and part.counts["completed"]]
        flying = [
            part.account for part in posting if part.account is not None and (part.is_active or frame.counting is Counting.EXACT)
        ]
        oldest = min((since for account in flying if (since := account.oldest_pending_ns) is not None), default=None)
        latency = sum((part.latency for part in posting), np.zeros(layouts.BUCKETS, dtype="<u8"))
        sent = sum(part.counts["posted_bytes"] for part in posting)
        received = sum(part.counts["received_bytes"] for part in parts)
        rates = self._rates.setdefault(key, deque(maxlen=MEAN_OF))
        if frame.seen_s > 0:
            rates.append((sent or received) / frame.seen_s)
        return WorkWindow(
            counting=frame.counting,
            begin_ns=frame.begin_ns,
            end_ns=frame.ended_ns,
            seen_s=frame.seen_s,
            posted=sum(part.counts["posted"] for part in posting),
            posted_bytes=sent,
            completed=sum(part.counts["completed"] for part in posting),
            completed_bytes=sum(part.counts["retired_bytes"] for part in posting),
            received=sum(part.counts["received"] for part in parts),
            received_bytes=received,
            receives_posted=sum(part.counts["receives_posted"] for part in parts),
            in_flight=sum(account.in_flight for account in flying),
            oldest_s=None if oldest is None else max(frame.ended_ns - oldest, 0) / 1e9,
            errors=sum(part.counts["errors"] for part in parts),
            latency_p50_ns=histogram_quantile(latency, 0.5),
            latency_p99_ns=histogram_quantile(latency, 0.99),
            throughput=merged_bandwidth(moving, DEFAULT_WINDOW),
            polls=frame.polls,
            uncertainty=0.0 if frame.counting is Counting.EXACT else uncertainty(rates),
        )


@dataclass(frozen=True, slots=True)
class _Frame:
    """The time of a process's windows, and how they were counted."""

    counting: Counting
    begin_ns: int
    began_ns: int
    ended_ns: int
    polls: int | None
    """How often the process has asked for completions."""

    @property
    def seen_s(self) -> float:
        return max(self.ended_ns - self.began_ns, 0) / 1e9


def _totals_of(account: QueuePairAccount) -> tuple[dict[str, int], npt.NDArray[Any]]:
    return {name: getattr(account, name) for name in _COUNTED}, np.array(account.record["latency"])


def uncertainty(rates: Collection[float]) -> float | None:
    """The relative standard error of the mean of these rates; ``None`` of too few, or where nothing moved."""
    if len(rates) < FEWEST:
        return None
    # Not by ``statistics``, which counts in fractions, fifty times as long.
    middle = math.fsum(rates) / len(rates)
    squares = math.fsum((rate - middle) ** 2 for rate in rates)
    return (squares / (len(rates) - 1) / len(rates)) ** 0.5 / middle if middle > 0 else None
