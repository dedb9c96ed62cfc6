"""Operations step by step: every rank's part is a sequence of primitives, joined to its neighbours' by connections of eight
slots.

A rank's kernel runs its primitives in order; a primitive waits for a slice from each connection it reads and a free slot on
each it writes. Each is a sequential process with blocking reads and writes on first-in-first-out channels, so the result does
not depend on the order of evaluation, times are maxima of times, and a hang is simply that nothing can be evaluated any more:
what has happened by then is the state that a reader of the job's memory would find.

The proxy's part follows NCCL ``src/transport/net.cc`` (v2.27.5-1): a slice goes out when the GPU has produced it and the
receiver has a buffer posted; it is done for the sender when the network says so, and for the receiver when its GPU has consumed
it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ncclwatch.model.state import Transport
from ncclwatch.simulate.disturbance import Disturbance, LinkEffect, Window, live
from ncclwatch.simulate.geometry import Cut, Path, Paths, double_tree

Primitive = tuple[tuple["Connection", ...], tuple["Connection", ...]]
"""(connections read, connections written) of one slice of work."""


_NO_CHANCE = np.random.default_rng(0)
"""For connections on which nothing happens by chance: a generator is costly to make."""


class Connection:
    """One direction of one channel between two ranks; lists are indexed by the connection's absolute slice, times never fall."""

    __slots__ = (
        "acknowledged", "arrived", "buffer", "bytes", "consumed", "destination", "direct", "effects", "opened", "path",
        "produced", "proxy_in", "proxy_out", "reader", "received", "rng", "sent", "slots", "source", "transmitted", "writer",
    )  # fmt: skip

    def __init__(self, source: int, destination: int, path: Path, slots: int, disturbance: Disturbance, seed: int) -> None:
        self.source, self.destination, self.path, self.slots = source, destination, path, slots
        self.direct = path.transport is not Transport.NET
        self.produced: list[float] = []
        self.transmitted: list[float] = []
        self.sent: list[float] = []
        self.arrived: list[float] = []
        self.buffer = path.socket_buffer
        self.acknowledged: list[float] = []
        self.received: list[float] = []
        self.consumed: list[float] = []
        self.opened: list[float] = []  # when the receiver's operation that holds this slice was posted
        self.bytes: list[float] = []
        self.effects: list[LinkEffect] = [] if self.direct else disturbance.link_effects(source, destination)
        self.proxy_out: list[Window] | None = None if self.direct else disturbance.proxy.get(source)
        self.proxy_in: list[Window] | None = None if self.direct else disturbance.proxy.get(destination)
        self.rng = np.random.default_rng([seed, source, destination]) if self.effects else _NO_CHANCE
        self.writer: Task | None = None
        self.reader: Task | None = None

    def slot_free(self, slice_: int) -> float | None:
        """When the GPU may write a slice, or ``None`` while that is unknown."""
        before = slice_ - self.slots
        if before < 0:
            return 0.0
        freed = self.consumed if self.direct else self.acknowledged
        return freed[before] if before < len(freed) else None

    def advance(self) -> bool:
        """Move produced slices through proxy and network as far as is known; whether any moved."""
        moved = False
        while self._transmit() | self._deliver() | self._receive():
            moved = True
        return moved

    def _posted(self, m: int) -> float | None:
        """When the receiver's proxy opens a buffer for a slice, or ``None`` while that is unknown."""
        if m >= len(self.opened):
            return None
        if m < self.slots:
            return live(self.proxy_in, self.opened[m])
        if m - self.slots >= len(self.consumed):
            return None
        return live(self.proxy_in, max(self.opened[m], self.consumed[m - self.slots]))

    def _transmit(self) -> bool:
        """The sender's proxy hands a slice to the network: over InfiniBand once a buffer is posted, over sockets at once."""
        m = len(self.transmitted)
        if m >= len(self.produced):
            return False
        if self.direct:
            self.transmitted.append(self.produced[m])
            return True
        posted: float | None = 0.0 if self.buffer else self._posted(m)
        if posted is None:
            return False
        earliest = max(self.produced[m], posted, self.transmitted[-1] if m else 0.0)
        self.transmitted.append(live(self.proxy_out, earliest))
        return True

    def _deliver(self) -> bool:
        """The network carries a slice; a socket takes only what its buffers hold beyond what the receiver has taken."""
        m = len(self.sent)
        if m >= len(self.transmitted):
            return False
        start = max(self.transmitted[m], self.sent[-1] if m else 0.0)
        if self.buffer:
            held, k = self.bytes[m], m
            while k > 0 and held + self.bytes[k - 1] <= self.buffer:
                k -= 1
                held += self.bytes[k]
            if k > 0:
                if k > len(self.received):
                    return False
                start = max(start, self.received[k - 1])
        duration, delay, slow_ack = self.bytes[m] / self.path.rate, self.path.latency, self.path.latency
        slowest_nic = 1.0
        for effect in self.effects:
            if effect.start <= start < effect.end:
                if effect.down:
                    start = effect.end
                    continue
                if effect.shared:
                    slowest_nic = max(slowest_nic, effect.factor)
                else:
                    duration *= effect.factor
                slow_ack = max(slow_ack, self.path.latency + effect.acknowledgement_delay)
                if effect.delay and (effect.probability >= 1 or self.rng.random() < effect.probability):
                    delay += effect.delay
        duration *= slowest_nic
        self.sent.append(start + duration)
        arrival = max(start + duration + delay, self.arrived[-1] if m else 0.0)
        self.arrived.append(arrival)
        # A socket is done with a slice when the kernel has taken it, a queue pair when the other side has acknowledged it.
        done = live(self.proxy_out, self.sent[m] if self.buffer else arrival + slow_ack)
        self.acknowledged.append(max(done, self.acknowledged[-1]) if m else done)
        return True

    def _receive(self) -> bool:
        m = len(self.received)
        if m >= len(self.arrived):
            return False
        posted: float | None = self._posted(m) if self.buffer and not self.direct else 0.0
        if posted is None:
            return False
        self.received.append(live(self.proxy_in, max(self.arrived[m], posted)))
        return True


