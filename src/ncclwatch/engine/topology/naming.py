"""Put roles of communicators and places in the iteration into a verdict."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ncclwatch.engine.job import Job, Member
from ncclwatch.engine.ledger import Ledger
from ncclwatch.engine.topology.labels import Stage
from ncclwatch.engine.topology.model import Phase, Role
from ncclwatch.engine.topology.namer import StageNamer
from ncclwatch.model.state import Communicator
from ncclwatch.model.verdict import Culprit, OperationRef, Verdict, VerdictClass, places, stands_in
from ncclwatch.text import compressed

SHOWN = 3
"""Bound: lines on where victims are."""
LATEST = 4
"""Bound: calls on one communicator that are looked at: gather, scatter, sum and a barrier may take turns; memory names one."""
ASKED = 16
"""Bound: members of a communicator that are asked where an operation is: they call alike, so more would tell no more."""

HALTED = (VerdictClass.STOPPED, VerdictClass.DEAD)
"""Classes of jobs that go on: where their ranks are at this moment says nothing."""

Held = tuple[Member, Communicator]


def name_stages(verdict: Verdict, job: Job, namer: StageNamer, ledger: Ledger) -> Verdict:
    """The verdict with roles and stages, as far as they are known; unchanged where nothing is."""
    if not verdict.culprits or namer.learned is None:
        return verdict
    naming = _Naming(job, namer, ledger, verdict.verdict_class)
    culprits = tuple(naming.named(culprit) for culprit in verdict.culprits)
    # Where all places are known already, what was found lies back or goes on: where the others are now says nothing of it.
    past = verdict.verdict_class.slow or namer.by_counts or all(culprit.stage for culprit in verdict.culprits)
    known = {culprit.communicator.hash: culprit.communicator for culprit in reversed(culprits) if culprit.communicator}
    return replace(
        verdict,
        culprits=culprits,
        communicator=known.get(verdict.communicator.hash, verdict.communicator) if verdict.communicator else None,
        stage=verdict.stage or next((c.stage for c in culprits if c.stage), culprits[0].stage),
        evidence=(*verdict.evidence, *(() if past else naming.victim_lines(verdict))),
    )


def name_places(judged: Sequence[tuple[Job, Verdict]]) -> list[Verdict]:
    """Verdicts from memory alone, with the roles and places in the layout that NCCL's counts tell."""
    if not any(verdict.culprits for _, verdict in judged):
        return [verdict for _, verdict in judged]
    namer, samples = StageNamer(), [member.last for job, _ in judged for member in job.members]
    namer.note_samples(samples)
    namer.fall_back(samples)
    return [name_stages(verdict, job, namer, Ledger()) for job, verdict in judged]


def _is_at(culprit: Culprit, member: Member) -> bool:
    return culprit.is_at(member.info.host, member.info.pid, member.rank)


