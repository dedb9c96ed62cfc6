"""Scenarios that nobody wrote: layout, workload, network, imperfections of the records and the fault are drawn from a number.

``python -m score --drawn 100 --seed 7`` scores a hundred of them, SIMULATED. What is expected follows from what was drawn; faults
whose effect depends on luck are drawn strong enough to show.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ncclwatch.model.verdict import VerdictClass
from ncclwatch.simulate.layout import groups, node_of
from ncclwatch.simulate.scenario import (
    Expectation,
    Fault,
    FaultKind,
    Layout,
    Lookalike,
    LookalikeKind,
    Network,
    Observation,
    Scenario,
    Schedule,
    ScoreClass,
    Workload,
)

LARGEST = 32
"""Ranks of a drawn job at most: each takes a second or two."""
BEFORE = 12
"""Healthy iterations before a fault."""
LASTS_S = 30.0
"""For how long a job runs, about."""
LATENESS_S = 4.0
"""A fault of a job that goes on begins that long after the job did."""
PARTIAL = 0.2
"""Share of the jobs of three hosts and more in which one host has no agent."""


@dataclass(frozen=True, slots=True)
class _Job:
    """What is drawn before the fault."""

    chance: random.Random
    layout: Layout
    workload: Workload
    network: Network

    def members(self, role: str, rank: int) -> tuple[int, ...]:
        """The group of a rank."""
        return next(tuple(g) for g in groups(self.layout, role).tolist() if rank in g)

    def roles(self, *known: str) -> list[str]:
        """Those of these roles whose groups have collectives of two members and more."""
        sizes = {"tp": self.layout.tp, "cp": self.layout.cp, "dp": self.layout.dp * self.layout.cp, "pp": self.layout.pp}
        return [role for role in known if sizes[role] > 1]

    def crosses_network(self, one: int, other: int) -> bool:
        """Whether two ranks are joined by the network."""
        return self.network.intra_node == "net" or node_of(self.layout, one) != node_of(self.layout, other)


def draw(seed: int, number: int, *, slow: bool = False) -> Scenario:
    """The scenario of that number; the same for the same seed. With ``slow`` always a slow job, of more kinds."""
    drawn = "drawn-slow" if slow else "drawn"
    chance = random.Random(f"{drawn}/{seed}/{number}")
    while True:
        job = _job(chance)
        name, make = chance.choice(list((_SLOW_KINDS if slow else _KINDS).items()))
        if (made := make(job)) is not None:
            break
    workload, faults, lookalikes, expect = made
    observe = _observation(job)
    struck = {node_of(job.layout, fault.rank) for fault in faults}
    if observe.missing_nodes and struck & set(observe.missing_nodes):
        observe = replace(observe, missing_nodes=())
    tags = ("partial",) if observe.missing_nodes else ()
    return Scenario(
        f"{drawn}-{seed}-{number}-{name}", f"drawn: {name}", chance.randrange(1 << 30), expect, job.layout, workload,
        job.network, observe, faults, lookalikes, tags,
    )  # fmt: skip


HEALTHY_LARGEST = 8
"""Ranks of a healthy job that runs for long: the cost is that of its ranks, and hours are wanted."""
EVENT_S = 60.0
"""Something harmless happens about so often in a healthy job that runs for long, in every second job."""


def draw_healthy(seed: int, number: int, seconds: float, period_s: float = 1.0) -> Scenario:
    """A healthy job that runs for about so long, looked at so often; every second one with harmless things that resemble trouble,
    again and again.
    """
    chance = random.Random(f"drawn-healthy/{seed}/{number}")
    job = _job(chance)
    while job.layout.world > HEALTHY_LARGEST:
        job = _job(chance)
    # Iterations of a quarter of a second are a testbed's; those of real jobs take seconds.
    longer = chance.choice((1.0, 4.0, 16.0))
    work = job.workload
    work = replace(work, forward_ms=longer * work.forward_ms, backward_ms=longer * work.backward_ms)
    iteration_s = (work.forward_ms + work.backward_ms) / 1e3 * (work.micro_batches + job.layout.pp - 1)
    iterations = max(BEFORE + 8, round(seconds / iteration_s))
    events = []
    if chance.random() < 0.5:
        for _ in range(max(1, round(seconds / EVENT_S))):
            kind = chance.choice([k for k in LookalikeKind if k is not LookalikeKind.UNEVEN_STAGES])
            at = 0 if kind is LookalikeKind.WARMUP else chance.randrange(iterations)
            events.append(
                Lookalike(kind, at, chance.randint(1, 3), chance.uniform(1.0, 20.0), chance.uniform(1.5, 4.0))
            )  # fmt: skip
        if job.layout.pp > 1 and chance.random() < 0.5:
            stage, factor = chance.randrange(job.layout.pp), chance.uniform(1.5, 4.0)
            events.append(Lookalike(LookalikeKind.UNEVEN_STAGES, 0, 1, 1.0, factor, stage))
    observe = replace(_observation(job), missing_nodes=(), state_period_s=period_s)
    return Scenario(
        f"drawn-healthy-{seed}-{number}", "drawn: healthy", chance.randrange(1 << 30), Expectation(ScoreClass.CLEAN), job.layout,
        replace(work, iterations=iterations), job.network, observe, (), tuple(events),
    )  # fmt: skip


_NAME = re.compile(r"drawn(-slow)?-(\d+)-(\d+)-")


def by_name(name: str) -> Scenario | None:
    """The drawn scenario of a name; None for a name of another kind, or of another generator's."""
    found = _NAME.match(name)
    if found is None:
        return None
    drawn = draw(int(found[2]), int(found[3]), slow=bool(found[1]))
    return drawn if drawn.name == name else None


