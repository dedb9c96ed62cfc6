"""Small hand-made jobs for tests of the engine: records of the state plane, as they would be read, with nothing running."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import (
    ChannelRing,
    Communicator,
    Direction,
    HostConnection,
    OpPhase,
    PeerInfo,
    ProcessInfo,
    ProcessSample,
    ProxyOperation,
    ProxySub,
    Transport,
    VersionSource,
)

WORLD = 0xA1
SECOND = 1_000_000_000


def process(rank: int, world: int, *, host: str | None = None) -> ProcessInfo:
    """A process of a job with one rank a host."""
    host = host or f"node{rank}"
    return ProcessInfo(
        key=ProcessKey("boot-" + host, 1000 + rank, 5, "ab" * 20),
        host=host,
        name="train",
        command=("train",),
        library="/lib/libnccl.so.2",
        version=(2, 27, 5),
        version_source=VersionSource.DEBUG_INFO,
        rank=rank,
        world_size=world,
        rank_source="RANK",
    )


def address_of(comm_hash: int) -> int:
    """Where a communicator lies, the same in every process."""
    return 0x1000 + comm_hash


def communicator(rank: int, nranks: int, *, comm_hash: int = WORLD, transport: Transport = Transport.NET) -> Communicator:
    """A communicator with one ring on channel 0."""
    previous, following = (rank - 1) % nranks, (rank + 1) % nranks
    return Communicator(
        address=address_of(comm_hash),
        hash=comm_hash,
        rank=rank,
        nranks=nranks,
        device=0,
        peers=tuple(PeerInfo(r, host_hash=100 + r, pid_hash=r) for r in range(nranks)),
        rings=(ChannelRing(0, previous, following),),
        transports=((0, previous, Direction.RECV, transport), (0, following, Direction.SEND, transport)),
    )


def operation(
    direction: Direction,
    peer: int,
    counters: tuple[int, int, int, int],
    *,
    comm_hash: int = WORLD,
    op_count: int = 26,
    nsteps: int = 96,
    base: int = 960,
    gpu_ready: int | None = None,
    phase: OpPhase = OpPhase.PROGRESS,
    collective: str = "AllReduce",
    channel: int = 0,
    queued_behind: int = 0,
) -> ProxyOperation:
    """One proxy operation with one transfer; ``counters`` are posted, received, transmitted, done."""
    posted, received, transmitted, done = counters
    sub = ProxySub(channel, peer, nsteps, base, posted, received, transmitted, done, gpu_ready=gpu_ready)
    return ProxyOperation(
        address=0x2000 + op_count * 64 + peer * 4 + (direction is Direction.RECV),
        comm_hash=comm_hash,
        direction=direction,
        transport=Transport.NET,
        phase=phase,
        op_count=op_count,
        collective=collective,
        protocol="Simple",
        algorithm="Ring",
        slice_steps=2,
        subs=(sub,),
        queued_behind=queued_behind,
        net_name="Socket",
        comm_address=address_of(comm_hash),
    )


def send(peer: int, *, sent: int, done: int, produced: int | None, **more: object) -> ProxyOperation:
    """A sending operation: steps produced by the GPU, handed to the network, completed."""
    posted = min(done + 8, int(str(more.get("nsteps", 96))))
    return operation(Direction.SEND, peer, (posted, 0, sent, done), gpu_ready=produced, **more)  # type: ignore[arg-type]


def recv(peer: int, *, posted: int, received: int, delivered: int, consumed: int, **more: object) -> ProxyOperation:
    """A receiving operation: buffers posted, steps arrived, handed to the GPU, consumed by it."""
    return operation(Direction.RECV, peer, (posted, received, delivered, consumed), **more)  # type: ignore[arg-type]


def shared(direction: Direction, peer: int, head: int, tail: int) -> HostConnection:
    """One end of a shared-memory connection on channel 0."""
    return HostConnection(0, peer, direction, 0, head, tail)


@dataclass
class Rank:
    """What one process shows; ``looks`` turns it into samples a second apart that all show the same."""

    rank: int
    world: int
    communicators: tuple[Communicator, ...]
    operations: tuple[ProxyOperation, ...] = ()
    run_state: str = "S"
    host: str | None = None
    extra: dict[str, object] = field(default_factory=dict)

    def looks(self, count: int = 2, *, apart_s: float = 1.0) -> list[ProcessSample]:
        return [
            ProcessSample(
                process=process(self.rank, self.world, host=self.host),
                time_ns=int((100 + index * apart_s) * SECOND),
                wall_ns=int((1_700_000_000 + index * apart_s) * SECOND),
                duration_ns=1_000_000,
                run_state=self.run_state,
                communicators=self.communicators,
                operations=self.operations,
                **self.extra,  # type: ignore[arg-type]
            )
            for index in range(count)
        ]


def looks(ranks: Sequence[Rank], count: int = 2) -> list[list[ProcessSample]]:
    """Samples of all ranks, nothing moving."""
    return [rank.looks(count) for rank in ranks]


def frozen_ring(victim: int = 2, world: int = 4, *, run_state: str = "T") -> list[Rank]:
    """A ring AllReduce in which one rank stopped in the middle: its successor starves, its predecessor is full.

    Every rank has consumed what it got; the frozen one has taken 92 steps and sent 92.
    """
    ranks = []
    for rank in range(world):
        following, previous = (rank + 1) % world, (rank - 1) % world
        if rank == victim:
            operations = (
                send(following, sent=92, done=92, produced=92),
                recv(previous, posted=96, received=92, delivered=92, consumed=92),
            )
        elif rank == (victim + 1) % world:
            # It got what the frozen rank sent and no more, and passed that on.
            operations = (
                send(following, sent=92, done=92, produced=92),
                recv(previous, posted=96, received=92, delivered=92, consumed=92),
            )
        else:
            operations = (
                send(following, sent=96, done=92, produced=96)
                if following == victim
                else send(following, sent=94, done=94, produced=94),
                recv(previous, posted=96, received=94, delivered=94, consumed=94)
                if previous != (victim + 1) % world
                else recv(previous, posted=96, received=92, delivered=92, consumed=92),
            )
        state = run_state if rank == victim else "S"
        ranks.append(Rank(rank, world, (communicator(rank, world),), operations, state))
    return ranks


def moved(sample: ProcessSample) -> ProcessSample:
    """The same process after its first operation has gone one slice further."""
    first, *rest = sample.operations
    sub = replace(first.subs[0], done=first.subs[0].done + 2)
    return replace(sample, operations=(replace(first, subs=(sub,)), *rest))


def absent_from_ring(world: int = 4, late: int = 2) -> list[Rank]:
    """One rank has not called the collective: it has no operation; its neighbours' operations stand at the beginning."""
    ranks = []
    for rank in range(world):
        following, previous = (rank + 1) % world, (rank - 1) % world
        operations: tuple[ProxyOperation, ...] = ()
        if rank != late:
            steps = 8 if following == late else 4
            operations = (
                send(following, sent=steps, done=0 if following == late else steps, produced=steps),
                recv(previous, posted=8, received=0, delivered=0, consumed=0)
                if previous == late
                else recv(previous, posted=12, received=4, delivered=4, consumed=4),
            )
        ranks.append(Rank(rank, world, (communicator(rank, world),), operations))
    return ranks


def silent_link(*also: int) -> list[Rank]:
    """A ring in which rank 1 has sent, and rank 2 has not received; nor have those who follow on the ranks ``also``."""
    ranks = []
    for rank in range(4):
        lost = rank in (1, *also)
        arrived = 0 if (rank - 1) % 4 in (1, *also) else 4
        got = recv((rank - 1) % 4, posted=arrived + 8, received=arrived, delivered=arrived, consumed=arrived, base=960)
        sent = send((rank + 1) % 4, sent=8 if lost else 4, done=0 if lost else 4, produced=8 if lost else 4, base=960)
        ranks.append(Rank(rank, 4, (replace(communicator(rank, 4), op_count=500),), (sent, got)))
    return ranks
