"""Made-up views for tests, pictures and benchmarks of the dashboard: a job of any size in any trouble, at a frozen time."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.collect.windows import CurrentOperation, LastCall, RankWindow
from ncclwatch.model.state import ProcessInfo, ProcessSample
from ncclwatch.model.verdict import CommunicatorRef, Culprit, OperationRef, Step, StepKind, Verdict, VerdictClass
from ncclwatch.view.frame import Cost, Frame, LogEntry, Plane, View
from unit.synthetic import WORLD, Rank, communicator, frozen_ring, process, recv, send

TIME = 1_700_000_000.0
"""2023-11-14 22:13:20 UTC."""
PLANES = (Plane("state", True), Plane("calls", True))
COST = Cost(812.0, 0.00043, 0.0021, 93 << 20)


def info(rank: int, world: int, per_host: int = 8) -> ProcessInfo:
    return replace(process(rank, world, host=f"node{rank // per_host:03d}"))


def window(
    rank: int, world: int, *, still_s: float = 0.1, run_state: str = "S", age_s: float = 0.4, done: int = 40
) -> RankWindow:
    operation = CurrentOperation(
        "AllReduce", "state", WORLD << 40, rank, world, 1124, age_s, False, count=1 << 20, nbytes=4 << 20,
        protocol="Simple", algorithm="Ring", steps_done=done, steps_total=96,
    )  # fmt: skip
    moving = still_s < 1.0
    return RankWindow(
        time_ns=0,
        process=info(rank, world),
        rank=rank,
        gpu=rank % 8,
        run_state=run_state,
        operation=operation,
        last_call=LastCall("AllReduce", WORLD << 40, age_s, 1 << 20, 4 << 20),
        calls=9,
        operations=9,
        operations_per_s=312.0 if moving else 0.0,
        rate_plane="calls",
        bytes_per_s=1.25e9 if moving else 0.0,
        steps_per_s=812.0 if moving else 0.0,
        still_s=still_s,
    )


def verdict_of(kind: VerdictClass, culprit: int, world: int) -> Verdict:
    """A verdict of that class about one rank; about nobody where the class accuses nobody."""
    if not kind.accuses:
        summary = {
            VerdictClass.RUNNING: "NCCL makes progress on all ranks",
            VerdictClass.IDLE: "no operation is open on any rank",
        }.get(kind, "nothing moves in AllReduce #1124, and the evidence singles nobody out")
        steps = ("look again with 'ncclwatch diagnose --wait 30'",) if kind is VerdictClass.UNKNOWN else ()
        return Verdict(kind, summary, next_steps=steps, confidence=1.0)
    rule = "halted" if kind is VerdictClass.STOPPED else kind.value
    host = f"node{culprit // 8:03d}"
    waits = f"rank {(culprit + 1) % world} waits for rank {culprit}: AllReduce #1124 receiving, channel 0, received 92 of 96"
    return Verdict(
        kind,
        f"rank {culprit} ({host}, pid {1000 + culprit}, GPU {culprit % 8}) holds up the job in AllReduce #1124: {kind.value}",
        culprits=(Culprit(culprit, culprit, host, 1000 + culprit, culprit % 8, reason="it is the one the others wait for"),),
        victims=tuple(rank for rank in range(world) if rank != culprit),
        communicator=CommunicatorRef(f"{WORLD << 40:016x}", world, "data"),
        operation=OperationRef("AllReduce", 1124, "Simple", "Ring"),
        since=TIME - 12.3,
        time=TIME,
        confidence=0.93,
        evidence=(
            waits,
            f"no NCCL counter moved in any of {world} processes for 12 s",
            "the others have nothing open that anybody waits for",
        ),
        unobserved=("P2P and NVLink transfers have no proxy: their progress cannot be seen",),
        next_steps=(f"look at what rank {culprit} does: 'ncclwatch attach --pid {1000 + culprit}', then k for its threads",),
        trail=(
            Step(StepKind.FACT, "", waits),
            Step(StepKind.DRAWN, "some-rule", f"rank {(culprit + 2) % world} waits for rank {(culprit + 1) % world}, unseen"),
            Step(StepKind.RETRACTED, "another-rule", f"rank {culprit} waits for rank {(culprit - 1) % world}: AllReduce #1125"),
            Step(StepKind.LOST, "unseen", "unknown: nobody is named", rule),
            Step(StepKind.STANDS, rule, f"{kind.value}: rank {culprit} (confidence 93%)"),
        ),
    )


def view(
    ranks: int = 8,
    kind: VerdictClass = VerdictClass.RUNNING,
    *,
    culprit: int | None = None,
    lost: int = 0,
    calls: bool = True,
    world: int | None = None,
    samples: bool = True,
    number: int = 7,
    time: float = TIME,
) -> View:
    """A job of ``ranks`` observed ranks, 8 a node, in a state that goes with the verdict."""
    guilty = ranks // 3 if culprit is None else culprit
    size = world or ranks
    stuck = kind.accuses or kind is VerdictClass.UNKNOWN
    windows = []
    for rank in range(ranks):
        done = 92 if stuck else (rank * 7 + number * 5) % 96
        found = window(rank, size, still_s=12.3 if stuck else 0.1, age_s=12.3 if stuck else 0.4, done=done)
        if kind is VerdictClass.IDLE:
            found = replace(found, operation=None, still_s=30.0, operations_per_s=0.0)
        if rank == guilty and stuck and kind is not VerdictClass.UNKNOWN:
            halted = {VerdictClass.STOPPED: "T", VerdictClass.DEAD: "X"}.get(kind, "S")
            found = replace(found, run_state=halted, operation=None if kind is VerdictClass.NOT_ENTERED else found.operation)
        windows.append(found)
    log = [
        LogEntry(TIME - 60, "process", f"watching {ranks} processes"),
        *([LogEntry(TIME - 2, "verdict", verdict_of(kind, guilty, size).summary)] if kind.accuses else []),
        *([LogEntry(TIME - 1, "loss", f"{lost} call records lost")] if lost else []),
    ]
    planes = PLANES if calls else (Plane("state", True), Plane("calls", False, "CAP_BPF is missing"))
    frame = Frame(
        time=time,
        number=number,
        windows=windows,
        samples={s.process.key: s for s in sample_series(windows, size)} if samples else {},
        verdicts=(verdict_of(kind, guilty, size),),
        planes=planes,
        lost=lost,
        cost=COST if calls else replace(COST, hits_per_s=None, probe_share=None),
        log=log,
    )
    return View(frame)


def sample_series(windows: list[RankWindow], world: int) -> list[ProcessSample]:
    """A look at each process with one transfer each way."""
    samples = []
    for found in windows:
        rank = found.rank or 0
        comm = communicator(rank, world, comm_hash=WORLD << 40) if world <= 64 else small_communicator(rank, world)
        done = found.operation.steps_done if found.operation else 96
        operations = (
            send((rank + 1) % world, sent=done, done=done, produced=done, comm_hash=WORLD << 40, op_count=2248),
            recv(
                (rank - 1) % world, posted=96, received=done, delivered=done, consumed=done, comm_hash=WORLD << 40, op_count=2248
            ),
        )
        look = Rank(rank, world, (comm,), operations if found.operation else (), found.run_state).looks(1)[0]
        samples.append(replace(look, process=found.process))
    return samples


def small_communicator(rank: int, world: int):  # type: ignore[no-untyped-def]
    """A communicator whose peers are left out: thousands of them in thousands of ranks take minutes to make."""
    return replace(communicator(rank, 2, comm_hash=WORLD << 40), nranks=world, rank=rank, peers=())


__all__ = ["TIME", "frozen_ring", "view", "window"]
