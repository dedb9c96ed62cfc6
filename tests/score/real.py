"""Scenarios played by real NCCL on the CPU testbed, watched by ncclwatch's own collector from outside.

The collector's batches are all that a diagnosis sees: the scenario's faults and expectations stay with the scorer, and the job's
own lines, which say when a fault began, are read by the scorer alone.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path

import numpy as np

from ncclwatch.cli.live import LiveSession
from ncclwatch.collect.batch import NodeBatch
from ncclwatch.collect.watched import sees_every_process
from ncclwatch.engine.patience import CREATION_S, HANG_FLOOR_S
from ncclwatch.engine.session import DiagnosisSession
from ncclwatch.errors import NcclwatchError
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import ProcessSample
from ncclwatch.model.verdict import Verdict
from ncclwatch.simulate.layout import groups, node_of, ranks_of_node
from ncclwatch.simulate.scenario import PROGRAM_FAULTS, ROLES, Expectation, Fault, FaultKind, Layout, Scenario, ScoreClass
from ncclwatch.simulate.testbed import ON_A_LINK, TestbedPlan, as_testbed_runs, fitted, plan
from ncclwatch.simulate.wire import RecordSet
from ncclwatch.store.recorder import Recorder
from ncclwatch.store.replay import Recordings
from score.diagnosers import HANG_CLASSES, Diagnoser
from score.scoring import Result, Tally
from score.stalls import where_it_stalled
from score.visible import SLOW_CLASSES, visibility
from testbed.adapters import MAX_HOSTS, AdapterNetwork
from testbed.job import JobError
from testbed.play import LINK_RATE, Hosts, Play

HISTORY_S = 30.0
BASELINES_EVERY_S = 2.0
BEYOND_S = 2.5
"""For how much longer than the engine's patience a hang is looked at: what an operation usually takes."""
STANDSTILL_S = HANG_FLOOR_S + BEYOND_S
"""For how long a hang is looked at in any case."""
BUSY_S = 40.0
POST_HANG_AFTER_S = 5.0
"""Who comes afterwards comes this long after the job came to stand."""
START_S = 300.0
"""Longest time until a fault begins: sixteen ranks on two cores that others load take long to create their communicators, four
in the emulated guest no less.
"""
CLEAN_S = 30.0
SLOW_BY_THEMSELVES = frozenset(
    {FaultKind.SLOW_GPU, FaultKind.CPU_LIMIT, FaultKind.SLOW_LOADER, FaultKind.GC_PAUSE, FaultKind.PROXY_SLEEP}
)
"""Faults of one rank that could be any rank's."""


class Transport(StrEnum):
    """Between the ranks of one host, while hosts are joined by sockets; ``p2p``: by NVLink; ``verbs`` is InfiniBand between all
    ranks, in the guest (vm/slow.py) or by stand-ins for adapters (testbed/adapters.py).
    """

    SOCKET = "socket"
    SHM = "shm"
    P2P = "p2p"
    VERBS = "verbs"


