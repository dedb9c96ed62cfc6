"""Kills at random of everything a fleet is made of, while simulated jobs (no NCCL runs here) are held up and let go again.

    PYTHONPATH=src:tests python -m fleet.kills --kills 200 [--seed 1] [--judges 3]

Two hearing workers, two judges or more, each with a writer of one history, and the page run as they are installed, and a real
nats-server keeps its store. Each turn something dies by SIGKILL and is begun again: an agent (simulated: a new life), nats-
server, a worker, a judge with its writer, or the page; or a judge is stopped by SIGSTOP and goes on seconds later, when another
has taken over. In between a process of one of two jobs stops, or goes on. At the end the log of verdicts must hold each hold-up
once, with the rank that was stopped, and each end of one, in their order, and nothing else; the history every verdict of the
log once, or a gap that is told at its time; and the page what stands.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec
from nats.errors import Error as NatsError

from fleet.servers import NatsServer, free_port, running
from fleet.simulated import Agents
from ncclwatch.errors import NcclwatchError
from ncclwatch.fleet import streams
from ncclwatch.fleet.connection import Connection
from ncclwatch.fleet.verdict_log import Record
from ncclwatch.history.query import History
from ncclwatch.messaging.bus_keys import Access
from ncclwatch.messaging.subjects import BATCHES, VERDICTS, verdict

PATIENCE_S = 300.0
"""A machine that is busy with real jobs may need long; how long a takeover took is printed, not asserted."""
KINDS = ("agent", "nats-server", "worker", "judge", "stopped judge", "page")
LATE_S = 30.0
"""A verdict reaches a history's journal within that, on a machine that is busy with real jobs."""
STOPPED_S = 2.0, 8.0
"""For how long a judge is stopped (SIGSTOP, then SIGCONT): shorter and longer than a lease runs."""


@dataclass
class Fleet:
    """Two workers, some judges and a page on a server."""

    server: NatsServer
    folder: Path
    lease_s: float
    judges: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    begun: Counter[str] = field(default_factory=Counter)
    """How often each was."""
    port: int = field(default_factory=free_port)
    """Of the page."""

    @property
    def history(self) -> Path:
        """What the judges keep."""
        return self.folder / "history"

    def begin(self, name: str) -> None:
        options = ["--bus", self.server.address, "--lease", str(self.lease_s), "--json"]
        command = {
            "worker": ["fleet", "hear", *options], "judge": ["fleet", "judge", *options, "--history", str(self.history)],
            "page": ["serve", "--fleet", self.server.address, "--bind", f":{self.port}", "--history", str(self.history)],
        }[name.rstrip("0123456789")]  # fmt: skip
        self.begun[name] += 1
        with (self.folder / f"{name}.log").open("ab") as log:
            whole = [sys.executable, "-m", "ncclwatch", *command]
            self.processes[name] = subprocess.Popen(whole, stdout=log, stderr=log, env=os.environ)

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait(60)

    def close(self) -> None:
        for name in list(self.processes):
            self.kill(name)


@dataclass
class Outcome:
    """What was seen."""

    kills: Counter[str] = field(default_factory=Counter)
    takeovers_s: list[float] = field(default_factory=list)
    """By a judge that ran; ``alone_s``: by one that had to begin first, for the other had died just before."""
    alone_s: list[float] = field(default_factory=list)
    told_s: list[float] = field(default_factory=list)
    """From the moment a process stopped to the record of the verdict."""
    findings: int = 0
    kept: int = 0
    """Verdicts that the history has; ``in_gaps``: that it says it does not have."""
    in_gaps: int = 0
    faults: list[str] = field(default_factory=list)
    trail: list[str] = field(default_factory=list)
    """What was done when."""

    def text(self) -> str:
        kinds = ", ".join(f"{number} of {kind}" for kind, number in sorted(self.kills.items()))
        return (
            f"{sum(self.kills.values())} kills ({kinds}), {self.findings} hold-ups, {len(self.faults)} faults\n"
            f"jobs taken over by a judge that ran: {_spread(self.takeovers_s)}\n"
            f"by one that had to begin first: {_spread(self.alone_s)}\n"
            f"from a stop to its verdict: {_spread(self.told_s)}\n"
            f"the history has {self.kept} verdicts, and tells a gap at the time of {self.in_gaps}"
        )


