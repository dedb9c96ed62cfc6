"""Made-up rank logs of a small job, and the session that judges what a format reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.ingest.base import Ingested
from ncclwatch.model.verdict import Verdict

BEGIN_S = 1_755_590_100


def line(time_s: float, rank: int, name: str, count: int, stream: int, number: int, *, save: int = 1, group: int = 0) -> str:
    """One line of a rank log; ``time_s`` after the beginning."""
    nanoseconds = round(time_s * 1e9)
    seconds, rest = BEGIN_S + nanoseconds // 10**9, nanoseconds % 10**9
    text = f"[save_count {save}] [{seconds}.{rest:09d}] [Rank {rank}] Fun {name} Data {count} stream {stream:#x} opCount {number}"
    return f"{text} groupHash {group}\n" if group else f"{text}\n"


def write(folder: Path, lines: Mapping[int, Sequence[str]]) -> list[Path]:
    """Files of all ranks."""
    paths = []
    for rank, own in lines.items():
        paths.append(folder / f"rank_{rank}.log")
        paths[-1].write_text("".join(own), "ascii")
    return paths


def tensor_job(
    ranks: int = 6, iterations: int = 12, *, stops: dict[int, int] | None = None, slow: tuple[int, int] | None = None,
    group: bool = False, calls: int = 24,
) -> dict[int, list[str]]:  # fmt: skip
    """A job of tensor groups of two: ``calls`` AllReduces of each group an iteration, then one of all ranks.

    ``stops``: by rank, after how many calls on its tensor group it calls nothing more; the others go on until they need it.
    ``slow``: (rank, iteration from which on it calls 60 ms later than its fellow).
    """
    made: dict[int, list[str]] = {rank: [] for rank in range(ranks)}
    stopped = dict(stops or {})
    stuck: dict[int, int] = {}
    for rank, after in stopped.items():
        stuck[rank ^ 1] = after + 1  # its fellow calls one operation more, and waits
    time, done = 1.0, False
    for iteration in range(iterations):
        late = slow is not None and iteration >= slow[1]
        for call in range(calls):
            number = iteration * calls + call
            time += 0.02 + (0.06 if late else 0.0)
            for rank in range(ranks):
                if number >= min(stopped.get(rank, 1 << 30), stuck.get(rank, 1 << 30)):
                    done = True
                    continue
                extra = 0.06 if late and slow is not None and rank == slow[0] else 0.0
                tag = 500 + rank // 2 if group else 0
                own_time = time + extra + 1e-5 * rank + 0.011 * (rank // 2)
                made[rank].append(line(own_time, rank, "AllReduce", 4096, 0x5000 + rank * 0x100, number, group=tag))
        time += 0.05
        for rank in range(ranks):
            if rank in stopped and (iteration + 1) * calls > stopped[rank]:
                continue
            if rank in stuck and (iteration + 1) * calls > stuck[rank]:
                continue
            tag = 900 if group else 0
            made[rank].append(line(time + 1e-5 * rank, rank, "AllReduce", 1 << 20, 0x5010 + rank * 0x100, iteration, group=tag))
        if done:
            break
    return made


def bare(lines: Mapping[int, Sequence[str]]) -> dict[int, list[str]]:
    """The same as older versions write it, without the number of the save and without ``opCount``."""
    return {rank: [text.split("] ", 1)[1].split(" opCount")[0] + "\n" for text in own] for rank, own in lines.items()}


def replicated_job(
    slow: int | None = None, *, late: int | None = None, pauses: int | None = None, groups: int = 4
) -> dict[int, list[str]]:  # fmt: skip
    """Tensor groups of two that do the same, and sum up gradients by one AllReduce of all ranks each iteration.

    ``slow``: the group that takes three times as long between its operations, whose ranks call together all the same. ``late``:
    the rank that calls the first six operations of each iteration half a second after its fellow. ``pauses``: the rank that calls
    nothing for two seconds in the middle of iteration 20.
    """
    made: dict[int, list[str]] = {rank: [] for rank in range(2 * groups)}
    begin = 1.0
    for iteration in range(40):
        ends = []
        for group in range(groups):
            time = begin
            for call in range(24):
                time += 0.03 if group == slow else 0.01
                behind = 0.5 if late is not None and group == late // 2 and call < 6 else 0.0
                if pauses is not None and group == pauses // 2 and (iteration, call) == (20, 12):
                    behind = 2.0
                for rank in (2 * group, 2 * group + 1):
                    own = time + 1e-5 * rank + (behind if rank in (late, pauses) else 0.0)
                    made[rank].append(line(own, rank, "AllReduce", 4096, 0x5000 + rank * 0x100, 24 * iteration + call))
                time += behind if call in (5, 12) else 0.0
            ends.append(time)
        begin = max(ends) + 0.02
        for rank, lines in made.items():
            own = ends[rank // 2] + 0.001 + 1e-5 * rank
            lines.append(line(own, rank, "AllReduce", 1 << 20, 0x5010 + rank * 0x100, iteration))
    return made


def judged(job: Ingested, *, ask: bool = True) -> Iterator[Verdict]:
    """What stands after every look, and last what is said to who asks."""
    session, now = DiagnosisSession(), 0
    for now, batches in groupby(job.batches, key=lambda batch: batch.time_ns):
        for batch in batches:
            session.feed(batch, now, source=batch.host)
        session.judge(now)
        if session.verdict is not None:
            yield job.amend(session.verdict)
    if ask:
        session.ask()
        yield from map(job.amend, session.judge(now).answers[:1])