class Attach(StrEnum):
    """When the collector comes: before the job creates its first communicator, or after it has come to stand."""

    LIVE = "live"
    POST_HANG = "post-hang"


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a scenario. ``number`` counts its tries; what varies between them is drawn from ``seed``."""

    scenario: Scenario
    nccl: str
    transport: Transport
    attaches: tuple[Attach, ...] = (Attach.LIVE, Attach.POST_HANG)
    seed: int = 1
    number: int = 0
    after_s: float = 16.0
    """How long a hang is watched; slow jobs are watched half as long again, healthy ones for at most twice as long."""
    save_to: str = ""
    """Folder for the recordings, which `ncclwatch diagnose` and `replay` read; empty for none."""
    judged: bool = True
    """Whether what was recorded is judged as well. Of a fresh seed nobody is to see a judgement before the engine is finished."""

    def path(self, attach: Attach) -> Path:
        """The recording of that collector, where recordings are kept."""
        return Path(self.save_to) / f"{self.scenario.name}-{self.nccl}-{self.transport}-{attach}-{self.number}.ncclwatch"

    @property
    def recorded(self) -> bool:
        """Whether it was played before: all that is written once it is over lies there."""
        return bool(self.save_to) and any(self.path(attach).with_suffix(".json").exists() for attach in self.attaches)

    def setting(self, attach: Attach) -> str:
        """The setting as the results name it."""
        return f"{self.nccl} {self.transport} {attach} seed {self.seed} try {self.number}"


@dataclass(slots=True)
class Outcome:
    """What came of a run: one result for each diagnoser and attachment, and what a reader of the table should know."""

    run: Run
    results: list[Result] = field(default_factory=list)
    note: str = ""
    wall_s: float = 0.0
    pace: str = ""
    """Of a slow job, what its own iterations took before and since."""


def as_played(scenario: Scenario, nccl: str, transport: Transport) -> Scenario:
    """The scenario as the testbed plays it: that release, that transport, messages that two cores can move."""
    inside = str(transport) if transport in (Transport.SHM, Transport.P2P) else "net"
    network = replace(scenario.network, nccl=nccl, intra_node=inside, net="socket")
    played = replace(scenario, network=network)
    return as_testbed_runs(fitted(replace(played, expect=_expectation(played))))


def _expectation(scenario: Scenario) -> Expectation:
    """Faults of a link or a NIC are played on the link of the rank's host, which all its ranks share: their ends may be named.

    A link that is down or slow is so with everybody: its rank must be named, by its NIC or one of its links.
    """
    layout, expect = scenario.layout, scenario.expect
    struck = {fault.rank for fault in scenario.faults if fault.kind in ON_A_LINK}
    if not struck:
        return expect
    shared = scenario.network.intra_node in ("shm", "p2p")
    if shared:
        struck = {int(r) for rank in struck for r in ranks_of_node(layout, node_of(layout, rank))}
    near = {int(r) for role in ROLES if role != "world" for g in groups(layout, role) if struck & set(g.tolist()) for r in g}
    if not shared:
        only = all(fault.kind in ON_A_LINK for fault in scenario.faults)
        wanted = struck if only else set(expect.ranks)
        also = (near | set(expect.also)) - wanted
        return replace(expect, ranks=tuple(sorted(wanted)), also=tuple(sorted(also)), link=())
    if len(struck) > 2:
        # No link has so many ends: all who use the port are to be named, or its link where rings leave the host at one rank.
        crossing = _crossing(layout, struck)
        if len(struck & crossing) <= 2:
            return replace(expect, ranks=(), also=tuple(sorted(struck | crossing)), link=())
        return replace(expect, ranks=tuple(sorted(struck)), also=tuple(sorted(near - struck)), link=())
    others = tuple(r for r in expect.ranks if r not in near)
    link = tuple(struck) if expect.link else ()
    return replace(expect, ranks=others, also=tuple(sorted(near)), link=link)


def _crossing(layout: Layout, inside: set[int]) -> set[int]:
    """Ranks at both ends of the rings' links that leave a host, or come to it; ``inside`` are its ranks."""
    found: set[int] = set()
    for role in (role for role in ROLES if role != "world"):
        for group in groups(layout, role):
            ring = group.tolist()
            for one, other in zip(ring, ring[1:] + ring[:1], strict=True):
                if (one in inside) != (other in inside):
                    found |= {one, other}
    return found


def obstacle(scenario: Scenario, nccl: str, transport: Transport) -> str:
    """Why the testbed cannot play the scenario so; empty when it can."""
    seen = scenario.observe
    if scenario.layout.world > 16:
        return f"{scenario.layout.world} ranks: simulation only"
    if seen.loss or seen.late_fraction:
        return "lost and late records: simulation only"
    if scenario.network.intra_node == "p2p" and transport is not Transport.P2P:
        return "NVLink: with --transport p2p"
    if any(f.kind is FaultKind.INIT_MISSING and f.rank == 0 for f in scenario.faults):
        return "rank 0 makes the id that all others wait for outside NCCL: without it nobody enters NCCL at all"
    played = as_played(scenario, nccl, transport)
    if transport is Transport.VERBS and (hosts := len(plan(played).hosts)) > MAX_HOSTS:
        return f"{hosts} hosts: stand-ins for adapters are for {MAX_HOSTS}"
    on_the_network = any(f.kind in (FaultKind.PROXY_STALL, FaultKind.PROXY_SLEEP) for f in scenario.faults)
    if transport in (Transport.SHM, Transport.P2P) and on_the_network and len(plan(played).hosts) == 1:
        return "no proxy is involved within one host"
    return "; ".join(plan(played, links=True).unsupported)