@dataclass(frozen=True, slots=True)
class End:
    """One rank's side of a connection in one operation: slices ``first`` to ``first + count`` of the connection."""

    connection: Connection
    send: bool
    first: int
    count: int


class Task:
    """One rank's sequence of primitives on one channel."""

    __slots__ = ("cost", "cursor", "gpu", "on_done", "primitives", "slice_bytes", "time")

    def __init__(self, primitives: Sequence[Primitive], slice_bytes: float, cost: float, gpu: list[Window] | None) -> None:
        self.primitives, self.slice_bytes, self.cost, self.gpu = primitives, slice_bytes, cost, gpu
        self.time = math.inf
        self.cursor = 0
        self.on_done: Callable[[float], None] | None = None


class StepNetwork:
    """Evaluates tasks until nothing moves. Connections may live on from one operation to the next, as NCCL's do."""

    def __init__(self, paths: Paths, disturbance: Disturbance, seed: int, step_cost: float) -> None:
        self._paths, self._disturbance, self._seed = paths, disturbance, seed
        self.step_cost = step_cost
        self._ready: deque[Task] = deque()

    def connect(self, source: int, destination: int, slots: int) -> Connection:
        """A new connection between two global ranks."""
        return Connection(source, destination, self._paths(source, destination), slots, self._disturbance, self._seed)

    def task(self, rank: int, primitives: Sequence[Primitive], slice_bytes: float) -> Task:
        """A task of a global rank; it does not run before :meth:`start`."""
        return Task(primitives, slice_bytes, self.step_cost, self._disturbance.gpu.get(rank))

    def open(self, connection: Connection, count: int, time: float) -> None:
        """The receiver's operation with ``count`` slices was handed to its proxy at ``time``."""
        connection.opened.extend([live(connection.proxy_in, time)] * count)
        if connection.advance():
            self._wake(connection)

    def start(self, task: Task, time: float) -> None:
        """The task's kernel starts at ``time``."""
        task.time = time
        if math.isfinite(time):
            self._ready.append(task)

    def run(self) -> None:
        """Evaluate until no task can move."""
        while self._ready:
            self._run(self._ready.popleft())

    def _wake(self, connection: Connection) -> None:
        for task in (connection.reader, connection.writer):
            if task is not None:
                self._ready.append(task)
        connection.reader = connection.writer = None

    def _run(self, task: Task) -> None:
        primitives, total = task.primitives, len(task.primitives)
        while task.cursor < total:
            reads, writes = primitives[task.cursor]
            time = task.time
            for connection in reads:
                m = len(connection.consumed)
                if m >= len(connection.received):
                    connection.reader = task
                    return
                time = max(time, connection.received[m])
            for connection in writes:
                free = connection.slot_free(len(connection.produced))
                if free is None:
                    connection.writer = task
                    return
                time = max(time, free)
            time = live(task.gpu, time) + task.cost
            if not math.isfinite(time):
                return
            task.time = time
            task.cursor += 1
            for connection in reads:
                connection.consumed.append(time)
                if connection.advance() or connection.direct:
                    self._wake(connection)
            for connection in writes:
                connection.produced.append(time)
                connection.bytes.append(task.slice_bytes)
                if connection.advance():
                    self._wake(connection)
        if task.on_done is not None:
            done, task.on_done = task.on_done, None
            done(task.time)