def _job(chance: random.Random) -> _Job:
    while True:
        tp, pp = chance.choice((1, 2, 2, 4, 8)), chance.choice((1, 1, 2, 2, 4))
        dp, cp = chance.choice((1, 2, 3, 4, 4, 8)), chance.choice((1, 1, 1, 2))
        per_node = chance.choice((2, 4, 8))
        if 4 <= tp * pp * dp * cp <= LARGEST and tp <= per_node:
            break
    ep = chance.choice([n for n in range(1, dp * cp + 1) if (dp * cp) % n == 0]) if chance.random() < 0.25 else 1
    schedule = chance.choice((Schedule.ONE_F_ONE_B, Schedule.ONE_F_ONE_B, Schedule.GPIPE, Schedule.INTERLEAVED))
    if schedule is Schedule.INTERLEAVED and pp == 1:
        schedule = Schedule.ONE_F_ONE_B
    interleaved = schedule is Schedule.INTERLEAVED
    forward_ms = chance.choice((10.0, 20.0, 30.0))
    micro_batches = pp * chance.choice((1, 2)) if interleaved else chance.randint(2, 6)
    iteration_s = 3 * forward_ms / 1e3 * (micro_batches + pp - 1)
    workload = Workload(
        schedule=schedule,
        micro_batches=micro_batches,
        virtual_stages=2 if interleaved else 1,
        layers=2 * chance.choice((1, 2)) if interleaved else chance.randint(1, 3),
        iterations=max(BEFORE + 8, round(LASTS_S / iteration_s)),
        sequence_parallel=tp > 1 and chance.random() < 0.3,
        forward_ms=forward_ms,
        backward_ms=2 * forward_ms,
        jitter=chance.choice((0.0, 0.02, 0.05)),
        dp_bytes=chance.choice((8, 32, 128)) << 20,
        grad_norm=chance.random() < 0.5,
        gather_communicator=chance.random() < 0.3,
        merge_exchanges=chance.random() < 0.3,
    )
    network = Network(
        nccl=chance.choice(("2.21.5", "2.27.5", "2.32.3")),
        algorithm="Tree" if chance.random() < 0.2 else "Ring",
        net=chance.choice(("ib", "ib", "socket")),
        intra_node=chance.choice(("net", "p2p", "shm")),
        channels=chance.choice((1, 2, 4)),
        nic_rate=chance.choice((2.0, 10.0, 40.0)),
    )
    return _Job(chance, Layout(tp, pp, dp, ep, cp, per_node), workload, network)


def _observation(job: _Job) -> Observation:
    chance = job.chance
    nodes = node_of(job.layout, job.layout.world - 1) + 1
    missing = (chance.randrange(nodes),) if nodes > 2 and chance.random() < PARTIAL else ()
    lossy = chance.random() < 0.2
    return Observation(
        planes=("calls", "state"),
        missing_nodes=missing,
        clock_offset_ms=chance.choice((0.0, 2.0, 50.0)),
        clock_drift_ppm=chance.choice((0.0, 5.0, 20.0)),
        loss=0.01 if lossy else 0.0,
        late_fraction=0.05 if lossy else 0.0,
        late_ms=200.0 if lossy else 0.0,
    )


