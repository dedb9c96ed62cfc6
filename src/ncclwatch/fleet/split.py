"""What one node says, taken apart by job: two jobs on one node stay apart, and each batch goes to whom its processes belong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from dataclasses import replace as replaced
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from ncclwatch.collect.batch import NodeBatch, ProcessChange
from ncclwatch.fleet.directory import Claim, Directory, by_size
from ncclwatch.fleet.reduced import merged
from ncclwatch.messaging.subjects import token_of
from ncclwatch.model.events import Flag
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.network import NetworkLook
from ncclwatch.model.rows import distinct

MAX_EARLY = 100
"""Batches before the first look after which what a node says is of the job that configuration names."""
MAX_WAITING_CALLS = 50_000
"""Calls kept of processes of which it is not known yet whose they are; more are counted as lost."""


@dataclass(slots=True)
class NodeSplitter:
    """One node of one token. ``lost`` counts calls of which nobody could tell whose they are, beside those the node lost."""

    token: str
    lost: int = 0
    _hash: dict[ProcessKey, int] = field(default_factory=dict)
    """A communicator of each process, the largest it was ever seen with."""
    _key: dict[int, ProcessKey] = field(default_factory=dict)
    _waiting: list[NDArray[Any]] = field(default_factory=list)
    _before: frozenset[str] = frozenset()
    """Jobs that had a part of the batch before."""
    _early: NodeBatch | None = None
    _nearly: int = 0
    """What was said before the first look, which tells whose it is, and in how many batches."""

    def split(self, batch: NodeBatch, directory: Directory, now_ns: int) -> tuple[dict[str, NodeBatch], list[Claim]]:
        """Parts by job, and what is to be claimed. A job that has no process here any more gets one last empty part. Before the
        first look there are no parts: what is said is kept.
        """
        if not batch.looked and not self._before and self._nearly < MAX_EARLY:
            self._early = batch if self._early is None else merged(self._early, batch)
            self._nearly += 1
            return {}, []
        if self._early is not None:
            batch, self._early = merged(self._early, batch), None
        claims = self._learn(batch, directory, now_ns)
        jobs = {name for h in self._hash.values() if (name := directory.job(self.token, h)) is not None}
        fallback = token_of(self.token)
        of_others = fallback if len(jobs) != 1 else next(iter(jobs))
        homes = {key: self._home(key, directory, of_others) for key in self._key.values()}
        wanted = (jobs | set(homes.values())) or set(self._before) or {of_others}
        if fallback in wanted:
            claims += directory.name(self.token, fallback, now_ns)
        batch.events = self._take_events(batch.events, directory, single=len(wanted) == 1)
        batch.lost += self.lost
        left = self._before - wanted if batch.looked else frozenset[str]()
        self._before = frozenset(wanted)
        if len(wanted) == 1 and not left:
            return {next(iter(wanted)): batch}, claims
        parts = {job: self._part(batch, job, homes, directory) for job in sorted(wanted)}
        return parts | {job: _empty(batch) for job in left}, claims

    def _learn(self, batch: NodeBatch, directory: Directory, now_ns: int) -> list[Claim]:
        claims: list[Claim] = []
        if not batch.looked:
            return claims
        here: dict[int, ProcessKey] = {}
        for sample in batch.samples:
            key = sample.process.key
            here[key.pid] = key
            hashes = by_size((c.hash, c.nranks) for c in sample.communicators)
            if hashes:
                self._hash[key] = hashes[0]
                claims += directory.join(self.token, hashes, now_ns)
        self._key = here
        present = set(here.values())
        self._hash = {key: h for key, h in self._hash.items() if key in present}
        return claims

    def _home(self, key: ProcessKey, directory: Directory, of_others: str) -> str:
        h = self._hash.get(key)
        return (directory.job(self.token, h) or of_others) if h is not None else of_others

    def _take_events(self, events: NDArray[Any] | None, directory: Directory, *, single: bool) -> NDArray[Any] | None:
        """Calls whose processes, or communicators, are known; the others wait until they are."""
        found = [*self._waiting, *([events] if events is not None and len(events) else ())]
        if not found:
            return events
        whole: NDArray[Any] = np.concatenate(found) if len(found) > 1 else found[0]
        self._waiting = []
        if single:
            return whole
        known = np.isin(whole["pid"], list(self._key)) | self._owned(whole, directory)
        if not known.all():
            waiting = whole[~known]
            if len(waiting) > MAX_WAITING_CALLS:
                self.lost += len(waiting) - MAX_WAITING_CALLS
                waiting = waiting[-MAX_WAITING_CALLS:]
            self._waiting = [waiting]
        kept: NDArray[Any] = whole[known]
        return kept

    def _owned(self, events: NDArray[Any], directory: Directory) -> NDArray[np.bool_]:
        read = (events["flags"] & np.uint8(Flag.COMM_READ)) != 0
        hashes = [h for h in distinct(events["comm_hash"][read]).tolist() if directory.job(self.token, h) is not None]
        owned: NDArray[np.bool_] = read & np.isin(events["comm_hash"], np.array(hashes, np.uint64))
        return owned

    def _part(self, batch: NodeBatch, job: str, homes: Mapping[ProcessKey, str], directory: Directory) -> NodeBatch:
        pids = {key.pid for key, home in homes.items() if home == job}
        others = {key.pid for key, home in homes.items() if home != job}

        def ours(pid: int | None) -> bool:
            return pid is None or pid in pids or pid not in others

        return replace(
            batch,
            samples=tuple(s for s in batch.samples if s.process.key.pid in pids),
            windows=[w for w in batch.windows if w.process.key.pid in pids],
            problems=tuple(p for p in batch.problems if p[0].pid in pids),
            events=self._events_of(batch.events, job, pids, others, directory),
            changes=tuple(change for change in batch.changes if ours(_pid(change))),
            ends=tuple(end for end in batch.ends if ours(end.key.pid)),
            looks=tuple(look for look in batch.looks if ours(look.pid)),
            network=None if batch.network is None else _network(batch.network, ours),
            all_flows=[flow for flow in batch.all_flows if ours(flow.pid)],
            work=tuple(window for window in batch.work if window.pid in pids),
        )

    def _events_of(
        self, events: NDArray[Any] | None, job: str, pids: set[int], others: set[int], directory: Directory
    ) -> NDArray[Any] | None:
        if events is None or not len(events):
            return events
        known = np.isin(events["pid"], list(pids))
        unknown = ~known & ~np.isin(events["pid"], list(others))
        if unknown.any():
            hashes = distinct(events["comm_hash"][unknown]).tolist()
            of_job = [h for h in hashes if directory.job(self.token, h) == job]
            known |= unknown & np.isin(events["comm_hash"], np.array(of_job, np.uint64))
        chosen: NDArray[Any] = events[known]
        return chosen


def _pid(change: ProcessChange) -> int:
    return change.info.key.pid if change.info is not None else change.pid


def _network(look: NetworkLook, ours: Callable[[int | None], bool]) -> NetworkLook:
    flows = tuple(flow for flow in look.flows if ours(flow.pid))
    return replaced(look, flows=flows, kernel=tuple(line for line in look.kernel if ours(line.pid)))


def _empty(batch: NodeBatch) -> NodeBatch:
    """A look at a node that shows no process, for a job that has left it."""
    return replace(
        batch, samples=(), windows=(), problems=(), events=None, changes=(), ends=(), looks=(), notes=(), network=None,
        all_flows=(), paths=(), work=(),
    )  # fmt: skip
