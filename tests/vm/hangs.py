"""Hangs of real NCCL over InfiniBand verbs, judged live and afterwards: the guest's column of the matrix of real runs.

``python -m vm.hangs --json FILE`` boots the guest and plays every kind with every release in it; a row a judgement. With
``--inside`` (used by itself) it plays in this machine, which has to be the guest.

Three ranks on two ports: rank 1 alone is on port ``b``, and every fault is rank 1's.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ncclwatch.cli.live import LiveSession
from ncclwatch.model.verdict import Verdict, VerdictClass
from testbed.job import ROOT, VERSIONS, Job, available
from vm.errors import GuestError
from vm.fabric import Fabric
from vm.guest import run

RANKS = 3
VICTIM = 1
LATE_S = 6.0
"""Who comes afterwards comes this long after the job has come to stand."""
JUDGED_S = 45.0


@dataclass(frozen=True, slots=True)
class Hang:
    """A kind of hang: what brings it about, and the classes of verdict that are right. A port that is down may also be named by
    an end of its connections, or by the error NCCL reports once the adapter gives up.
    """

    name: str
    classes: tuple[str, ...]
    fault: str = ""
    act: Callable[[Job, Fabric], None] | None = None
    undo: Callable[[Job, Fabric], None] | None = None
    unseen_after: bool = False
    """Who comes afterwards finds nothing of the victim, whose host is made up, so that nobody knows it to be seen whole: it is
    right to say that the waits lead to a rank that was not observed."""
    last: bool = False
    """Played after all others: a port that goes down below SoftRoCE may leave the guest's kernel spinning."""
    by_link: bool = False
    """A link with one end at the victim is right as well."""


HANGS = {
    hang.name: hang
    for hang in (
        Hang("stopped", ("stopped",), act=lambda job, _: job.freeze(VICTIM), undo=lambda job, _: job.thaw(VICTIM)),
        # SoftRoCE gives a queue pair up as soon as its own port is down: the job does not go on when it is up again.
        Hang("link-down", ("hardware", "error"), act=lambda _, fabric: fabric.set_down(fabric.b), last=True, by_link=True),
        Hang("killed", ("dead",), act=lambda job, _: job.kill(VICTIM), unseen_after=True),
        Hang("never-enters", ("not-entered",), fault="stuck"),
        Hang("stalled-proxy", ("hardware",), fault="stall_proxy"),
    )
}


@dataclass(frozen=True, slots=True)
class Row:
    """One judgement. ``right`` is that of class and place; ``latency_s`` counts from the fault (live) or from attaching."""

    hang: str
    nccl: str
    attach: str
    right: bool
    said: str
    named: tuple[int | None, ...]
    latency_s: float | None
    summary: str
    seed: int
    evidence: tuple[str, ...] = ()
    """What a verdict that is not right was built on."""


def is_right(hang: Hang, verdict: Verdict, attach: str = "live") -> bool:
    """Right class, and the victim or, where that may be, a link with one end at it: nobody else."""
    if hang.unseen_after and attach == "post-hang" and verdict.verdict_class is VerdictClass.UNKNOWN:
        return f"rank {VICTIM}" in verdict.summary and "not observed" in verdict.summary
    if verdict.verdict_class not in hang.classes:
        return False
    links = [culprit.link or verdict.link for culprit in verdict.culprits]
    if any(link is None for link in links):
        return {culprit.rank for culprit in verdict.culprits} == {VICTIM}
    return hang.by_link and bool(links) and all(link is not None and VICTIM in (link.source, link.destination) for link in links)


def watch(pids: Sequence[int], timeout: float, began: float) -> tuple[Verdict | None, float]:
    """Attach now, with ``--all``, and look until somebody is accused; the verdict, and the seconds since ``began`` it took."""
    session = LiveSession(every=True)
    try:
        session.start(pids, calls=False)
        return until_accused(session, timeout, began)
    finally:
        session.close()


def until_still(session: LiveSession, job: Job, still_s: float = 1.0, timeout: float = 120) -> None:
    """Look on until no rank of the job gets any further: a fault of the program begins when the program has come to it."""
    deadline = time.monotonic() + timeout
    reached, since = [-1], time.monotonic()
    while time.monotonic() < min(deadline, since + still_s):
        session.step()
        if (now := [job.progress(rank) for rank in range(RANKS)]) != reached:
            reached, since = now, time.monotonic()