# --- kinds: what goes wrong and what follows from it ---------------------------------------------------------------------

_Made = tuple[Workload, tuple[Fault, ...], tuple[Lookalike, ...], Expectation]


def _expect(score: ScoreClass, verdicts: Sequence[VerdictClass], ranks: Sequence[int], also: Sequence[int] = ()) -> Expectation:
    return Expectation(score, tuple(verdicts), tuple(ranks), tuple(set(also) - set(ranks)))


def _moment(job: _Job) -> float:
    return job.chance.uniform(4.0, 8.0)


def _outside(kind: FaultKind, verdict: VerdictClass) -> Callable[[_Job], _Made | None]:
    """A rank that is stopped or killed from outside, at any moment."""

    def make(job: _Job) -> _Made:
        rank = job.chance.randrange(job.layout.world)
        return job.workload, (Fault(kind, rank, start_s=_moment(job)),), (), _expect(ScoreClass.H1, [verdict], [rank])

    return make


def _two(job: _Job) -> _Made:
    one, other = job.chance.sample(range(job.layout.world), 2)
    at = _moment(job)
    faults = tuple(Fault(FaultKind.STOP, rank, start_s=at) for rank in (one, other))
    return job.workload, faults, (), _expect(ScoreClass.H1, [VerdictClass.STOPPED], [one, other])


def _in_call(
    kind: FaultKind, score: ScoreClass, verdicts: Sequence[VerdictClass], roles: Sequence[str], strength: float = 1.0
) -> Callable[[_Job], _Made | None]:
    """A fault of one call of a role."""

    def make(job: _Job) -> _Made | None:
        possible = job.roles(*roles)
        if not possible:
            return None
        role, rank = job.chance.choice(possible), job.chance.randrange(job.layout.world)
        fault = Fault(kind, rank, iteration=BEFORE + job.chance.randrange(3), role=role, strength=strength)
        members = job.members(role, rank)
        # With two members, each is as odd as the other.
        also = members if score is ScoreClass.H2 and len(members) == 2 else ()
        return job.workload, (fault,), (), _expect(score, verdicts, [rank], also)

    return make


def _gpu_stall(job: _Job) -> _Made | None:
    possible = job.roles("tp", "dp")
    if not possible:
        return None
    rank, role = job.chance.randrange(job.layout.world), job.chance.choice(possible)
    fault = Fault(FaultKind.GPU_STALL, rank, iteration=BEFORE, role=role, offset_ms=1.0)
    # Which of those that NVLink joins does not get on lies in GPU memory: they are named together.
    unseen = [] if job.network.intra_node != "p2p" else [r for r in job.members(role, rank) if not job.crosses_network(rank, r)]
    # Which of the two is right follows from where the stall really falls (score/stalls.py).
    expect = _expect(ScoreClass.H3, [VerdictClass.HARDWARE, VerdictClass.NOT_ENTERED], [rank], unseen)
    return job.workload, (fault,), (), expect


def _large_gradients(work: Workload) -> Workload:
    """Enough bytes for a fault of the network to show."""
    return replace(work, dp_bytes=max(work.dp_bytes, 128 << 20))


def _link(
    kind: FaultKind, score: ScoreClass, verdict: VerdictClass, strength: float, delay_ms: float = 0.0
) -> Callable[[_Job], _Made | None]:
    """A fault of the link from a rank to the next in its ring of gradients."""

    def make(job: _Job) -> _Made | None:
        if job.network.algorithm != "Ring" or not job.roles("dp"):
            return None
        rank = job.chance.randrange(job.layout.world)
        ring = job.members("dp", rank)
        peer = ring[(ring.index(rank) + 1) % len(ring)]
        if not job.crosses_network(rank, peer):
            return None
        work = _large_gradients(job.workload)
        fault = Fault(kind, rank, peer=peer, start_s=_moment(job), strength=strength, delay_ms=delay_ms)
        return work, (fault,), (), _expect(score, [verdict], [], [rank, peer])

    return make


