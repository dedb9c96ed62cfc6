"""Processes that are stopped or have ended, by the operating system's word, and ranks that should be on a host and are not."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from ncclwatch.engine.evidence.base import Fact, FactKind, Source
from ncclwatch.engine.job import Group, Identity, Job, Member, identity_of
from ncclwatch.engine.nodes import AbsentNode, RankNode

if TYPE_CHECKING:
    from ncclwatch.engine.case import Case

NAME = "exits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Halted(Fact):
    """A process that is stopped (``ended`` false) or has ended. ``subject`` is its node: an observed process, or a rank of a
    communicator that is not among the processes of its host.
    """

    ended: bool


class Exits(Source):
    """States of processes, and who is not among the processes of a host."""

    name = NAME
    plane = "state"
    kinds = frozenset({FactKind.HALTED})

    def facts(self, case: Case) -> Iterator[Halted]:
        """Processes that are stopped or have ended, then ranks that nobody observed and that have. O(processes + missing)."""
        for member in case.job.members:
            if member.halted:
                same = [sample for sample in member.samples if sample.run_state == member.last.run_state]
                yield Halted(
                    kind=FactKind.HALTED, subject=RankNode(member.index), source=NAME, ended=member.gone,
                    interval=(same[0].wall_ns / 1e9, same[-1].wall_ns / 1e9), describe=partial(halted_text, member),
                )  # fmt: skip
        census: Census | None = None
        for group in case.job.groups.values():
            if len(group.members) == group.nranks or not any(own.peers for _, own in group.members.values()):
                continue
            census = census or Census.of(case.job, case.known.complete_hosts)
            for rank in group.missing:
                if census.runs(group, rank) is False:
                    yield Halted(
                        kind=FactKind.HALTED, subject=AbsentNode(group.id, rank), source=NAME, ended=True,
                        describe=partial(_absent_text, case.job, group.id, rank),
                    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Census:
    """Who runs, as NCCL knows processes (``ncclPeerInfo``: ``hostHash``, ``pidHash``)."""

    whole: frozenset[int]
    """Hosts of which every process was sampled."""
    alive: frozenset[Identity]
    """Observed processes that run."""

    @classmethod
    def of(cls, job: Job, complete_hosts: Collection[str]) -> Census:
        """Of the processes of a job. O(their communicators)."""
        whole: set[int] = set()
        alive: set[Identity] = set()
        for member in job.members:
            for own in member.last.communicators:
                identity = identity_of(own, own.rank)
                if identity is None:
                    continue
                if member.info.host in complete_hosts:
                    whole.add(identity[0])
                if not member.gone:
                    alive.add(identity)
        return cls(frozenset(whole), frozenset(alive))

    def runs(self, group: Group, comm_rank: int) -> bool | None:
        """Whether a rank that no observed process seems to hold runs; ``None``: it may.

        A process may well be observed, and its communicator not yet found.
        """
        found = (identity_of(own, comm_rank) for _, own in group.members.values())
        identity = next((one for one in found if one is not None), None)
        if identity is None:
            return None
        if identity in self.alive:
            return True
        return False if identity[0] in self.whole else None


def halted_text(member: Member) -> str:
    """The operating system's word on a stopped or ended process."""
    state = member.last.run_state
    words = {"T": "stopped", "t": "stopped by a debugger", "Z": "a zombie: it has ended", "X": "gone: it has ended"}
    same = [sample for sample in member.samples if sample.run_state == state]
    span = (same[-1].time_ns - same[0].time_ns) / 1e9
    return f"{member.label} is {words.get(state, state)} (state {state}) in {len(same)} samples over {span:.1f} s"


def _absent_text(job: Job, group_id: int, comm_rank: int) -> str:
    return f"{job.rank_name(group_id, comm_rank)} has ended: it is not among the processes of its host"