def until_accused(session: LiveSession, timeout: float, began: float) -> tuple[Verdict | None, float]:
    """The same for a session that runs already."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        session.step(until=deadline)
        verdict = session.verdict
        if verdict is not None and verdict.verdict_class.accuses:
            return verdict, time.monotonic() - began
    return session.verdict, timeout


def row(hang: Hang, nccl: str, attach: str, seed: int, found: tuple[Verdict | None, float]) -> Row:
    """What is kept of a judgement."""
    verdict, latency = found
    if verdict is None:
        return Row(hang.name, nccl, attach, False, "", (), None, "nothing was said", seed)
    named = tuple(culprit.rank for culprit in verdict.culprits)
    right = is_right(hang, verdict, attach)
    why = () if right else (*verdict.evidence, *verdict.unobserved)
    return Row(hang.name, nccl, attach, right, str(verdict.verdict_class), named, round(latency, 1), verdict.summary, seed, why)


def strike(hang: Hang, job: Job, fabric: Fabric, nccl: str, seed: int) -> Iterator[Row]:
    """Watch a running job, let the fault happen, and judge live and then anew, as who comes afterwards."""
    session = LiveSession(every=True)
    try:
        session.start(job.pids, calls=False)
        quiet_until = time.monotonic() + 2.0 + random.Random(seed).random()
        while time.monotonic() < quiet_until:
            session.step(until=quiet_until)
            if session.verdict is not None and session.verdict.verdict_class.accuses and not hang.fault:
                yield row(hang, nccl, "false alarm", seed, (session.verdict, 0.0))
                return
        if hang.act is not None:
            hang.act(job, fabric)
        else:
            until_still(session, job)
        began = time.monotonic()
        yield row(hang, nccl, "live", seed, until_accused(session, JUDGED_S, began))
    finally:
        session.close()
    time.sleep(max(0.0, began + LATE_S - time.monotonic()))
    alive = [job.pid(rank) for rank in range(RANKS) if job.alive(rank)]
    yield row(hang, nccl, "post-hang", seed, watch(alive, JUDGED_S, time.monotonic()))
    if hang.undo is not None:
        hang.undo(job, fabric)
        job.wait_progress(2, timeout=120)


def play(fabric: Fabric, nccl: str, hangs: Sequence[Hang], seed: int) -> Iterator[Row]:
    """Several hangs: those that can be undone precede another one in its job, all others have a job of their own."""
    undone = [hang for hang in hangs if hang.undo is not None]
    ending = [hang for hang in hangs if hang.undo is None]
    # A fault of the program begins by itself, so it shares its job with nobody.
    ending.sort(key=lambda hang: (hang.last, bool(hang.fault)))
    shared = [*undone, *[hang for hang in ending[:1] if not hang.fault]]
    batches = [shared] if shared else []
    batches += [[hang] for hang in ending if hang not in shared]
    for batch in batches:
        extra = [text for hang in batch if hang.fault for text in ("--fault", f"{hang.fault}:rank={VICTIM},at=200")]
        # A long timeout of the adapter: what is judged is a hang, not the error that ends it.
        with fabric.job(nccl, RANKS, count=1 << 14, extra=extra, env={"NCCL_IB_TIMEOUT": "21"}, start_timeout=240) as job:
            try:
                for hang in batch:
                    yield from strike(hang, job, fabric, nccl, seed)
            finally:
                fabric.set_up()


def column(versions: Sequence[str], names: Sequence[str], *, seed: int = 1, timeout: float = 5400) -> list[Row]:
    """Boot the guest, play in it, and return its rows; what ``python -m score --real`` and ``make eval-full`` may call.

    A guest that went down on the way leaves the rows it had made. Raises GuestUnavailableError where the guest cannot run and
    GuestError where it made none.
    """
    rows: list[Row] = []

    def take(line: str) -> None:
        if line.startswith("row "):
            rows.append(Row(**json.loads(line[4:])))
        print(line, file=sys.stderr, flush=True)

    command = [sys.executable, "-m", "vm.hangs", "--inside", "--seed", str(seed)]
    command += ["--versions", *versions, "--hangs", *names]
    environment = {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'tests'}"}
    try:
        run(command, timeout=timeout, cwd=ROOT, environment=environment, on_line=take)
    except GuestError as error:
        if not rows:
            raise
        print(f"vm.hangs: the guest did not come to its end: {error}", file=sys.stderr)
    return rows


def main() -> int:
    """Exit status 0 when every judgement was right."""
    parser = argparse.ArgumentParser(prog="vm.hangs", description="Hangs over InfiniBand verbs, in the guest.")
    parser.add_argument("--inside", action="store_true", help="this machine is the guest")
    parser.add_argument("--versions", nargs="*", default=[version for version in VERSIONS if available(version)])
    parser.add_argument("--hangs", nargs="*", default=list(HANGS), choices=list(HANGS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write all rows here")
    options = parser.parse_args()
    if options.inside:
        fabric = Fabric.create()
        rows = []
        for version in options.versions:
            for one in play(fabric, version, [HANGS[name] for name in options.hangs], options.seed):
                rows.append(one)
                print("row " + json.dumps(asdict(one)), flush=True)
    else:
        try:
            rows = column(options.versions, options.hangs, seed=options.seed)
        except GuestError as error:
            print(f"vm.hangs: {error}", file=sys.stderr)
            return 1
        for one in rows:
            when = "" if one.latency_s is None else f" after {one.latency_s:.1f} s"
            judged = "right" if one.right else "WRONG"
            print(f"{one.nccl:8} {one.hang:14} {one.attach:10} {judged}: {one.said} {list(one.named)}{when}")
        if options.json:
            options.json.write_text(json.dumps([asdict(one) for one in rows], indent=1) + "\n", "utf-8")
    missing = {(version, name) for version in options.versions for name in options.hangs} - {(one.nccl, one.hang) for one in rows}
    for version, name in sorted(missing):
        print(f"{version:8} {name:14} not played", file=sys.stderr)
    return 0 if not missing and all(one.right for one in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