@dataclass(slots=True)
class _Naming:
    job: Job
    namer: StageNamer
    ledger: Ledger
    verdict_class: VerdictClass

    def named(self, culprit: Culprit) -> Culprit:
        """The culprit with the role of its communicator and its stage."""
        reference, namer = culprit.communicator, self.namer
        if reference is None or (culprit.stage and reference.role):
            return culprit
        holders = self._holders(culprit)
        roles = (namer.role_of(member.info.host, member.info.pid, own.address) for member, own in holders)
        role = next((role for role in roles if role is not Role.UNSURE), None)
        if role is None and not namer.by_counts:
            return culprit
        text = culprit.stage
        if not text and not self.verdict_class.slow:
            stage = self._stage(culprit, holders) if not namer.by_counts else None
            stage = stage or self._place(culprit, role or Role.UNSURE)
            text = stage.text() if stage is not None else text
        if role not in (None, Role.UNUSED):
            reference = replace(reference, role=str(role))
        return replace(culprit, communicator=reference, stage=text)

    def _holders(self, culprit: Culprit) -> list[Held]:
        """The members of the culprit's communicator, its own process first."""
        reference = culprit.communicator
        for group in self.job.groups.values():
            if reference is None or f"{group.hash:016x}" != reference.hash or group.nranks != reference.nranks:
                continue
            held = group.members.get(culprit.comm_rank) if culprit.comm_rank is not None else None
            if culprit.pid is None or (held is not None and _is_at(culprit, held[0])):
                others = [pair for rank, pair in group.members.items() if rank != culprit.comm_rank]
                return [held, *others] if held is not None else others
        return []

    def _stage(self, culprit: Culprit, holders: Sequence[Held]) -> Stage | None:
        """Where the culprit is, from its own calls or, without them, where the operation is that others wait in."""
        own = holders[0] if holders and _is_at(culprit, holders[0][0]) else None
        halted = self.verdict_class in HALTED
        if own is not None:
            coming = self._call(own[0], calls_ago=-1)
            if self.verdict_class is VerdictClass.NOT_ENTERED:
                return coming
            if halted or (self.verdict_class is VerdictClass.HARDWARE and culprit.link is None):
                # The host runs ahead of its GPU: the oldest operation that is open is where it is.
                oldest = self._oldest_open(own[0])
                if oldest is not None or halted:
                    return oldest or coming
        # What memory says is not going on is found among the calls by NCCL's own count of them.
        for member, communicator in holders[:ASKED]:
            ago = self._calls_since(member, communicator, culprit.operation)
            if ago is not None:
                return self._at_home(self._call(member, communicator, calls_ago=ago), own)
        for member, communicator in holders[:ASKED]:
            found = self._latest(member, communicator, culprit.operation)
            if found is not None:
                return self._at_home(found, own)
        return None

    def _place(self, culprit: Culprit, role: Role) -> Stage | None:
        """Without calls: the culprit's place in the layout, and the operation where memory shows that it is in it."""
        namer = self.namer
        place = namer.place_of(culprit.host, culprit.pid) if culprit.pid is not None else namer.place_of_rank(culprit.rank)
        if culprit.operation is None or self.verdict_class in (VerdictClass.NOT_ENTERED, *HALTED):
            return place
        return replace(place or Stage(Phase.EITHER), role=role, function=culprit.operation.name)

    def _call(self, member: Member, communicator: Communicator | None = None, *, calls_ago: int = 0) -> Stage | None:
        address = communicator.address if communicator is not None else 0
        return self.namer.stage_of(member.info.host, member.info.pid, address, calls_ago=calls_ago)

    def _latest(self, member: Member, communicator: Communicator, operation: OperationRef | None) -> Stage | None:
        """The latest call on a communicator, of the operation named where one of the last few was."""
        last = [self._call(member, communicator, calls_ago=ago) for ago in range(LATEST)]
        named = (stage for stage in last if stage is not None and operation is not None and stage.function == operation.name)
        return next(named, last[0])

    def _oldest_open(self, member: Member) -> Stage | None:
        """The stage of the first operation, in the order of the calls, that a process has not finished."""
        best: tuple[int, Stage] | None = None
        for operation in member.last.operations:
            number = self.job.find_group(member, operation.comm_address, operation.comm_hash)
            group = self.job.groups.get(number) if number is not None else None
            rank = group.rank_of(member) if group is not None else None
            if group is None or rank is None:
                continue
            communicator = group.members[rank][1]
            ago: int | None = 0
            if not operation.is_point_to_point:
                reference = OperationRef(operation.collective, operation.sequence, operation.protocol or "?")
                ago = self._calls_since(member, communicator, reference)
            if ago is None:
                continue
            found = self.namer.call_of(member.info.host, member.info.pid, communicator.address, calls_ago=ago)
            # Where no pattern is known (the function is not, then) nothing tells which of them is the oldest.
            if found is not None and found[1].function and (best is None or found[0] > best[0]):
                best = found
        return best[1] if best is not None else None

    def _at_home(self, stage: Stage | None, own: Held | None) -> Stage | None:
        """A stage that was read off a peer, with the culprit's own place in pipeline and tensor group."""
        mine = self._call(*own) if stage is not None and own is not None else None
        return stage.at_home_of(mine) if stage is not None and mine is not None else stage

    def _calls_since(self, member: Member, communicator: Communicator, operation: OperationRef | None) -> int | None:
        """How many collectives a rank has called after the one with NCCL's number ``operation.sequence``; ``None`` where unknown.

        Only for what the state plane named (it knows the protocol): sequence numbers of the calls plane count otherwise.
        """
        row = self.ledger.rows.get(self.ledger.place(member.info.host, member.info.pid, communicator.address))
        if row is None or operation is None or operation.sequence is None or not operation.protocol:
            return None
        _, history = self.ledger.history(row)
        at = np.flatnonzero(history["op_count"] == operation.sequence)
        return len(history) - 1 - int(at[-1]) if len(at) else None

    def victim_lines(self, verdict: Verdict) -> list[str]:
        """Where the ranks that wait are: those in one place together."""
        accused, wanted = places(verdict.culprits), set(verdict.victims)
        texts: dict[str, list[int]] = defaultdict(list)
        for member in self.job.members:
            rank = member.rank
            if rank is None or rank not in wanted or stands_in(accused, member.info.host, member.info.pid, rank):
                continue
            stage = self._call(member)
            if stage is not None:
                texts[replace(stage, tensor_index=-1).text()].append(rank)
        lines = sorted(texts.items(), key=lambda item: (-len(item[1]), item[1]))
        shown = [f"latest call of rank{_s(len(ranks))} {compressed(ranks)}: {text}" for text, ranks in lines[:SHOWN]]
        if len(lines) > SHOWN:
            more, elsewhere = sum(len(ranks) for _, ranks in lines[SHOWN:]), len(lines) - SHOWN
            shown.append(f"… and {more} more rank{_s(more)} in {elsewhere} other place{_s(elsewhere)}")
        return shown


def _s(number: int) -> str:
    return "s" if number > 1 else ""