def _init(job: _Job) -> _Made:
    rank = job.chance.randrange(job.layout.world)
    expect = _expect(ScoreClass.INIT_HANG, [VerdictClass.INIT_HANG], [rank])
    return job.workload, (Fault(FaultKind.INIT_MISSING, rank),), (), expect


def _slow(kind: FaultKind, verdict: VerdictClass, low: float, high: float) -> Callable[[_Job], _Made | None]:
    """A rank that is slow by itself; ``low`` to ``high`` is its strength, seconds in shares of an iteration's computing."""

    def make(job: _Job) -> _Made:
        rank, work = job.chance.randrange(job.layout.world), job.workload
        computing_s = work.micro_batches * work.virtual_stages * (work.forward_ms + work.backward_ms) / 1e3
        scale = 1.0 if kind in (FaultKind.SLOW_GPU, FaultKind.CPU_LIMIT) else max(0.2, computing_s)
        if kind is FaultKind.SLOW_COPY:  # once a micro-batch
            scale /= work.micro_batches * work.virtual_stages
        strength = job.chance.uniform(low, high) * scale
        period_s = 0.5 if kind is FaultKind.PROXY_SLEEP else 1.0
        fault = Fault(kind, rank, start_s=_moment(job) + LATENESS_S, strength=strength, period_s=period_s)
        score = ScoreClass.S1 if verdict is VerdictClass.SLOW_COMPUTATION else ScoreClass.S2
        # Which of those that NVLink joins computes longer lies in GPU memory: they may be named together.
        hidden = job.network.intra_node == "p2p" and kind is not FaultKind.SLOW_LOADER
        unseen = [r for r in range(job.layout.world) if hidden and not job.crosses_network(rank, r)]
        return work, (fault,), (), _expect(score, [verdict], [rank], unseen)

    return make


def _uses_network(job: _Job) -> bool:
    return job.network.intra_node == "net" or job.layout.world > job.layout.ranks_per_node


def _on_host(kind: FaultKind, strength: float, *, score: ScoreClass = ScoreClass.S1) -> Callable[[_Job], _Made | None]:
    """All ranks of a host, or its links."""

    def make(job: _Job) -> _Made | None:
        if job.layout.world <= job.layout.ranks_per_node:
            return None
        rank, work = job.chance.randrange(job.layout.world), job.workload
        ranks = [r for r in range(job.layout.world) if node_of(job.layout, r) == node_of(job.layout, rank)]
        if score is ScoreClass.S2:
            work = _large_gradients(work)
        verdict = VerdictClass.SLOW_COMPUTATION if score is ScoreClass.S1 else VerdictClass.SLOW_COMMUNICATION
        fault = Fault(kind, ranks[0], start_s=_moment(job) + LATENESS_S, strength=strength, delay_ms=2.0)
        return work, (fault,), (), _expect(score, [verdict], ranks)

    return make


def _one_nic(job: _Job) -> _Made | None:
    if not _uses_network(job) or not job.roles("dp"):
        return None
    rank = job.chance.randrange(job.layout.world)
    fault = Fault(FaultKind.NIC_LIMIT, rank, start_s=_moment(job), strength=30.0)
    work = _large_gradients(job.workload)
    return work, (fault,), (), _expect(ScoreClass.S2, [VerdictClass.SLOW_COMMUNICATION], [rank])


def _two_slow(job: _Job) -> _Made | None:
    """Two slow GPUs, alike."""
    if job.network.intra_node == "p2p":
        return None
    ranks = job.chance.sample(range(job.layout.world), 2)
    at, strength = _moment(job) + LATENESS_S, job.chance.uniform(3.0, 6.0)
    faults = tuple(Fault(FaultKind.SLOW_GPU, rank, start_s=at, strength=strength) for rank in ranks)
    return job.workload, faults, (), _expect(ScoreClass.S1, [VerdictClass.SLOW_COMPUTATION], ranks)


def _from_the_start(job: _Job) -> _Made | None:
    """A GPU that was slow before anybody looked; only equals tell."""
    if job.network.intra_node == "p2p" or job.layout.dp * job.layout.cp < 4:
        return None
    rank = job.chance.randrange(job.layout.world)
    fault = Fault(FaultKind.SLOW_GPU, rank, start_s=0.0, strength=job.chance.uniform(3.0, 6.0))
    return job.workload, (fault,), (), _expect(ScoreClass.S1, [VerdictClass.SLOW_COMPUTATION], [rank])