def vary(scenario: Scenario, seed: int, number: int) -> Scenario:
    """The scenario of a try: the first as the file has it, later ones at another moment, and a rank that is stopped from outside
    or slow by itself is another one.
    """
    if number == 0:
        return scenario
    chance = random.Random(f"{seed}/{scenario.name}/{number}")
    ranks: dict[int, int] = {}
    faults = []
    for fault in scenario.faults:
        start_s, iteration = fault.start_s, fault.iteration
        if start_s is not None:
            start_s += chance.uniform(0, 2)
            if fault.kind in (FaultKind.STOP, FaultKind.KILL):
                free = [r for r in range(scenario.layout.world) if r not in ranks.values()]
                ranks[fault.rank] = chance.choice(free)
        elif iteration is not None and scenario.workload.iterations > iteration + 5:
            iteration += chance.randrange(4)
        if fault.kind in SLOW_BY_THEMSELVES and _says_rank_alone(scenario, fault):
            ranks[fault.rank] = chance.randrange(scenario.layout.world)
        faults.append(replace(fault, start_s=start_s, iteration=iteration, rank=ranks.get(fault.rank, fault.rank)))
    expect = replace(scenario.expect, ranks=tuple(ranks.get(r, r) for r in scenario.expect.ranks))
    return replace(scenario, faults=tuple(faults), expect=expect)


def _says_rank_alone(scenario: Scenario, fault: Fault) -> bool:
    """Whether the one fault is expected at its rank and nothing else depends on which rank that is."""
    expect = scenario.expect
    return scenario.faults == (fault,) and expect.ranks == (fault.rank,) and not (expect.also or expect.stage or expect.link)


# --- what is recorded ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OwnLines:
    """What the job's own lines say: of each iteration of rank 0 the seconds it took and when it ended (CLOCK_MONOTONIC), and
    where a GPU that was made to stall did so (:class:`score.stalls.Stalled`).
    """

    iterations: tuple[tuple[float, float], ...] = ()
    stalled: str = ""
    chosen: tuple[str, ...] = ()
    """What NCCL chose by itself, where it was left to it (:meth:`testbed.play.Play.chosen`)."""


@dataclass(slots=True)
class Recording:
    """Batches of one collector in order; all that a diagnosis gets to see. Times are CLOCK_MONOTONIC, seconds."""

    batches: list[NodeBatch] = field(default_factory=list)
    own: OwnLines | None = None
    """What the job said of itself meanwhile, for the scorer alone."""

    def said(self) -> Iterator[tuple[float, list[Verdict]]]:
        """What a session says at each look, fed the batches one after another as they came."""
        session = DiagnosisSession()
        for batch in self.batches:
            session.feed(batch)
            if batch.looked:
                yield batch.time_ns / 1e9, list(session.judge(batch.time_ns).verdicts)

    def save(self, path: Path) -> None:
        """Write it as `ncclwatch record` does. Raises ``OSError`` when some of it could not be written."""
        path.unlink(missing_ok=True)
        recorder = Recorder(path)
        for batch in self.batches:
            recorder.put(batch)
            time.sleep(0.002)  # it never waits for the disk: that is its user's business here
        if recorder.close().dropped:
            raise OSError(f"{path} was not written whole")

    def records(self, until_s: float) -> RecordSet:
        """What was recorded in the last seconds up to a moment, as the baselines take it."""
        begin_ns, end_ns = (until_s - HISTORY_S) * 1e9, until_s * 1e9
        samples: dict[ProcessKey, list[ProcessSample]] = defaultdict(list)
        calls = []
        host, lost = "", 0
        for batch in self.batches:
            if batch.time_ns > end_ns:
                break
            host, lost = batch.host, batch.lost
            if batch.events is not None:
                calls.append(batch.events)
            if batch.looked and batch.time_ns >= begin_ns:
                for sample in batch.samples:
                    samples[sample.process.key].append(sample)
        events = {host: np.concatenate(calls)} if calls else {}
        return RecordSet(list(samples.values()), events, {}, {host: lost} if lost else {}, ("calls", "state"))


class Roster:
    """Who the communicators of a played job consist of: what was read of those who were seen, and the layout for the others."""

    def __init__(self, scenario: Scenario, recording: Recording) -> None:
        self._groups = {tuple(g) for role in ROLES for g in groups(scenario.layout, role).tolist()}
        self._seen: dict[str, set[tuple[int, int, int]]] = defaultdict(set)
        for batch in recording.batches:
            for sample in batch.samples:
                for c in sample.communicators:
                    if sample.process.rank is not None:
                        self._seen[f"{c.hash:016x}"].add((c.rank, sample.process.rank, c.nranks))

    def members_of(self, comm_hash: str) -> tuple[int, ...]:
        """Global ranks of a communicator; none where its hash is that of several (splits before 2.24)."""
        seen = self._seen.get(comm_hash, set())
        fitting = [g for g in self._groups if seen and all(n == len(g) and g[rank] == of_job for rank, of_job, n in seen)]
        return fitting[0] if len(fitting) == 1 else ()


