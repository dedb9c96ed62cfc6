"""Ranks whose process does not answer NCCL's RAS, and what a verdict says of them.

RAS is a thread of its own in every process, on sockets of its own: it answers while the program hangs in a collective. Who does
not answer is stopped or has ended, or its host or the network to it is gone; RAS cannot tell which. After 60 s without a sign of
life it considers a process dead (RAS_PEER_DEAD_TIMEOUT, ``src/ras/ras_internal.h``), which one that is stopped is as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ncclwatch.ingest.ras_answer import RasProcess
from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass

SILENT = "its process does not answer NCCL's RAS, which answers while a program hangs"
LOST = "its process does not answer NCCL's RAS, and a peer reports a remote error: the connection with it is lost"
DEAD = "NCCL's RAS has not reached its process for a minute and considers it dead"
UNTOLD = "whether a process that does not answer RAS is stopped, has ended, or is cut off: RAS cannot tell"
NO_RANKS = "which rank it was: no communicator is left in the answer"
CONFIDENCE_SILENT, CONFIDENCE_DEAD = 0.6, 0.8
"""Chosen: one round of questions may meet a busy host; a minute of them does not, nor loses it its connections."""
SHOWN, NAMED = 12, 4


@dataclass(frozen=True, slots=True)
class Silent:
    """One such rank, of the largest communicator that misses it. ``lost``: a rank of a communicator in which it is the only one
    that does not answer reports ``ncclRemoteError``: the kernel of an ended process closes its sockets, that of a stopped one
    does not.
    """

    rank: int
    host: str
    pid: int
    dead: bool
    lost: bool
    hash: int
    size: int

    @property
    def reason(self) -> str:
        """Why it is named."""
        return DEAD if self.dead else LOST if self.lost else SILENT

    @property
    def line(self) -> str:
        """As a line of evidence."""
        who = f" (pid {self.pid} on {self.host})" if self.pid else ""
        return f"rank {self.rank} of communicator {self.hash:016x}{who}: {self.reason}"


@dataclass(frozen=True, slots=True)
class SilentRanks:
    """All of one answer. To the engine they are processes that stand still (state T), for lack of a letter of their own;
    ``amend`` says what is really known.
    """

    ranks: Sequence[Silent]

    def amend(self, verdict: Verdict) -> Verdict:
        """A verdict on processes that stand still, in the words of RAS."""
        if verdict.verdict_class is not VerdictClass.STOPPED:
            return verdict
        reasons = {(one.pid, one.rank): one.reason for one in self.ranks}
        gone = [one for one in self.ranks if one.dead or one.lost]
        culprits = tuple(
            replace(one, reason=reasons.get((one.pid or 0, one.comm_rank or 0), SILENT), observed=False)
            for one in verdict.culprits
        )
        errors = tuple(line for line in verdict.evidence if " reports nccl" in line)
        return replace(
            verdict,
            verdict_class=VerdictClass.DEAD if gone else VerdictClass.STOPPED,
            summary=_summary(culprits),
            culprits=culprits,
            confidence=CONFIDENCE_DEAD if len(gone) == len(self.ranks) else CONFIDENCE_SILENT,
            evidence=(*(one.line for one in self.ranks[:SHOWN]), *errors[:SHOWN]),
            unobserved=(*verdict.unobserved, UNTOLD),
            next_steps=tuple(_steps(culprits)),
            planes=("ras",),
            trail=(),
        )


def without_ranks(processes: Sequence[RasProcess], verdict: Verdict) -> Verdict:
    """Processes that do not answer, where no communicator is left that would tell their ranks: the others have given it up."""
    gone = [one for one in processes if one.dead] or processes
    dead = gone[0].dead
    reason = DEAD if dead else SILENT
    culprits = tuple(Culprit(None, None, one.host, one.pid, one.device, reason=reason, observed=False) for one in gone[:SHOWN])
    return replace(
        verdict, verdict_class=VerdictClass.DEAD if dead else VerdictClass.STOPPED, summary=_summary(culprits), culprits=culprits,
        confidence=CONFIDENCE_DEAD if dead else CONFIDENCE_SILENT, unobserved=(*verdict.unobserved, UNTOLD, NO_RANKS),
        next_steps=tuple(_steps(culprits)),
    )  # fmt: skip


def _summary(culprits: Sequence[Culprit]) -> str:
    names = [_name(one) for one in culprits[:NAMED]]
    names += [f"{len(culprits) - NAMED} more"] if len(culprits) > NAMED else []
    holds = "holds" if len(culprits) == 1 else "hold"
    reasons = {one.reason for one in culprits}
    return f"{', '.join(names)} {holds} up the job: {' or '.join(sorted(reasons))}"


def _name(one: Culprit) -> str:
    if one.rank is None:
        return f"pid {one.pid} on {one.host}"
    return f"rank {one.rank} ({one.host}, pid {one.pid})" if one.pid else f"rank {one.rank}"


def _steps(culprits: Sequence[Culprit]) -> list[str]:
    first = next((one for one in culprits if one.pid), None)
    if first is None:
        return ["look whether the processes of these ranks still run, and whether their hosts can be reached"]
    return [
        f"on {first.host}: `ps -o stat,wchan,cmd -p {first.pid}`; T is stopped (`kill -CONT {first.pid}` lets it go on), Z or "
        "nothing means that it has ended (`dmesg -T`, its launcher's exit status)",
        f"where {first.host} cannot be reached, its network or the host is down",
    ]