def ring_primitives(function: str, nranks: int, pieces: Cut, before: Connection, after: Connection) -> list[Primitive]:
    """A rank's primitives in a ring: send, then receive-and-send, then receive; AllReduce goes round twice less one."""
    turns = 2 * nranks - 1 if function == "AllReduce" else nranks
    first: Primitive = ((), (after,))
    middle: Primitive = ((before,), (after,))
    last: Primitive = ((before,), ())
    # Each is made once: at a hundred thousand ranks a tuple for every turn would be gigabytes.
    slices = pieces.chunk_slices
    chunk = [first] * slices + [middle] * ((turns - 2) * slices) + [last] * slices
    return chunk * pieces.loops


@dataclass(slots=True)
class Trace:
    """One operation of one group, step by step: for each rank when its kernel finished (``inf`` if never) and its ends of
    connections.

    All channels of an operation behave alike, so one stands for all. Members are indices into the group.
    """

    pieces: Cut
    finished: list[float]
    ends: list[list[End]]


def run_group(
    network: StepNetwork, function: str, members: Sequence[int], pieces: Cut, started: Sequence[float], launched: Sequence[float]
) -> Trace:
    """Run one operation of a group on connections of its own. ``started`` and ``launched`` are times by member, ``inf`` for
    never.
    """
    n = len(members)
    finished = [math.inf] * n
    ends: list[list[End]] = [[] for _ in range(n)]
    tasks: list[tuple[int, Task]] = []
    if n == 1:
        return Trace(pieces, [s + network.step_cost for s in started], ends)
    if function == "AlltoAll":
        tasks = _exchange_tasks(network, members, pieces, ends)
    elif pieces.algorithm == "Tree":
        tasks = _tree_tasks(network, members, pieces, ends)
    else:
        links = [network.connect(members[i], members[(i + 1) % n], pieces.slots) for i in range(n)]
        for i in range(n):
            primitives = ring_primitives(function, n, pieces, links[i - 1], links[i])
            slices = pieces.steps // pieces.slice_steps
            ends[i] = [End(links[i], True, 0, slices), End(links[i - 1], False, 0, slices)]
            tasks.append((i, network.task(members[i], primitives, pieces.slice_bytes)))
    outstanding = [0] * n
    latest = [0.0] * n

    def done(index: int) -> Callable[[float], None]:
        def record(time: float) -> None:
            outstanding[index] -= 1
            latest[index] = max(latest[index], time)
            if not outstanding[index]:
                finished[index] = latest[index]

        return record

    for i, own in enumerate(ends):
        for end in own:
            if not end.send and math.isfinite(launched[i]):
                network.open(end.connection, end.count, launched[i])
    for i, task in tasks:
        outstanding[i] += 1
        task.on_done = done(i)
        network.start(task, started[i])
    network.run()
    return Trace(pieces, finished, ends)