def _clean(job: _Job) -> _Made:
    return job.workload, (), (), Expectation(ScoreClass.CLEAN)


def _lookalike(job: _Job) -> _Made:
    kind = job.chance.choice(list(LookalikeKind))
    if kind is LookalikeKind.UNEVEN_STAGES and job.layout.pp == 1:
        kind = LookalikeKind.CHECKPOINT
    event = Lookalike(
        kind,
        iteration=0 if kind is LookalikeKind.WARMUP else BEFORE,
        count=job.chance.randint(1, 3),
        duration_s=job.chance.uniform(1.0, 20.0),
        factor=job.chance.uniform(1.5, 4.0),
        stage=job.chance.randrange(job.layout.pp),
    )
    return job.workload, (), (event,), Expectation(ScoreClass.CLEAN)


_KINDS: dict[str, Callable[[_Job], _Made | None]] = {
    "stopped": _outside(FaultKind.STOP, VerdictClass.STOPPED),
    "killed": _outside(FaultKind.KILL, VerdictClass.DEAD),
    "two-stopped": _two,
    "skip": _in_call(FaultKind.SKIP, ScoreClass.H1, [VerdictClass.NOT_ENTERED], ("tp", "cp", "dp")),
    "never-enters": _in_call(FaultKind.NEVER_ENTERS, ScoreClass.H1, [VerdictClass.NOT_ENTERED], ("tp", "cp", "dp", "pp")),
    "other-operation": _in_call(FaultKind.OTHER_OPERATION, ScoreClass.H2, [VerdictClass.INCONSISTENT], ("tp", "dp")),
    "other-size": _in_call(FaultKind.OTHER_SIZE, ScoreClass.H2, [VerdictClass.INCONSISTENT], ("tp", "dp"), 4.0),
    "other-type": _in_call(FaultKind.OTHER_TYPE, ScoreClass.H2, [VerdictClass.INCONSISTENT], ("tp", "dp"), 0.5),
    "gpu-stall": _gpu_stall,
    "link-down": _link(FaultKind.LINK_DOWN, ScoreClass.H3, VerdictClass.HARDWARE, 1.0),
    "init": _init,
    "slow-gpu": _slow(FaultKind.SLOW_GPU, VerdictClass.SLOW_COMPUTATION, 2.0, 6.0),
    "slow-loader": _slow(FaultKind.SLOW_LOADER, VerdictClass.SLOW_COMPUTATION, 1.0, 4.0),
    "gc-pause": _slow(FaultKind.GC_PAUSE, VerdictClass.SLOW_COMPUTATION, 1.0, 3.0),
    "slow-link": _link(FaultKind.SLOW_LINK, ScoreClass.S2, VerdictClass.SLOW_COMMUNICATION, 30.0),
    "clean": _clean,
    "look-alike": _lookalike,
}

_SLOW_KINDS: dict[str, Callable[[_Job], _Made | None]] = {
    **{name: _KINDS[name] for name in ("slow-gpu", "slow-loader", "gc-pause", "slow-link")},
    "late-link": _link(FaultKind.SLOW_LINK, ScoreClass.S2, VerdictClass.SLOW_COMMUNICATION, 1.0, 30.0),
    "lossy-link": _link(FaultKind.LOSSY_LINK, ScoreClass.S2, VerdictClass.SLOW_COMMUNICATION, 0.1, 200.0),
    "nic-limit": _one_nic,
    "background-traffic": _on_host(FaultKind.BACKGROUND_TRAFFIC, 20.0, score=ScoreClass.S2),
    "proxy-sleeps": _slow(FaultKind.PROXY_SLEEP, VerdictClass.SLOW_COMMUNICATION, 1.0, 3.0),
    "slow-copy": _slow(FaultKind.SLOW_COPY, VerdictClass.SLOW_COMPUTATION, 0.5, 1.5),
    "cpu-limit": _slow(FaultKind.CPU_LIMIT, VerdictClass.SLOW_COMPUTATION, 3000.0, 6000.0),
    "few-cpus": _on_host(FaultKind.FEW_CPUS, 3000.0),
    "host-load": _on_host(FaultKind.HOST_LOAD, 3.0),
    "two-slow-gpus": _two_slow,
    "slow-gpu-from-start": _from_the_start,
}
"""Kinds of slow jobs; those of both tables are drawn alike."""