class Trial:
    """One run."""

    def __init__(
        self, folder: Path, server: NatsServer, connection: Connection, seed: int, *, lease_s: float = 3.0, judges: int = 2
    ) -> None:
        self.outcome = Outcome()
        self._chance = random.Random(seed)
        self._server, self._connection = server, connection
        connection.call(streams.ensure(connection.jetstream, BATCHES, VERDICTS))
        self._agents = Agents(connection, world=4, jobs=2)
        self._fleet = Fleet(server, folder, lease_s, judges)
        self._expected: dict[int, list[tuple[str, int]]] = {0: [], 1: []}

    def run(self, kills: int) -> None:
        for name in ("worker0", "worker1", *self._judges, "page"):
            self._fleet.begin(name)
        self._agents.start()
        try:
            self._wait("both jobs are judged", lambda: all(self._judge_of(job) for job in (0, 1)))
            for turn in range(kills):
                kind = self._chance.choice(KINDS)
                self._note(f"kill {kind}")
                self._kill(kind)
                self.outcome.kills[kind] += 1
                time.sleep(self._chance.uniform(0.0, 3.0))
                if turn % 2:
                    self._toggle(self._chance.randrange(2))
            for job in (0, 1):
                self._settled(job)
                self._wait("the page shows what stands", partial(self._shows, job))
        finally:
            self._agents.close()
            self._fleet.close()
        for job in (0, 1):
            self._compare(job)
        self._compare_history()

    # --- what happens --------------------------------------------------------------------------------------------------

    def _kill(self, kind: str) -> None:
        if kind == "agent":
            self._agents.restart(self._chance.randrange(self._agents.world))
        elif kind == "nats-server":
            self._server.kill()
            time.sleep(self._chance.uniform(0.0, 2.0))
            self._server.start()
        elif kind == "stopped judge":
            process = self._fleet.processes[self._chance.choice(self._judges)]
            process.send_signal(signal.SIGSTOP)
            time.sleep(self._chance.uniform(*STOPPED_S))
            process.send_signal(signal.SIGCONT)
        elif kind == "page":
            self._fleet.kill("page")
            self._fleet.begin("page")
        else:
            self._kill_process(self._chance.choice(self._judges if kind == "judge" else ["worker0", "worker1"]))

    @property
    def _judges(self) -> list[str]:
        return [f"judge{number}" for number in range(self._fleet.judges)]

    def _kill_process(self, name: str) -> None:
        judge = name in self._judges
        judged = {job: record for job in (0, 1) if (record := self._last(job)) is not None} if judge else {}
        lost = self._names_of(name)
        ready = any(len(self._names_of(other)) == self._fleet.begun[other] for other in self._judges if other != name)
        self._fleet.kill(name)
        at = time.time()
        self._fleet.begin(name)
        for job, record in judged.items():
            if record.judge not in lost:
                continue
            self._wait("the job of a judge that died is another's", partial(self._newer, job, record))
            took = next(r for r in self._records(job) if r.epoch > record.epoch).at_ns / 1e9 - at
            if took < 0:
                # It was another's already: of a judge that had been stopped.
                continue
            # A judge that has not begun yet takes over once it has.
            (self.outcome.takeovers_s if ready else self.outcome.alone_s).append(took)
            self._note(f"job {job} taken over after {took:.1f} s" + ("" if ready else ", by a judge that had to begin first"))

    def _note(self, text: str) -> None:
        self.outcome.trail.append(f"{time.time():.1f} {text}")
        with (self._fleet.folder / "trail").open("a") as file:
            file.write(self.outcome.trail[-1] + "\n")

    def _toggle(self, job: int) -> None:
        """Let a process stop, or go on, once what happened before is in the log."""
        self._settled(job)
        if job in self._agents.stuck:
            self._expected[job].append(("recovery", self._agents.stuck.pop(job)))
            self._note(f"job {job} goes on")
        else:
            rank = self._chance.randrange(self._agents.world)
            self._note(f"rank {rank} of job {job} stops")
            self._agents.stuck[job] = rank
            self._expected[job].append(("verdict", rank))

    # --- what is seen --------------------------------------------------------------------------------------------------

    def _settled(self, job: int) -> None:
        """Wait until what happened is in the log; what is there instead is a fault, and the log counts from then on."""
        wanted = self._expected[job]
        self._wait(f"{wanted[-1:]} of job {job} is told", lambda: len(self._said(job)) >= len(wanted))
        said: list[tuple[str, int]] = [(record.type, _rank(record)) for record in self._said(job)]
        if said != wanted:
            found = [f"{r.at_ns / 1e9:.1f} {r.type} {(r.verdict or {})['summary']}" for r in self._said(job)[-6:]]
            self.outcome.faults.append(f"job {job}: expected … {wanted[-4:]}, the log has … {said[-6:]}: {found}")
            self._note(self.outcome.faults[-1])
            self._expected[job] = said

    def _said(self, job: int) -> list[Record]:
        """Verdicts and recoveries of hold-ups. Made-up samples have no iteration that could be slow: where the machine is, a
        verdict of that may join a hold-up's, and the end of both then names what was told last.
        """
        found: list[Record] = []
        named: dict[int, Record] = {}
        for record in self._records(job):
            if record.type == "verdict" and not str((record.verdict or {})["class"]).startswith("slow"):
                named[record.state.finding] = record
                found.append(record)
            elif record.type == "recovery" and record.state.finding in named:
                found.append(msgspec.structs.replace(record, verdict=named[record.state.finding].verdict))
        return found

    def _records(self, job: int) -> list[Record]:
        """The log of a job; a server that was killed just now may need to be asked again."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return self._connection.call(self._read(verdict(self._agents.name_of(job))), 60.0)
            except (NatsError, NcclwatchError, OSError):
                if time.monotonic() > until:
                    raise
                time.sleep(0.2)

    async def _read(self, subject: str) -> list[Record]:
        jetstream = self._connection.jetstream
        info = await jetstream.stream_info(VERDICTS, subjects_filter=subject)
        found: list[Record] = []
        number = 0
        for _ in range((info.state.subjects or {}).get(subject, 0)):
            message = await jetstream.get_msg(VERDICTS, seq=number + 1, subject=subject, next=True)
            number = message.seq or 0
            found.append(msgspec.json.decode(message.data or b"", type=Record))
        return found

    def _last(self, job: int) -> Record | None:
        return next(reversed(self._records(job)), None)

    def _judge_of(self, job: int) -> str:
        record = self._last(job)
        return record.judge if record is not None else ""

    def _newer(self, job: int, record: Record) -> bool:
        last = self._last(job)
        return last is not None and last.epoch > record.epoch

    def _names_of(self, name: str) -> set[str]:
        """Names under which a process of ours has judged."""
        # What was killed while it wrote has left a line that is none.
        lines = [line for line in (self._fleet.folder / f"{name}.log").read_bytes().splitlines() if line.endswith(b"}")]
        return {str(line.get("judge")) for line in map(msgspec.json.decode, lines) if line.get("type") == "listening"}

    def _wait(self, what: str, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while True:
            if condition():
                return
            assert time.monotonic() < until, f"not seen within {PATIENCE_S:.0f} s: {what}"
            time.sleep(0.1)

    def _shows(self, job: int) -> bool:
        """Whether the page, which may have begun just now, shows a job as the log has it."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._fleet.port}/api/jobs", timeout=10) as answer:
                lines = {line["job"]: line for line in json.load(answer)["jobs"]}
        except (OSError, ValueError):
            return False
        line = lines.get(self._agents.name_of(job), {})
        stuck, shown = self._agents.stuck.get(job), str(line.get("class"))
        if stuck is None:
            return bool(line.get("calm")) or shown.startswith("slow")
        return shown == "stopped" and f"rank {stuck} " in line["summary"]

    def _compare_history(self) -> None:
        """Every verdict of the log once, but of times of which the history says that they are missing."""
        with History(str(self._fleet.history)) as history:
            kept = Counter(history.ask("SELECT verdict_id FROM verdicts WHERE kind = 'verdict' AND class NOT LIKE 'slow%'").rows)
            gaps = history.ask("SELECT epoch(since), epoch(until) FROM gaps").rows
        for job in (0, 1):
            for record in self._said(job):
                if record.type != "verdict" or record.verdict is None:
                    continue
                at = record.at_ns / 1e9
                if kept[record.verdict["id"],] > 0:
                    kept[record.verdict["id"],] -= 1
                    self.outcome.kept += 1
                elif any(since - LATE_S < at < until + LATE_S for since, until in gaps):
                    self.outcome.in_gaps += 1
                else:
                    self.outcome.faults.append(
                        f"the history has neither verdict {record.verdict['id']} of {at:.1f} nor a gap then"
                    )
        self.outcome.faults += [f"the history has verdict {found} {times} times too often" for (found,), times in (+kept).items()]

    def _compare(self, job: int) -> None:
        ids = Counter(record.id for record in self._said(job))
        self.outcome.faults += [f"job {job}: {number} records {found}" for found, number in ids.items() if number > 1]
        self.outcome.findings += sum(record.type == "verdict" for record in self._said(job))
        self.outcome.told_s += [
            record.at_ns / 1e9 - float(record.verdict["since"])
            for record in self._said(job)
            if record.type == "verdict" and record.verdict is not None
        ]


def _spread(seconds: list[float]) -> str:
    found = sorted(seconds)
    return f"{found[len(found) // 2]:.1f} s in the median, {found[-1]:.1f} s at most ({len(found)})" if found else "none"


def _rank(record: Record) -> int:
    assert record.verdict is not None
    culprits = record.verdict["culprits"]
    return int(culprits[0]["rank"]) if len(culprits) == 1 and record.verdict["class"] == "stopped" else -1


def trial(kills: int, seed: int, folder: Path, *, judges: int = 2) -> Outcome:
    """Kill so often, and say what was seen."""
    with running(folder / "nats") as server, Connection(Access(server.address)) as connection:
        one = Trial(folder, server, connection, seed, judges=judges)
        one.run(kills)
        return one.outcome


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills at random of everything a fleet is made of.")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--judges", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="Where logs are kept; by default nowhere.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        outcome = trial(args.kills, args.seed, args.folder or Path(folder), judges=args.judges)
    print("\n".join(outcome.trail))
    print(outcome.text())
    print("\n".join(outcome.faults))
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