def _tree_tasks(network: StepNetwork, members: Sequence[int], pieces: Cut, ends: list[list[End]]) -> list[tuple[int, Task]]:
    """Up and down the first tree at once; NCCL gives each direction its own warps."""
    tree = double_tree(len(members))[0]
    slices = pieces.loops
    up = {i: network.connect(members[i], members[p], pieces.slots) for i, (p, _) in enumerate(tree) if p >= 0}
    down = {i: network.connect(members[p], members[i], pieces.slots) for i, (p, _) in enumerate(tree) if p >= 0}
    tasks = []
    for i, (parent, children) in enumerate(tree):
        reduced = tuple(up[c] for c in children)
        spread = tuple(down[c] for c in children)
        ends[i] += [End(c, False, 0, slices) for c in reduced] + [End(c, True, 0, slices) for c in spread]
        if parent < 0:
            tasks.append((i, network.task(members[i], [(reduced, spread)] * slices, pieces.slice_bytes)))
            continue
        ends[i] += [End(up[i], True, 0, slices), End(down[i], False, 0, slices)]
        tasks.append((i, network.task(members[i], [(reduced, (up[i],))] * slices, pieces.slice_bytes)))
        tasks.append((i, network.task(members[i], [((down[i],), spread)] * slices, pieces.slice_bytes)))
    return tasks


def _exchange_tasks(network: StepNetwork, members: Sequence[int], pieces: Cut, ends: list[list[End]]) -> list[tuple[int, Task]]:
    tasks = []
    n = len(members)
    for i in range(n):
        for offset in range(1, n):
            j = (i + offset) % n
            link = network.connect(members[i], members[j], pieces.slots)
            ends[i].append(End(link, True, 0, pieces.steps))
            ends[j].append(End(link, False, 0, pieces.steps))
            tasks.append((i, network.task(members[i], [((), (link,))] * pieces.steps, pieces.slice_bytes)))
            tasks.append((j, network.task(members[j], [((link,), ())] * pieces.steps, pieces.slice_bytes)))
    return tasks


@dataclass(frozen=True, slots=True)
class Counters:
    """A side's counters at one moment, in steps; meanings as in ``ProxySub``. ``live`` is false while the proxy has not begun
    it.
    """

    live: bool
    posted: int
    received: int
    transmitted: int
    done: int
    gpu_ready: int | None


def counters(end: End, slice_steps: int, launched: float, time: float) -> Counters:
    """What NCCL would show for one side of a connection at ``time``, the operation having been handed to the proxy at
    ``launched``.
    """
    link, first, total = end.connection, end.first, end.count

    def count(times: list[float]) -> int:
        return max(0, min(total, bisect_right(times, time) - first))

    if end.send:
        begun = live(link.proxy_out, launched) <= time
        done = count(link.acknowledged)
        posted = min(total, done + link.slots) if begun else 0
        transmitted, received, ready = count(link.transmitted), 0, count(link.produced)
    else:
        begun = live(link.proxy_in, launched) <= time
        done = count([live(link.proxy_in, t) for t in link.consumed] if link.proxy_in else link.consumed)
        posted = min(total, done + link.slots) if begun else 0
        received = transmitted = count(link.received)
        ready = 0
    s = slice_steps
    return Counters(begun, posted * s, received * s, transmitted * s, done * s, ready * s if end.send else None)
