"""Single delays in a simulated job, and its iterations as a profiler on every node would have them: SIMULATED records.

Begin and end of each operation on each rank, on clocks that are wrong; nothing else of the simulation gets out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.gpu_operations import Operations
from ncclwatch.simulate.observe import Cast
from ncclwatch.simulate.program import Compute
from ncclwatch.simulate.scenario import Scenario
from ncclwatch.simulate.timeline import Block
from ncclwatch.simulate.vector import StageState, VectorExecutor


@dataclass(frozen=True, slots=True)
class Delay:
    """One delay: in the ``occurrence``-th piece of compute of that kind of a rank, or in a message from it to ``peer``."""

    iteration: int
    rank: int
    kind: str
    occurrence: int
    seconds: float
    peer: int = -1


class DelayedExecutor(VectorExecutor):
    """The simulator with single delays. Nothing else differs from the run without."""

    def __init__(self, scenario: Scenario, delays: list[Delay]) -> None:
        super().__init__(scenario)
        self.delays = {(d.iteration, d.rank, d.kind, d.occurrence): d for d in delays}
        self.now = 0
        self._counts: dict[tuple[int, str], int] = {}
        self._messages: dict[tuple[int, int], int] = {}

    def run_iteration(self, iteration: int) -> None:
        self.now = iteration
        self._counts, self._messages = {}, {}
        super().run_iteration(iteration)

    def _compute(self, state: StageState, action: Compute) -> None:
        super()._compute(state, action)
        if action.what not in ("forward", "backward"):
            return
        key = (state.stage, action.what)
        occurrence = self._counts.get(key, 0)
        self._counts[key] = occurrence + 1
        for i, rank in enumerate(state.ranks.tolist()):
            delay = self.delays.get((self.now, rank, action.what, occurrence))
            if delay is not None:
                state.gpu[i] += delay.seconds

    def _message(self, block: Block, peer: Block, send: bool) -> NDArray[np.float64]:
        ends = super()._message(block, peer, send)
        if not send:
            key = (block.stage, peer.stage)
            occurrence = self._messages.get(key, 0)
            self._messages[key] = occurrence + 1
            for i, (source, rank) in enumerate(zip(peer.ranks.tolist(), block.ranks.tolist(), strict=True)):
                delay = self.delays.get((self.now, source, "transmission", occurrence))
                if delay is not None and delay.peer == rank:
                    ends[i] += delay.seconds
        return ends


@dataclass(slots=True)
class Run:
    """One simulated run, iteration by iteration, as a profiler on every node would have it."""

    executor: DelayedExecutor
    cast: Cast
    _seen: int = 0

    def next(self, iteration: int) -> list[Block]:
        """Simulate an iteration and hand over its operations."""
        self.executor.run_iteration(iteration)
        blocks = self.executor.timeline.blocks[self._seen :]
        self._seen = len(self.executor.timeline.blocks)
        return blocks

    def duration(self) -> float:
        """True duration of the last iteration: from the last rank's end to the last rank's end."""
        ends = [self.executor.timeline.first_iteration_s, *(float(e.max()) for e in self.executor.timeline.iteration_ends)]
        return ends[-1] - ends[-2]


@dataclass(slots=True)
class Observed(Operations):
    """One iteration, in times as each node's clock showed them; sends need their receives too where messages are not buffered."""

    peers: list[tuple[int, int, int]]
    """(position of the message in its rank's program, stage, stage of the peer) of every kind of message"""
    size: int
    """Ranks of a stage, which are numbered one after the other."""

    def peers_of(self, operation: int) -> set[int]:
        """The ranks that an operation exchanges messages with."""
        rank = int(self.rank[operation])
        position = operation - int(np.searchsorted(self.rank, rank))
        stage = rank // self.size
        return {rank + (peer - stage) * self.size for at, own, peer in self.peers if at == position and own == stage}


def observe(blocks: list[Block], cast: Cast) -> Observed:
    """What a profiler gives of an iteration: columns of operations, and messages matched in the order they were called."""
    layout = cast.scenario.layout
    size = layout.world // layout.pp
    own = [[block for block in blocks if block.stage == stage] for stage in range(layout.pp)]
    counts = [len(part) for part in own]
    bases = np.concatenate([[0], np.cumsum(np.array(counts) * size)])
    total = int(bases[-1])
    rank, joint = np.empty(total, np.int64), np.empty(total, np.int64)
    begin, end = np.empty(total), np.empty(total)
    roles: dict[str, int] = {}
    rows: dict[int, NDArray[np.int64]] = {}
    peers = []
    for stage, part in enumerate(own):
        for position, block in enumerate(part):
            row = bases[stage] + (block.ranks - stage * size) * counts[stage] + position
            rows[id(block)] = row
            role = roles.setdefault(block.role, len(roles))
            rank[row], begin[row], end[row] = block.ranks, block.started, block.finished
            joint[row] = -1 if block.transfers else (role * 1_000_000 + block.groups) * 1_000_000 + block.sequence
            peers += [(position, stage, transfer.peer) for transfer in block.transfers]
    node = rank // layout.ranks_per_node
    begin, end = _shown(begin, node, cast), _shown(end, node, cast)
    return Observed(rank, node, joint, _matched(blocks, rows, begin, end), begin, end, peers, size)


def _shown(times: NDArray[np.float64], node: NDArray[np.int64], cast: Cast) -> NDArray[np.float64]:
    offsets = np.array([clock.offset_s for clock in cast.clocks])[node]
    drifts = np.array([clock.drift for clock in cast.clocks])[node]
    shown: NDArray[np.float64] = times * (1 + drifts) + offsets
    return shown


def _matched(
    blocks: list[Block], rows: dict[int, NDArray[np.int64]], begin: NDArray[np.float64], end: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Match the k-th send to a rank with the k-th receive from it, as NCCL does; a message is (receiving row, sending row)."""
    sends: dict[tuple[int, int], list[NDArray[np.int64]]] = {}
    receives: dict[tuple[int, int], list[NDArray[np.int64]]] = {}
    for block in blocks:
        for transfer in block.transfers:
            key = (block.stage, transfer.peer) if transfer.send else (transfer.peer, block.stage)
            (sends if transfer.send else receives).setdefault(key, []).append(rows[id(block)])
    pairs = [
        np.stack([receive, send], axis=1)
        for key, found in receives.items()
        for receive, send in zip(found, sends.get(key, ()), strict=False)
    ]
    if not pairs:
        return np.zeros((0, 2), np.int64)
    needs = np.concatenate(pairs)
    # Where some send ends before its receive begins, messages are buffered and senders need not wait.
    if bool(np.any(end[needs[:, 1]] < begin[needs[:, 0]] - 0.01)):
        return needs
    return np.concatenate([needs, needs[:, ::-1]])