class Watcher:
    """A session as ``attach`` runs it, in a thread of its own, attached to processes until it is stopped. It judges while it
    records: what it finds decides when it takes more samples, and what it counts. Nobody's stacks are looked at.
    """

    def __init__(self, pids: Sequence[int], *, calls: bool = True) -> None:
        self.recording = Recording()
        self.error: Exception | None = None
        self._sees_every_process = sees_every_process()
        self._session = LiveSession(every=False, stacks=False)
        self._session.taps.append(self._add)
        # Started here and not in the thread: when this returns, the session is attached.
        self._session.start(pids, calls=calls)
        if calls and not self._session.collector.calls.running:
            self._session.close()
            raise JobError(f"calls are not seen: {self._session.collector.calls.reason}")
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def watched_s(self, since: float) -> float:
        """For how long looks have come since then (seconds of CLOCK_MONOTONIC): on a busy machine the first comes late."""
        looks = [batch.time_ns / 1e9 for batch in list(self.recording.batches) if batch.looked and batch.time_ns / 1e9 >= since]
        return looks[-1] - looks[0] if looks else 0.0

    def creation_s(self) -> float:
        """For how long looks have come since the last communicator appeared, beyond what the engine gives a creation: as long
        as ranks needed that came, which on a busy machine is long, and ``CREATION_S`` at least. Negative: not yet.
        """
        batches, appeared = list(self.recording.batches), dict[tuple[object, int], int]()
        for batch in batches:
            for sample in batch.samples:
                for own in sample.communicators:
                    appeared.setdefault((sample.process.key, own.hash), sample.time_ns)
        if not appeared:
            return -math.inf
        last = max(appeared.values())
        return (batches[-1].time_ns - last) / 1e9 - max(CREATION_S, (last - batches[0].time_ns) / 1e9)

    def stop(self) -> Recording:
        """Let go of the processes and hand over what was recorded."""
        self._session.stop.set()
        self._thread.join()
        if self.error is not None:
            raise self.error
        return self.recording

    def _add(self, batch: NodeBatch) -> None:
        # Every process of the job is watched, which is what `attach --all` finds out by itself.
        batch.complete = self._sees_every_process and not self._session.problems
        self.recording.batches.append(batch)

    def _run(self) -> None:
        try:
            while not self._session.step().finished:
                pass
        except Exception as error:  # raised again in `stop`
            self.error = error
        finally:
            self._session.close()


# --- one run -------------------------------------------------------------------------------------------------------------


def play(run: Run, baselines: Sequence[Diagnoser] = ()) -> Outcome:
    """Play a scenario, watch it, and score what was said. What could not be played or watched is in the outcome's note."""
    began = time.monotonic()
    scenario = vary(run.scenario, run.seed, run.number)
    outcome = Outcome(run)
    try:
        scenario = as_played(scenario, run.nccl, run.transport)
        made = plan(scenario, links=True)
        with network_of(run.transport, made) as network:
            recorded = record(run, scenario, made, outcome, network)
        for attach, recording, since in recorded if run.judged else ():
            stalled = recording.own.stalled if recording.own else ""
            outcome.results += _score(where_it_stalled(scenario, stalled), recording, since, run.setting(attach), baselines)
    except (JobError, NcclwatchError, OSError) as error:
        outcome.note = f"not played: {str(error).splitlines()[0]}"
    outcome.wall_s = time.monotonic() - began
    return outcome


@contextlib.contextmanager
def network_of(transport: Transport, made: TestbedPlan) -> Iterator[Hosts | None]:
    """Hosts with adapters, where a plan is played over verbs; else the plan's player makes what it needs. Raises JobError."""
    if transport is not Transport.VERBS:
        yield None
        return
    with AdapterNetwork(hosts=len(made.hosts), rate=LINK_RATE) as network:
        yield network


