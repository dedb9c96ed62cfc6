"""The executor for many ranks: all ranks of a pipeline stage run the same program, so each action is one array operation over
the stage.

An undisturbed operation ends a known time after its last rank began. Only where a fault touches an operation of a group is that
group run step by step. A rank that never gets somewhere has time ``inf`` there, and the maximum over a group passes it on: a
hang spreads by itself. Ranks whose programs differ (skip, swap, another size) need the exact executor.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from ncclwatch.simulate.disturbance import Disturbance, advance, live, stretched
from ncclwatch.simulate.geometry import cut
from ncclwatch.simulate.layout import ACROSS_STAGES, groups, membership, ranks_of_stage
from ncclwatch.simulate.machine import Machine
from ncclwatch.simulate.program import Action, Collective, Compute, PointToPoint, iteration_program
from ncclwatch.simulate.scenario import Fault, FaultKind, Scenario
from ncclwatch.simulate.timeline import Block, Indices, LinkKey, Timeline, Times


@dataclass(slots=True)
class StageState:
    """Where a stage stands: clocks of its ranks' hosts and GPUs, operations called and not yet waited for, counters of its
    communicators.
    """

    stage: int
    ranks: Indices
    host: Times
    gpu: Times
    recent: deque[Times]
    sequences: dict[str, int] = field(default_factory=dict)
    bases: dict[tuple[str, str], int] = field(default_factory=dict)
    occurrences: dict[str, int] = field(default_factory=dict)
    program: list[Action] = field(default_factory=list)
    cursor: int = 0
    compute_index: int = 0
    jitter: Times = field(default_factory=lambda: np.zeros((0, 0)))
    waiting: Block | None = None


class VectorExecutor:
    """Runs a scenario iteration by iteration."""

    def __init__(self, scenario: Scenario, disturbance: Disturbance | None = None) -> None:
        self.scenario = scenario
        self.disturbance = disturbance or Disturbance()
        self.machine = Machine(scenario, self.disturbance)
        self.timeline = Timeline(scenario, self.disturbance)
        self.pending: list[Fault] = []
        start = scenario.network.init_s
        for fault in scenario.faults:
            if fault.start_s is not None:
                self.disturbance.apply(fault, start + fault.start_s, scenario.layout, scenario.seed)
            elif fault.kind is not FaultKind.INIT_MISSING:
                self.pending.append(fault)
        self.stages = [self._stage(stage, start) for stage in range(scenario.layout.pp)]
        self._refresh()

    def _stage(self, stage: int, start: float) -> StageState:
        ranks = np.array(ranks_of_stage(self.scenario.layout, stage), np.int64)
        clocks = np.full(len(ranks), start)
        return StageState(stage, ranks, clocks.copy(), clocks.copy(), deque(maxlen=self.scenario.workload.host_ahead))

    def _refresh(self) -> None:
        """Which ranks need a look of their own; again after every fault that begins."""
        d = self.disturbance
        self._odd_compute = {r for t in (d.compute, d.gpu, d.copies) for r, w in t.items() if w}
        self._odd_host = {r for t in (d.host, d.loader) for r, w in t.items() if w}
        self._odd_calls = {r for r, w in d.calls.items() if w}
        self._odd_operations = d.ranks_in_operations()

    def run(self, iterations: range | None = None) -> Timeline:
        """Run iterations and return the timeline so far."""
        for iteration in range(self.scenario.workload.iterations) if iterations is None else iterations:
            self.run_iteration(iteration)
        return self.timeline

    def run_iteration(self, iteration: int) -> None:
        """Run one iteration on all stages; raises ``RuntimeError`` if the schedules themselves do not fit together."""
        for state in self.stages:
            state.program = iteration_program(self.scenario, state.stage, iteration)
            count = sum(isinstance(action, Compute) for action in state.program)
            state.jitter = self.machine.jitter(iteration, state.stage, count)
            state.cursor = state.compute_index = 0
            state.occurrences = {}
        moved = True
        while moved:
            moved = False
            for state in self.stages:
                while state.waiting is None and state.cursor < len(state.program):
                    self._do(state, state.program[state.cursor], iteration)
                    moved = True
                if state.waiting is not None and self._try_finish(state):
                    moved = True
        if any(state.cursor < len(state.program) for state in self.stages):
            raise RuntimeError("the schedule cannot proceed: sends and receives of the stages do not match")
        ends = np.empty(self.scenario.layout.world)
        for state in self.stages:
            ends[state.ranks] = state.gpu
        self.timeline.iteration_ends.append(ends)

    def _do(self, state: StageState, action: Action, iteration: int) -> None:
        if isinstance(action, Compute):
            self._compute(state, action)
            state.cursor += 1
        elif isinstance(action, Collective):
            self._collective(state, action, iteration)
        else:
            self._exchange(state, action, iteration)

    # -- compute ------------------------------------------------------------------------------------------------------------

    def _compute(self, state: StageState, action: Compute) -> None:
        durations = state.jitter[state.compute_index] * action.seconds
        state.compute_index += 1
        if action.host:
            begin = np.maximum(state.host, state.gpu)
            end = begin + durations
            for i, rank in self._some(state, self._odd_host):
                shifted = (
                    stretched(self.disturbance.loader.get(rank), begin[i], durations[i]) if action.what == "loader" else end[i]
                )
                end[i] = (
                    advance(self.disturbance.host.get(rank), begin[i], shifted - begin[i])
                    if math.isfinite(begin[i])
                    else math.inf
                )
            state.host = end
            state.gpu = end.copy()
            return
        begin = state.gpu
        end = begin + durations
        for i, rank in self._some(state, self._odd_compute):
            if math.isfinite(begin[i]):
                copies = self.disturbance.copies.get(rank, ()) if action.copies else ()
                extra = sum(f.extra for f in copies if f.start <= begin[i] < f.end)
                slowed = stretched(self.disturbance.compute.get(rank), begin[i], durations[i] + extra)
                end[i] = advance(self.disturbance.gpu.get(rank), begin[i], slowed - begin[i])
        state.gpu = end

    @staticmethod
    def _some(state: StageState, ranks: set[int]) -> list[tuple[int, int]]:
        first = int(state.ranks[0])
        return [(r - first, r) for r in sorted(ranks) if first <= r <= int(state.ranks[-1])]

    # -- calls --------------------------------------------------------------------------------------------------------------

    def _call(self, state: StageState, role: str, iteration: int) -> tuple[Times, Times, Times]:
        """Times at which each rank calls, hands over to the proxy, and starts; faults that wait for this call begin here."""
        net = self.scenario.network
        struck = self._due(state, role, iteration)
        ready = state.host.copy()
        if len(state.recent) == state.recent.maxlen:
            ready = np.maximum(ready, state.recent[0])
        for fault in struck:
            if fault.kind is FaultKind.NEVER_ENTERS:
                self._begin(fault, float(ready[fault.rank - int(state.ranks[0])]))
        cost = np.full(len(ready), net.call_us / 1e6)
        for i, rank in self._some(state, self._odd_host):
            ready[i] = live(self.disturbance.host.get(rank), ready[i])
        for i, rank in self._some(state, self._odd_calls):
            slow = math.prod(f.factor for f in self.disturbance.calls[rank] if f.start <= ready[i] < f.end)
            cost[i] *= slow
        called = ready
        state.host = called + cost
        launched = state.host + net.launch_us / 1e6
        started = np.maximum(state.gpu, launched)
        for fault in struck:
            if fault.kind is not FaultKind.NEVER_ENTERS:
                self._begin(fault, float(started[fault.rank - int(state.ranks[0])]) + fault.offset_ms / 1e3)
        for i, rank in self._some(state, self._odd_compute):
            started[i] = live(self.disturbance.gpu.get(rank), started[i])
        return called, launched, started

    def _due(self, state: StageState, role: str, iteration: int) -> list[Fault]:
        seen = [state.occurrences.get(key, 0) for key in (role, "")]
        for key in (role, ""):
            state.occurrences[key] = state.occurrences.get(key, 0) + 1
        due = [
            f
            for f in self.pending
            if f.iteration == iteration
            and int(state.ranks[0]) <= f.rank <= int(state.ranks[-1])
            and f.role in (role, "")
            and f.occurrence == (seen[0] if f.role else seen[1])
        ]
        self.pending = [f for f in self.pending if f not in due]
        return due

    def _begin(self, fault: Fault, time: float) -> None:
        if math.isfinite(time):
            self.disturbance.apply(fault, time, self.scenario.layout, self.scenario.seed)
            self._refresh()

    # -- operations ---------------------------------------------------------------------------------------------------------

    def _collective(self, state: StageState, action: Collective, iteration: int) -> None:
        called, launched, started = self._call(state, action.role, iteration)
        group, _ = membership(self.scenario.layout, action.role)
        sequence = state.sequences.get(action.role, 0)
        state.sequences[action.role] = sequence + 1
        nranks = groups(self.scenario.layout, action.role).shape[1]
        kind = "exchange" if action.function == "AlltoAll" else "collective"
        pieces = cut(self.scenario.network, action.function, nranks, action.nbytes)
        base = state.bases.get((action.role, kind), 0)
        state.bases[action.role, kind] = base + pieces.steps
        finished = np.full(len(called), math.inf)
        block = Block(
            iteration, action.role, action.function, action.nbytes, action.element_bytes, action.label, state.ranks,
            group[state.ranks], sequence, called, launched, started, finished, base, state.stage,
        )  # fmt: skip
        self.timeline.blocks.append(block)
        if action.role in ACROSS_STAGES:
            state.waiting = block
            return
        self._finish_groups([(state, block)], action)
        self._after(state, block)

    def _finish_groups(self, parts: list[tuple[StageState, Block]], action: Collective) -> None:
        """Fill in when every rank of some groups ends a collective; ``parts`` together hold all their members."""
        first_rank = int(parts[0][1].ranks[0])
        started = np.concatenate([block.started for _, block in parts])
        launched = np.concatenate([block.launched for _, block in parts])
        own_groups = np.unique(np.concatenate([block.groups for _, block in parts]))
        table = groups(self.scenario.layout, action.role)[own_groups] - first_rank
        offsets = self.machine.offsets(action.role, action.function, action.nbytes)[
            self.machine.patterns(action.role)[1][own_groups]
        ]
        begun = started[table]
        ends = begun.max(axis=1)[:, None] + offsets
        odd = self._odd_operations
        if odd:
            touched = np.isin(table + first_rank, list(odd)).any(axis=1)
            for row in np.nonzero(touched)[0]:
                finite = begun[row][np.isfinite(begun[row])]
                members = [int(r) + first_rank for r in table[row]]
                if finite.size == 0 or not self.machine.touched(odd, members, float(finite.min()), float(ends[row].max())):
                    continue
                group = int(own_groups[row])
                trace = self.machine.run(
                    action.role, group, action.function, action.nbytes, begun[row].tolist(), launched[table[row]].tolist()
                )
                ends[row] = trace.finished
                for _, block in parts:
                    block.traces[group] = trace
        finished = np.empty_like(started)
        finished[table] = ends
        at = 0
        for _, block in parts:
            block.finished = finished[at : at + len(block.ranks)]
            at += len(block.ranks)

    def _after(self, state: StageState, block: Block) -> None:
        state.gpu = block.finished.copy()
        state.recent.append(block.finished)
        state.cursor += 1
        state.waiting = None

    def _exchange(self, state: StageState, action: PointToPoint, iteration: int) -> None:
        called, launched, started = self._call(state, "pp", iteration)
        group, _ = membership(self.scenario.layout, "pp")
        sequence = state.sequences.get("pp", 0)
        state.sequences["pp"] = sequence + 1
        block = Block(
            iteration, "pp", "SendRecv", action.nbytes, action.element_bytes, action.label, state.ranks, group[state.ranks],
            sequence, called, launched, started, np.full(len(called), math.inf), 0, state.stage, action.exchange.transfers,
        )  # fmt: skip
        numbers = []
        for transfer in action.exchange.transfers:
            key = self.link_key(state.stage, transfer.send, transfer.peer, transfer.forward)
            queue = (self.timeline.sends if transfer.send else self.timeline.receives)[key]
            numbers.append(len(queue))
            queue.append(block)
        block.message = tuple(numbers)
        self.timeline.blocks.append(block)
        state.waiting = block

    @staticmethod
    def link_key(stage: int, send: bool, peer: int, forward: bool) -> LinkKey:
        """The link of a transfer that ``stage`` makes with ``peer``."""
        return (stage, peer, forward) if send else (peer, stage, forward)

    def _try_finish(self, state: StageState) -> bool:
        block = state.waiting
        if block is None:
            return False
        if block.role in ACROSS_STAGES:
            return self._try_across(block.role)
        peers = []
        for transfer, number in zip(block.transfers, block.message, strict=True):
            key = self.link_key(state.stage, transfer.send, transfer.peer, transfer.forward)
            queue = (self.timeline.receives if transfer.send else self.timeline.sends)[key]
            if number >= len(queue):
                return False
            peers.append(queue[number])
        ends = [self._message(block, peer, transfer.send) for transfer, peer in zip(block.transfers, peers, strict=True)]
        block.transfer_finished = tuple(ends)
        block.finished = np.maximum.reduce(ends)
        self._after(state, block)
        return True

    def _message(self, block: Block, peer: Block, send: bool) -> Times:
        """When the ranks of ``block`` end their side of a message with the ranks of ``peer``."""
        source, destination = (block, peer) if send else (peer, block)
        buffered = self.machine.buffered(block.nbytes)
        both = np.maximum(block.started, peer.started)
        ends = block.started.copy() if send and buffered else both.copy()
        pairs = zip(source.ranks.tolist(), destination.ranks.tolist(), strict=True)
        for i, (a, b) in enumerate(pairs):
            sender, receiver = self.machine.message_offsets(a, b, block.nbytes)
            ends[i] += sender if send else receiver
            if a not in self._odd_operations and b not in self._odd_operations:
                continue
            start = min(block.started[i], peer.started[i])
            if math.isfinite(start) and self.machine.touched(self._odd_operations, (a, b), start, ends[i]):
                started = (float(source.started[i]), float(destination.started[i]))
                launched = (float(source.launched[i]), float(destination.launched[i]))
                trace = self.machine.message(a, b, block.nbytes, started, launched)
                ends[i] = trace.finished[0 if send else 1]
        return ends

    def _try_across(self, role: str) -> bool:
        """A collective with members on every stage ends when all stages have come to it."""
        waiting = [(s, s.waiting) for s in self.stages if s.waiting is not None and s.waiting.role == role]
        if len(waiting) < len(self.stages):
            return False
        parts = [(s, b) for s, b in waiting if b is not None]
        first = parts[0][1]
        self._finish_groups(parts, Collective(role, first.function, first.nbytes, first.label, first.element_bytes))
        for state, block in parts:
            self._after(state, block)
        return True
