"""Communicators that are being created and do not get ready: which ranks have come, and which have not.

C4 names initialisation faults as its blind spot (section on limitations). NCCL sets hash, rank and size of a communicator before
the ranks meet (``src/init.cc``, ``ncclCommInitRankFunc``), so the waiting ranks can be read while the creation hangs.
"""

from __future__ import annotations

from collections.abc import Sequence

from ncclwatch.engine import explain
from ncclwatch.engine.job import Group, Job, Member
from ncclwatch.model.state import Communicator
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass

READY_STATES = frozenset({None, "ncclSuccess"})


def judge_creation(job: Job, loners: Sequence[Member], still: float, patience: float, time: float) -> Verdict | None:
    """A verdict where a communicator of the job is in creation; ``None`` where none is.

    ``loners`` are observed processes that hold no communicator: a missing rank may be one of them. Creation of a large job takes
    its time, so nobody is accused before nothing has moved for ``patience`` seconds.
    """
    groups = [group for group in job.groups.values() if any(_creating(own) for _, own in group.members.values())]
    if not groups:
        return None
    group = max(groups, key=lambda candidate: candidate.nranks)
    missing = group.missing
    found = {rank: member for rank in missing if (member := _process_of(group, rank, [*job.members, *loners])) is not None}
    waiting = ", ".join(member.label for _, (member, _) in sorted(group.members.items())[:8])
    evidence = [f"waiting in the creation of communicator {group.hash:016x} ({group.nranks} ranks): {waiting}"]
    evidence += [f"{member.label} has not come" for member in found.values()]
    unseen = [rank for rank in missing if rank not in found]
    if unseen:
        names = ", ".join(f"rank {rank}" for rank in unseen[:16])
        evidence.append(f"{names} of this communicator {'was' if len(unseen) == 1 else 'were'} not observed")
        # Who says nothing of its rank may belong to any job: it is worth a look, and no more.
        nameless = [member.label for member in loners if member.info.rank is None and not member.gone]
        if nameless:
            some = ", ".join(nameless[:8])
            evidence.append(f"without any communicator, and of unknown rank, so perhaps among those: {some}")
    if not missing:
        evidence.append("all ranks have come")
    if still < patience or not found:
        return explain.in_creation(job, group, evidence, still, time)
    culprits = [_culprit(member, group, rank) for rank, member in found.items()]
    victims = [member.index for member, _ in group.members.values()]
    confidence = 0.8 if not unseen else 0.5
    return explain.build(job, VerdictClass.INIT_HANG, culprits, victims, evidence, still=still, time=time, confidence=confidence)


def _creating(communicator: Communicator) -> bool:
    return communicator.init_state not in READY_STATES and not communicator.aborted


def _process_of(group: Group, rank: int, candidates: Sequence[Member]) -> Member | None:
    """The observed process that should be a missing rank: only evident where the communicator spans the job."""
    held = {member.index for member, _ in group.members.values()}
    for member in candidates:
        if member.index not in held and member.info.rank == rank and member.info.world_size == group.nranks:
            return member
    return None


def _culprit(member: Member, group: Group, rank: int) -> Culprit:
    return Culprit(
        rank=member.info.rank,
        comm_rank=rank,
        host=member.info.host,
        pid=member.info.pid,
        gpu=None,
        communicator=group.reference(),
        reason="has not come to the creation of the communicator",
    )