def record(
    run: Run, scenario: Scenario, made: TestbedPlan, outcome: Outcome, network: Hosts | None = None
) -> list[tuple[Attach, Recording, float]]:
    """Play a scenario as planned and watch it: each session's recording, and when the fault began to show to it.

    They are saved where the run says so; what a reader should know goes into the outcome. Raises JobError, NcclwatchError and
    OSError.
    """
    with Play(made, network=network, gate_s=START_S) as played:
        missing = scenario.observe.missing_nodes
        pids = [played.job.pid(r) for r in range(made.ranks) if node_of(scenario.layout, r) not in missing]
        live = Watcher(pids) if Attach.LIVE in run.attaches else None
        played.begin()
        if scenario.expect.score_class is ScoreClass.CLEAN:
            effect, late = _run_clean(run, played, pids)
        else:
            effect, late = _run_fault(run, scenario, played, pids, outcome)
            if scenario.expect.score_class in HANG_CLASSES:
                creates = scenario.expect.score_class is ScoreClass.INIT_HANG
                _watch_long_enough([(live, effect)] if live else [], late, creates=creates)
        recordings = [(Attach.LIVE, live.stop(), effect)] if live else []
        if late is not None:
            came, watcher = late
            recordings.append((Attach.POST_HANG, watcher.stop(), came))
        pace = tuple((round(took, 4), round(ended, 4)) for took, ended in played.iterations(0).tolist())
        own = OwnLines(pace, played.stalled(), played.chosen())
    for attach, recording, since in recordings:
        recording.own = own
        if run.save_to:
            recording.save(run.path(attach))
            note = Saved(
                scenario.name, run.nccl, run.transport, attach, run.seed, run.number, since, list(own.iterations), own.stalled
            )  # fmt: skip
            run.path(attach).with_suffix(".json").write_text(json.dumps(asdict(note)) + "\n", "utf-8")
            outcome.pace = note.pace
    return recordings


@dataclass(frozen=True, slots=True)
class Saved:
    """What is kept beside a recording, for the scorer alone: which run it is of, and when the fault began to show (seconds of
    CLOCK_MONOTONIC there).
    """

    scenario: str
    nccl: str
    transport: Transport
    attach: Attach
    seed: int
    number: int
    since: float
    iterations: list[tuple[float, float]] = field(default_factory=list)
    """What rank 0 itself said of each iteration: the seconds it took and when it ended (CLOCK_MONOTONIC)."""
    stalled: str = ""
    """Where a GPU that was made to stall did so, as its rank itself said (:class:`score.stalls.Stalled`)."""

    @classmethod
    def load(cls, recording: Path) -> Saved:
        """The one beside a recording."""
        saved = cls(**json.loads(recording.with_suffix(".json").read_text("utf-8")))
        iterations = [(float(took), float(ended)) for took, ended in saved.iterations]
        return replace(saved, transport=Transport(saved.transport), attach=Attach(saved.attach), iterations=iterations)

    @property
    def pace(self) -> str:
        """The job's own iteration times before and since the fault, in words: whether there was anything to be seen."""
        before = [took for took, ended in self.iterations if ended <= self.since]
        since = [took for took, ended in self.iterations if ended - took >= self.since]
        if not before or not since:
            return ""
        low, normal, high = np.percentile(before, (10, 50, 90)).tolist()
        return f"iterations of {normal:.2f} s ({low:.2f} to {high:.2f}) and then {float(np.median(since)):.2f} s"


def expected(scenario: Scenario, saved: Saved) -> Scenario:
    """The scenario as that run played it, with what is expected of it."""
    played = as_played(vary(scenario, saved.seed, saved.number), saved.nccl, saved.transport)
    return where_it_stalled(played, saved.stalled)


def score_saved(path: Path, scenarios: Mapping[str, Scenario], baselines: Sequence[Diagnoser] = ()) -> Outcome:
    """Score a run again from its recording and what was kept beside it: the same run, judged by the engine as it is now."""
    saved = Saved.load(path)
    run = Run(scenarios[saved.scenario], saved.nccl, saved.transport, (saved.attach,), saved.seed, saved.number)
    with Recordings([path]) as recordings:
        own = OwnLines(tuple(saved.iterations), saved.stalled)
        recording = Recording([batch for _, _, batch in recordings.batches()], own)
    scenario = expected(run.scenario, saved)
    results = _score(scenario, recording, saved.since, run.setting(run.attaches[0]), baselines)
    return Outcome(run, results, pace=saved.pace)


