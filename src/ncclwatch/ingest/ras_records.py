"""Answers of RAS as records: a process a sample, its communicators with NCCL's counts of each collective.

One answer is one look at a job. Several of one job, by their times, tell whether anything moved between them. One alone cannot:
it is taken as of a job that stands still, for that is when somebody asks, and the verdict says so. What joins the ranks is not
in an answer: every connection is one that cannot be looked into.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice

import msgspec

from ncclwatch.collect.batch import NodeBatch, PlaneState
from ncclwatch.ingest.base import Ingested
from ncclwatch.ingest.moment import CONFIDENCE, STANDSTILL_S, UNTOLD
from ncclwatch.ingest.ras_answer import RasAnswer, RasCommunicator, RasMissing, RasPlace, RasRank
from ncclwatch.ingest.ras_counts import differences, lag
from ncclwatch.ingest.ras_silent import Silent, SilentRanks, without_ranks
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import Communicator, Direction, ProcessInfo, ProcessSample, Transport, VersionSource
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.text import compressed

SECOND = 10**9
NO_COUNTS = "whether the job moves: the text names no counts where all ranks are alike (JSON does)"
REMOTE_ERROR = "ncclRemoteError"
MAX_LINKS = 16
"""Peers that a rank is shown to be joined with: those of which there is no data come first."""
SHOWN = 8
BLIND = (
    "RAS counts what was launched: what is open, how far it got and over which transport is not in its answers",
    "RAS does not count sends, receives, and what CUDA graphs replay",
)
_NAMELESS = "unnamed"
ENDED = "the newest answer holds no communicator any more: the job has ended or given up since; it is judged by the one before"
ASK_JSON = "ask for JSON, twice, some seconds apart (`ncclras -f json`): it has the counts of every rank, which tell a standstill"
ASK_AGAIN = "ask RAS again some seconds later and give both answers: counts that stay tell a standstill"

Who = tuple[str, int, int]
"""Address of the host, pid, and the device where a process drives several."""


def jobs_of(answers: Sequence[RasAnswer], *, apart_ns: Sequence[int] | None = None) -> list[Ingested]:
    """The jobs that answers are of, each with its answers in order of time. ``apart_ns``: the moments at which they came, on one
    clock, where that is known better than from their time stamps.
    """
    moments = apart_ns if apart_ns is not None else [round(answer.time_s * SECOND) for answer in answers]
    ordered = sorted(zip(moments, answers, strict=True), key=lambda pair: pair[0])
    return [_job(part) for part in _by_job(ordered)]


def _by_job(ordered: Sequence[tuple[int, RasAnswer]]) -> list[list[tuple[int, RasAnswer]]]:
    """Answers that share a communicator are of one job: RAS joins the processes of one job and no others. One whose text names no
    communicator is of the only job there is; where there are several it stands by itself.
    """
    jobs: list[tuple[set[int], list[tuple[int, RasAnswer]]]] = []
    nameless = [one for one in ordered if not one[1].communicators]
    for moment, answer in ordered:
        own = {communicator.hash for communicator in answer.communicators}
        joined = [job for job in jobs if own & job[0]]
        if own:
            jobs = [job for job in jobs if not own & job[0]]
            jobs.append((own.union(*(job[0] for job in joined)), [*(one for job in joined for one in job[1]), (moment, answer)]))
    if len(jobs) > 1:
        jobs += [(set(), [one]) for one in nameless]
    elif nameless:
        jobs = [(set(), [*(jobs[0][1] if jobs else ()), *nameless])]
    return [sorted(found, key=lambda pair: pair[0]) for _, found in jobs]


def _job(looks: Sequence[tuple[int, RasAnswer]]) -> Ingested:
    held = [look for look in looks if look[1].communicators or look[1].sound]
    gone = bool(held) and held[-1] is not looks[-1]
    looks = held if gone else looks
    answers = [answer for _, answer in looks]
    notes = [*([ENDED] if gone else []), *_notes(answers)]
    problems = [problem for answer in answers for problem in answer.problems]
    first, newest = looks[0][0], answers[-1]
    times = [moment - first for moment, _ in looks]
    if len(looks) == 1:
        looks, times = [*looks, *looks], [0, STANDSTILL_S * SECOND]
    batches = [_batch(answer, number, time) for number, (time, (_, answer)) in enumerate(zip(times, looks, strict=True))]
    silent = SilentRanks(_silent(newest))
    if len(silent.ranks) > len(batches[-1].samples):
        notes.append(
            f"{len(silent.ranks)} ranks do not answer RAS, more than do: this side of the network may be the one that is cut off"
        )
    elif silent.ranks:
        halted = tuple(_halted_samples(newest))
        batches = [_with(batch, halted) for batch in batches]
    amend = partial(_amend, silent, _untold(answers), newest)
    hashes = sorted(f"{communicator.hash:016x}" for communicator in newest.communicators)
    # What a communicator is for is told by what is called on it beside others.
    counted = sum(any(rank.counts for rank in one.ranks) for one in newest.communicators)
    job = hashes[0] if hashes else newest.source
    return Ingested(batches, problems, BLIND, notes, job=job, stages=counted > 1, amend=amend)


def _untold(answers: Sequence[RasAnswer]) -> str:
    """Why nobody knows whether the job moves; empty where counts of two answers tell."""
    if len(answers) == 1:
        return UNTOLD
    counted = (any(rank.counts for one in answer.communicators for rank in one.ranks) for answer in answers)
    return "" if all(counted) else NO_COUNTS


def _amend(silent: SilentRanks, untold: str, newest: RasAnswer, verdict: Verdict) -> Verdict:
    """A verdict as answers of RAS support it; where nobody is named, whose counts differ."""
    told = replace(silent.amend(verdict), planes=("ras",))
    if not newest.communicators:
        # Where communicators are well without them, dead processes are of the past.
        alone = newest.processes and not newest.sound
        told = without_ranks(newest.processes, told) if alone else _all_alike(newest, told)
    if untold:
        told = _without_moving(told, newest)
    told = _without_nameless(told)
    if told.verdict_class is VerdictClass.UNKNOWN:
        told = replace(told, evidence=(*told.evidence, *differences(newest)))
    if not untold:
        return told
    confidence = min(told.confidence, CONFIDENCE) if told.culprits else told.confidence
    return replace(told, confidence=confidence, unobserved=(untold, *told.unobserved))


def _all_alike(answer: RasAnswer, verdict: Verdict) -> Verdict:
    """An answer in text that names no rank: what it does say."""
    if not answer.sound:
        return verdict
    said = "; ".join(answer.sound[:SHOWN])
    return replace(verdict, summary=f"RAS names no rank: {said}", next_steps=(ASK_JSON,))


def _without_moving(verdict: Verdict, answer: RasAnswer) -> Verdict:
    """One look at ranks that differ as in a job that runs: most of them are behind a few, or several are by a single call."""
    communicator = verdict.communicator
    if verdict.verdict_class is not VerdictClass.NOT_ENTERED or communicator is None:
        return verdict
    size, behind = communicator.nranks, {one.comm_rank for one in verdict.culprits if one.comm_rank is not None}
    by_one = len(behind) > 1 and lag(answer, int(communicator.hash, 16), behind) == 1
    if not behind or (2 * len(behind) <= size and not by_one):
        return verdict
    ahead = compressed(sorted(set(range(size)) - behind))
    return replace(
        verdict, verdict_class=VerdictClass.UNKNOWN, culprits=(), confidence=0.0, next_steps=(ASK_AGAIN,),
        summary=f"ranks {ahead} have launched more than the other {len(behind)} of {size}: a job that runs looks so, too",
    )  # fmt: skip


def _without_nameless(verdict: Verdict) -> Verdict:
    """Without what stands for the host and the pid of ranks that a text does not name."""

    def say(text: str) -> str:
        return text.replace(f" ({_NAMELESS}, pid 0)", "")

    culprits = tuple(
        replace(one, host="", pid=None, reason=say(one.reason)) if one.host == _NAMELESS else one for one in verdict.culprits
    )
    return replace(verdict, culprits=culprits, summary=say(verdict.summary), evidence=tuple(map(say, verdict.evidence)))


def _notes(answers: Sequence[RasAnswer]) -> Iterator[str]:
    newest = answers[-1]
    if len(answers) == 1:
        yield f"one answer of RAS ({newest.source}): taken as of a job that stands still; a second one tells whether it moves"
    for line in newest.sound:
        yield f"RAS: {line}: its text names no rank of them"
    if newest.timeouts:
        yield f"RAS met {newest.timeouts} timeouts while it asked the processes"
    named = {(one.host, one.pid) for communicator in newest.communicators for one in communicator.missing}
    for process in newest.processes[:SHOWN]:
        if (process.host, process.pid) not in named:
            yield f"pid {process.pid} on {process.host} {_silence(process.dead)}"
    for communicator in newest.communicators:
        left = (one for one in communicator.missing if not one.unresponsive and not one.dead)
        for one in islice(left, SHOWN):
            where = f"rank {one.rank} of communicator {communicator.hash:016x} (pid {one.pid} on {one.host or _NAMELESS})"
            yield f"{where} answers and does not hold it: it has destroyed or aborted it"


def _silence(dead: bool) -> str:
    return "is out of NCCL's reach for a minute: RAS considers it dead" if dead else "does not answer RAS"


def _silent(answer: RasAnswer) -> list[Silent]:
    """Ranks whose process does not answer, each once, as the largest communicator numbers them."""
    found: dict[object, Silent] = {}
    for communicator in sorted(answer.communicators, key=lambda one: -one.size):
        if not communicator.ranks:
            continue
        silent = [one for one in communicator.missing if one.unresponsive or one.dead]
        lost = len(silent) == 1 and any(rank.async_error == REMOTE_ERROR for rank in communicator.ranks)
        for one in silent:
            who = (one.host, one.pid, one.device) if one.pid else (communicator.hash, one.rank)
            own = Silent(one.rank, one.host, one.pid, bool(one.dead), lost, communicator.hash, communicator.size)
            known = found.setdefault(who, own)
            found[who] = replace(known, lost=known.lost or lost)
    return list(found.values())


# --- samples ------------------------------------------------------------------------------------------------------------


def _batch(answer: RasAnswer, number: int, time_ns: int) -> NodeBatch:
    wall_ns = round(answer.time_s * SECOND)
    samples = tuple(_samples(answer, time_ns, wall_ns))
    return NodeBatch(
        host="RAS", boot_id=f"ras {answer.source}", sequence=number, time_ns=time_ns, wall_ns=wall_ns, looked=True,
        interval_s=float(STANDSTILL_S), samples=samples, planes=(PlaneState("ras", True),),
    )  # fmt: skip


def _samples(answer: RasAnswer, time_ns: int, wall_ns: int) -> Iterator[ProcessSample]:
    """The processes that answered."""
    held: dict[Who, list[Communicator]] = defaultdict(list)
    several = _several_devices(answer.communicators)
    for number, communicator in enumerate(answer.communicators):
        missing = [one.rank for one in communicator.missing]
        for rank in communicator.ranks:
            held[_who(rank, communicator, several)].append(_communicator(rank, communicator, number, missing))
    for who, communicators in held.items():
        yield ProcessSample(_process(who, answer), time_ns, wall_ns, 0, "", tuple(communicators))


def _halted_samples(answer: RasAnswer) -> Iterator[ProcessSample]:
    """The processes that did not answer, as ones that stand still."""
    held: dict[Who, list[Communicator]] = defaultdict(list)
    several = _several_devices(answer.communicators)
    for number, communicator in enumerate(answer.communicators):
        for one in communicator.missing:
            if one.unresponsive or one.dead:
                held[_who(one, communicator, several)].append(_communicator(one, communicator, number, ()))
    for who, communicators in held.items():
        yield ProcessSample(_process(who, answer), 0, 0, 0, "T", tuple(communicators))


def _with(batch: NodeBatch, halted: Sequence[ProcessSample]) -> NodeBatch:
    """The same look with processes that do not answer, whatever they said in an earlier one."""
    silent = {sample.process.key for sample in halted}
    told = (replace(sample, time_ns=batch.time_ns, wall_ns=batch.wall_ns) for sample in halted)
    samples = (*(sample for sample in batch.samples if sample.process.key not in silent), *told)
    return msgspec.structs.replace(batch, samples=samples)


def _several_devices(communicators: Iterable[RasCommunicator]) -> set[tuple[str, int]]:
    """Processes that drive more than one device: each is a rank by itself."""
    ranks = chain.from_iterable(chain[RasPlace](one.ranks, one.missing) for one in communicators)
    seen = {(rank.host, rank.pid, rank.device) for rank in ranks if rank.pid and rank.device is not None}
    times = Counter((host, pid) for host, pid, _ in seen)
    return {process for process, devices in times.items() if devices > 1}


def _who(rank: RasPlace, communicator: RasCommunicator, several: set[tuple[str, int]]) -> Who:
    if not rank.pid:
        # Nobody knows which process it is: of another communicator's ranks it may be any.
        return f"{_NAMELESS}{communicator.hash:x}", 0, rank.rank
    return rank.host, rank.pid, (rank.device or 0) if (rank.host, rank.pid) in several else 0


def _process(who: Who, answer: RasAnswer) -> ProcessInfo:
    host, pid, part = who
    known = VersionSource.VERSION if answer.version is not None else VersionSource.UNKNOWN
    return ProcessInfo(
        ProcessKey(f"ras {host}", pid, 0, "", part), host if pid else _NAMELESS, "", (), "", answer.version, known,
    )  # fmt: skip


def _communicator(rank: RasRank | RasMissing, communicator: RasCommunicator, number: int, missing: Sequence[int]) -> Communicator:
    peers = [*missing[: MAX_LINKS - 1], (rank.rank + 1) % communicator.size]
    own = Communicator(
        address=number + 1, hash=communicator.hash, rank=rank.rank, nranks=communicator.size, device=rank.device, finder="ras",
        transports=tuple((0, peer, Direction.SEND, Transport.UNKNOWN) for peer in peers if peer != rank.rank),
    )  # fmt: skip
    if isinstance(rank, RasMissing):
        return own
    return replace(
        own,
        sequence_numbers=dict(sorted((rank.counts or {}).items())),
        init_state=rank.init_state,
        async_result=rank.async_error,
        finalize_called=rank.finalize_called,
        destroyed=rank.destroyed,
        aborted=rank.aborted,
    )