def _run_clean(run: Run, played: Play, pids: Sequence[int]) -> tuple[float, tuple[float, Watcher] | None]:
    """Let it run, for a bounded time; who comes late comes in the middle."""
    deadline = time.monotonic() + START_S
    while played.job.progress(0) < 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    if played.job.progress(0) < 4:
        raise JobError(f"the clean job did not run\n{played.job.logs()}")
    came, late = time.monotonic(), Watcher(pids) if Attach.POST_HANG in run.attaches else None
    while not played.finished() and time.monotonic() < came + min(CLEAN_S, 2 * run.after_s):
        time.sleep(0.1)
    return came, (came, late) if late else None


NO_STANDSTILL = "the job did not come to stand"
OTHER_CALL = frozenset({FaultKind.OTHER_OPERATION, FaultKind.OTHER_SIZE, FaultKind.OTHER_TYPE})
"""The calls show these as soon as they are made; another size or type need not stop the job at all (NCCL compares nothing)."""


def _run_fault(
    run: Run, scenario: Scenario, played: Play, pids: Sequence[int], outcome: Outcome
) -> tuple[float, tuple[float, Watcher] | None]:
    """Wait for the fault, and for as long after it as it is to be watched; returns when it began to show."""
    onset = effect = played.wait_onset(START_S)
    hangs = scenario.expect.score_class in HANG_CLASSES
    after = run.after_s if hangs else 1.5 * run.after_s
    if scenario.expect.score_class is ScoreClass.INIT_HANG:
        after = max(after, CREATION_S)
    if any(f.kind is FaultKind.CRASH for f in scenario.faults):
        after = max([after, *(f.duration_s + 4.0 for f in scenario.faults if f.duration_s < 60.0)])
    late: tuple[float, Watcher] | None = None
    if hangs:
        stood = played.wait_standstill(onset, timeout=20.0)
        other_call = any(f.kind in OTHER_CALL for f in scenario.faults)
        if stood is None:
            outcome.note = NO_STANDSTILL
        elif any(f.kind in PROGRAM_FAULTS for f in scenario.faults) and not other_call:
            effect = stood  # until then NCCL took the data of one call for those of another
        if stood is not None and Attach.POST_HANG in run.attaches:
            time.sleep(max(0.0, effect + POST_HANG_AFTER_S - time.monotonic()))
            alive = [pid for rank, pid in enumerate(played.job.pids) if played.job.alive(rank) and pid in pids]
            came = time.monotonic()
            late = (came, Watcher(alive))
            after = max(after, came - effect + 8.0)
    time.sleep(max(0.0, effect + after - time.monotonic()))
    return effect, late


def _watch_long_enough(live: list[tuple[Watcher, float]], late: tuple[float, Watcher] | None, *, creates: bool) -> None:
    """Wait until whoever watches has looked at the standstill for longer than patience lasts, with ``creates`` at a creation that
    hangs; on a quiet machine they have.
    """
    watching = live + ([(late[1], late[0])] if late is not None else [])
    deadline = time.monotonic() + BUSY_S
    while time.monotonic() < deadline and any(
        watcher.watched_s(since) < STANDSTILL_S or (creates and watcher.creation_s() < BEYOND_S) for watcher, since in watching
    ):
        time.sleep(0.2)


def _score(scenario: Scenario, recording: Recording, since: float, setting: str, baselines: Sequence[Diagnoser]) -> list[Result]:
    roster = Roster(scenario, recording)
    ours = Tally(scenario, roster, "ncclwatch", setting)
    for moment, verdicts in recording.said():
        ours.hear(verdicts, moment - since)
    tallies = [Tally(scenario, roster, diagnoser.name, setting) for diagnoser in baselines]
    if baselines and recording.batches:
        first, last = recording.batches[0].time_ns / 1e9, recording.batches[-1].time_ns / 1e9
        for moment in np.arange(first + BASELINES_EVERY_S, last + 0.01, BASELINES_EVERY_S).tolist():
            records = recording.records(moment)
            for diagnoser, tally in zip(baselines, tallies, strict=True):
                tally.hear(diagnoser.diagnose(records, moment), moment - since)
    results = [tally.result() for tally in (ours, *tallies)]
    if scenario.expect.score_class in SLOW_CLASSES and recording.own and recording.batches:
        shown = visibility(scenario, recording.own.iterations, since, recording.batches[-1].time_ns / 1e9)
        results = [replace(result, visible=shown.visible) for result in results]
    return results
