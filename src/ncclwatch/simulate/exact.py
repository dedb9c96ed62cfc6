"""The executor for ranks that no longer run the same program: each rank by itself, matched as NCCL matches, by order on a
communicator.

Each rank is two sequential processes, host and GPU: the host calls ahead of its GPU up to a limit, the GPU runs what was called
in order. A communicator on which some rank skips a call or asks for something else than its peers is run step by step on
connections that outlive the operation, because that is what then decides: NCCL does not know which call a slice belongs to, and
the next call's data feeds the peers' present one. Evaluation ends when nothing can move; ranks that wait then wait for ever.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

from ncclwatch.simulate.disturbance import advance, live, stretched
from ncclwatch.simulate.exact_state import Call, RankRun, Stream
from ncclwatch.simulate.geometry import cut
from ncclwatch.simulate.layout import groups, membership, ranks_of_stage, stage_of
from ncclwatch.simulate.program import Collective, Compute, PointToPoint, iteration_program
from ncclwatch.simulate.program_faults import edit, position
from ncclwatch.simulate.scenario import PROGRAM_FAULTS, Fault, FaultKind, Scenario
from ncclwatch.simulate.steps import End, ring_primitives
from ncclwatch.simulate.timeline import Block, Calling, Timeline, Times
from ncclwatch.simulate.vector import VectorExecutor

GroupKey = tuple[str, int]


class ExactExecutor:
    """Continues a vectorised run from iteration ``first`` to the end, or to where nothing moves."""

    def __init__(self, vector: VectorExecutor, first: int) -> None:
        self.scenario: Scenario = vector.scenario
        self.timeline: Timeline = vector.timeline
        self.machine = vector.machine
        self.disturbance = vector.disturbance
        self._vector = vector
        self._first = first
        self._faults = [f for f in self.scenario.faults if f.kind in PROGRAM_FAULTS]
        self._streams: dict[GroupKey, Stream] = {}
        self._blocks: dict[tuple[int, str, int], Block] = {}
        self._instances: dict[tuple[str, int, int], dict[int, Call]] = {}
        self._links: dict[tuple[int, int, bool, int, int], dict[bool, tuple[Call, int]]] = {}
        self._ready: deque[int] = deque()
        self._jitters: dict[tuple[int, int], Times] = {}
        self._odd = self.disturbance.ranks_in_operations()
        self._ranks = [self._rank(r) for r in range(self.scenario.layout.world)]
        for fault in self._faults:
            if fault.kind is not FaultKind.SWAP:
                self._open_stream(fault)

    def run(self) -> Timeline:
        """Evaluate until nothing moves."""
        self._ready.extend(range(len(self._ranks)))
        while self._ready:
            while self._ready:
                rank = self._ranks[self._ready.popleft()]
                while self._host(rank) | self._gpu(rank):
                    pass
            for stream in self._streams.values():
                stream.network.run()
        for block in self._blocks.values():
            self._settle(block)
        blocks = self.timeline.blocks
        blocks.sort(key=lambda b: float(b.called.min()))
        return self.timeline

    # -- set-up -------------------------------------------------------------------------------------------------------------

    def _rank(self, rank: int) -> RankRun:
        stage = stage_of(self.scenario.layout, rank)
        state = self._vector.stages[stage]
        place = rank - int(state.ranks[0])
        made = RankRun(rank, stage, float(state.host[place]), float(state.gpu[place]), self._first)
        made.counts = dict(state.sequences)
        for (a, b, forward), queue in self.timeline.sends.items():
            if a == stage:
                made.exchanges[True, b, forward] = len(queue)
        for (a, b, forward), queue in self.timeline.receives.items():
            if b == stage:
                made.exchanges[False, a, forward] = len(queue)
        # What the vectorised part called last counts against how far the host may run ahead.
        for times in state.recent:
            made.calls.append(Call(_EMPTY, 0, _NOTHING, -1, float(times[place]), True))
        self._extend(made)
        return made

    def _extend(self, rank: RankRun) -> bool:
        """Append the program of the next iteration; whether there is one."""
        if rank.iteration >= self.scenario.workload.iterations:
            return False
        actions = iteration_program(self.scenario, rank.stage, rank.iteration)
        for fault in self._faults:
            if fault.rank == rank.rank and fault.iteration == rank.iteration:
                actions, at = edit(actions, fault)
                rank.marks[len(rank.actions) + at] = fault
        for fault in self._vector.pending:
            if fault.rank == rank.rank and fault.iteration == rank.iteration:
                at = len(rank.actions) + position(actions, fault)
                rank.strikes.setdefault(at, []).append(fault)
        key = (rank.iteration, rank.stage)
        if key not in self._jitters:
            count = sum(isinstance(action, Compute) for action in actions)
            self._jitters[key] = self.machine.jitter(rank.iteration, rank.stage, count)
        place = rank.rank - ranks_of_stage(self.scenario.layout, rank.stage).start
        rank.jitter += self._jitters[key][:, place].tolist()
        rank.actions += actions
        rank.iteration_of += [rank.iteration] * len(actions)
        rank.iteration += 1
        return True

    def _open_stream(self, fault: Fault) -> None:
        role = fault.role or self._role_of(fault)
        group = int(membership(self.scenario.layout, role)[0][fault.rank])
        if (role, group) in self._streams:
            return
        members = [int(r) for r in groups(self.scenario.layout, role)[group]]
        network = self.machine.network()
        n = len(members)
        slots = cut(self.scenario.network, "AllGather", n, 1).slots
        links = [network.connect(members[i], members[(i + 1) % n], slots) for i in range(n)]
        self._streams[role, group] = Stream(network, members, links, [0] * n, [0] * n)

    def _role_of(self, fault: Fault) -> str:
        actions = iteration_program(self.scenario, stage_of(self.scenario.layout, fault.rank), fault.iteration or 0)
        return [a for a in actions if isinstance(a, Collective)][fault.occurrence].role

    # -- the two processes of a rank ----------------------------------------------------------------------------------------

    def _host(self, rank: RankRun) -> bool:
        moved = False
        while True:
            if rank.host_cursor >= len(rank.actions) and not self._extend(rank):
                return moved
            action = rank.actions[rank.host_cursor]
            if isinstance(action, Compute):
                if action.host:
                    if rank.gpu_cursor != rank.host_cursor:
                        return moved
                    if not self._host_compute(rank, action):
                        return moved
                    rank.gpu_cursor += 1
                rank.host_cursor += 1
            elif not self._call(rank, action):
                return moved
            moved = True

    def _host_compute(self, rank: RankRun, action: Compute) -> bool:
        begin = max(rank.host, rank.gpu)
        slow = self.disturbance.loader.get(rank.rank) if action.what == "loader" else None
        duration = stretched(slow, begin, rank.jitter[rank.computed] * action.seconds) - begin
        end = advance(self.disturbance.host.get(rank.rank), begin, duration)
        if not math.isfinite(end):
            return False
        rank.computed += 1
        rank.host = rank.gpu = end
        return True

    def _gpu(self, rank: RankRun) -> bool:
        moved = False
        while rank.gpu_cursor < rank.host_cursor:
            action = rank.actions[rank.gpu_cursor]
            if isinstance(action, Compute):
                if action.host or not self._gpu_compute(rank, action):
                    return moved
            else:
                call = rank.by_action[rank.gpu_cursor]
                if not call.started:
                    began = max(rank.gpu, float(call.block.launched[call.place]))
                    for fault in rank.strikes.pop(rank.gpu_cursor, ()):
                        if fault.kind is not FaultKind.NEVER_ENTERS:
                            self._strike(fault, began + fault.offset_ms / 1e3)
                    began = live(self.disturbance.gpu.get(rank.rank), began)
                    if not math.isfinite(began):
                        return moved
                    call.block.started[call.place] = began
                    call.started = True
                    moved = True
                    self._begun(rank, call)
                if call.finished is None:
                    return moved
                rank.gpu = call.finished
            rank.gpu_cursor += 1
            moved = True
        return moved

    def _gpu_compute(self, rank: RankRun, action: Compute) -> bool:
        d = self.disturbance
        copies = d.copies.get(rank.rank, ()) if action.copies else ()
        extra = sum(f.extra for f in copies if f.start <= rank.gpu < f.end)
        duration = stretched(d.compute.get(rank.rank), rank.gpu, rank.jitter[rank.computed] * action.seconds + extra) - rank.gpu
        end = advance(d.gpu.get(rank.rank), rank.gpu, duration)
        if not math.isfinite(end):
            return False
        rank.computed += 1
        rank.gpu = end
        return True

    # -- calls --------------------------------------------------------------------------------------------------------------

    def _call(self, rank: RankRun, action: Collective | PointToPoint) -> bool:
        ahead = self.scenario.workload.host_ahead
        ready = rank.host
        if len(rank.calls) >= ahead:
            before = rank.calls[-ahead].finished
            if before is None:
                return False
            ready = max(ready, before)
        for fault in rank.strikes.get(rank.host_cursor, ()):
            if fault.kind is FaultKind.NEVER_ENTERS:
                self._strike(fault, ready)
        ready = live(self.disturbance.host.get(rank.rank), ready)
        if not math.isfinite(ready):
            return False
        slow = math.prod(f.factor for f in self.disturbance.calls.get(rank.rank, ()) if f.start <= ready < f.end)
        rank.host = ready + self.scenario.network.call_us / 1e6 * slow
        launched = rank.host + self.scenario.network.launch_us / 1e6
        edited = rank.marks.pop(rank.host_cursor, None)
        if edited is not None:
            self.disturbance.onsets.append((edited, ready))
        call = self._make_call(rank, action, ready, launched)
        rank.calls.append(call)
        rank.by_action[rank.host_cursor] = call
        rank.host_cursor += 1
        if isinstance(action, Collective):
            self._enter_stream(rank, call, action, launched)
        return True

    def _strike(self, fault: Fault, time: float) -> None:
        self.disturbance.apply(fault, time, self.scenario.layout, self.scenario.seed)
        self._odd = self.disturbance.ranks_in_operations()

    def _make_call(self, rank: RankRun, action: Collective | PointToPoint, called: float, launched: float) -> Call:
        role = action.role if isinstance(action, Collective) else "pp"
        sequence = rank.counts.get(role, 0)
        rank.counts[role] = sequence + 1
        block = self._block(rank, role, sequence, action)
        place = rank.rank - int(block.ranks[0])
        block.called[place], block.launched[place] = called, launched
        call = Call(block, place, action, sequence)
        if isinstance(action, Collective):
            if (action.function, action.nbytes, action.element_bytes) != (block.function, block.nbytes, block.element_bytes):
                block.callings[rank.rank] = Calling(action.function, action.nbytes, action.element_bytes)
            group = int(block.groups[place])
            self._instances.setdefault((role, group, sequence), {})[rank.rank] = call
        else:
            numbers = []
            for n, transfer in enumerate(action.exchange.transfers):
                key = (transfer.send, transfer.peer, transfer.forward)
                number = rank.exchanges.get(key, 0)
                rank.exchanges[key] = number + 1
                numbers.append(number)
                link = VectorExecutor.link_key(rank.stage, transfer.send, transfer.peer, transfer.forward)
                self._links.setdefault((*link, number, place), {})[transfer.send] = (call, n)
            call.messages = [None] * len(numbers)
            if not block.message:
                block.message = tuple(numbers)
                for transfer in action.exchange.transfers:
                    link = VectorExecutor.link_key(rank.stage, transfer.send, transfer.peer, transfer.forward)
                    (self.timeline.sends if transfer.send else self.timeline.receives)[link].append(block)
        return call

    def _block(self, rank: RankRun, role: str, sequence: int, action: Collective | PointToPoint) -> Block:
        key = (rank.stage, role, sequence)
        if key not in self._blocks:
            state = self._vector.stages[rank.stage]
            ranks = state.ranks
            never = [np.full(len(ranks), math.inf) for _ in range(4)]
            collective = isinstance(action, Collective)
            function = action.function if isinstance(action, Collective) else "SendRecv"
            kind = "exchange" if function == "AlltoAll" else "collective"
            steps = 0
            if collective:
                nranks = groups(self.scenario.layout, role).shape[1]
                steps = cut(self.scenario.network, function, nranks, action.nbytes).steps
            base = state.bases.get((role, kind), 0)
            if not any((role, g) in self._streams for g in set(membership(self.scenario.layout, role)[0][ranks].tolist())):
                state.bases[role, kind] = base + steps
            own_groups = membership(self.scenario.layout, role)[0][ranks]
            self._blocks[key] = Block(
                rank.iteration_of[rank.host_cursor], role, function, action.nbytes, action.element_bytes, action.label, ranks,
                own_groups, sequence, never[0], never[1], never[2], never[3], base, rank.stage,
                () if isinstance(action, Collective) else action.exchange.transfers,
            )  # fmt: skip
            self.timeline.blocks.append(self._blocks[key])
        return self._blocks[key]

    def _enter_stream(self, rank: RankRun, call: Call, action: Collective, launched: float) -> None:
        """Hand the receiver's side to the proxy, and note which slices are this call's."""
        stream = self._streams.get((action.role, int(call.block.groups[call.place])))
        if stream is None:
            return
        i = stream.members.index(rank.rank)
        pieces = cut(self.scenario.network, action.function, len(stream.members), action.nbytes)
        slices = pieces.steps // pieces.slice_steps
        before, after = stream.links[i - 1], stream.links[i]
        call.ends = [End(after, True, stream.sent[i], slices), End(before, False, stream.received[i], slices)]
        stream.sent[i] += slices
        stream.received[i] += slices
        call.block.streams[rank.rank] = call.ends
        stream.network.open(before, slices, launched)

    # -- what begins and ends -----------------------------------------------------------------------------------------------

    def _begun(self, rank: RankRun, call: Call) -> None:
        if isinstance(call.action, PointToPoint):
            self._try_messages(rank, call)
            return
        key = (call.action.role, int(call.block.groups[call.place]))
        stream = self._streams.get(key)
        if stream is not None:
            self._start_stream(stream, rank, call)
            return
        calls = self._instances[(*key, call.index)]
        members = groups(self.scenario.layout, key[0])[key[1]].tolist()
        if len(calls) == len(members) and all(c.started for c in calls.values()):
            self._finish_group(key, members, calls)

    def _start_stream(self, stream: Stream, rank: RankRun, call: Call) -> None:
        action = call.action
        assert isinstance(action, Collective)  # noqa: S101 - only collectives have streams
        i = stream.members.index(rank.rank)
        pieces = cut(self.scenario.network, action.function, len(stream.members), action.nbytes)
        primitives = ring_primitives(action.function, len(stream.members), pieces, stream.links[i - 1], stream.links[i])
        task = stream.network.task(rank.rank, primitives, pieces.slice_bytes)

        def done(time: float) -> None:
            self._finish(call, rank.rank, time)

        task.on_done = done
        stream.network.start(task, float(call.block.started[call.place]))

    def _finish_group(self, key: GroupKey, members: list[int], calls: dict[int, Call]) -> None:
        first = calls[members[0]]
        action = first.action
        assert isinstance(action, Collective)  # noqa: S101 - groups hold collectives
        started = [float(calls[r].block.started[calls[r].place]) for r in members]
        role, group = key
        pattern = self.machine.patterns(role)[1][group]
        ends = (max(started) + self.machine.offsets(role, action.function, action.nbytes)[pattern]).tolist()
        if self._odd and self.machine.touched(self._odd, members, min(started), max(ends)):
            launched = [float(calls[r].block.launched[calls[r].place]) for r in members]
            trace = self.machine.run(role, group, action.function, action.nbytes, started, launched)
            ends = trace.finished
            first.block.traces[group] = trace
        for r, end in zip(members, ends, strict=True):
            self._finish(calls[r], r, end)

    def _try_messages(self, rank: RankRun, call: Call) -> None:
        action = call.action
        assert isinstance(action, PointToPoint)  # noqa: S101 - the caller looked
        for n, (transfer, number) in enumerate(zip(action.exchange.transfers, call.block.message, strict=True)):
            link = VectorExecutor.link_key(rank.stage, transfer.send, transfer.peer, transfer.forward)
            sides = self._links[(*link, number, call.place)]
            other = sides.get(not transfer.send)
            if other is not None and other[0].started:
                self._finish_message(sides[True], sides[False])
            elif transfer.send and self.machine.buffered(action.nbytes):
                peer = ranks_of_stage(self.scenario.layout, transfer.peer).start + call.place
                offset = self.machine.message_offsets(rank.rank, peer, action.nbytes)[0]
                self._message_end(call, n, float(call.block.started[call.place]) + offset)

    def _finish_message(self, sending: tuple[Call, int], receiving: tuple[Call, int]) -> None:
        source, destination = sending[0], receiving[0]
        a, b = int(source.block.ranks[source.place]), int(destination.block.ranks[destination.place])
        started = (float(source.block.started[source.place]), float(destination.block.started[destination.place]))
        nbytes = source.block.nbytes
        sender, receiver = self.machine.message_offsets(a, b, nbytes)
        both = max(started)
        ends = [(started[0] if self.machine.buffered(nbytes) else both) + sender, both + receiver]
        if self._odd and self.machine.touched(self._odd, (a, b), min(started), max(ends)):
            launched = (float(source.block.launched[source.place]), float(destination.block.launched[destination.place]))
            ends = self.machine.message(a, b, nbytes, started, launched).finished
        self._message_end(source, sending[1], ends[0])
        self._message_end(destination, receiving[1], ends[1])

    def _message_end(self, call: Call, n: int, end: float) -> None:
        if call.messages[n] is None:
            call.messages[n] = end
            known = [m for m in call.messages if m is not None]
            if len(known) == len(call.messages):
                self._finish(call, int(call.block.ranks[call.place]), max(known))

    def _finish(self, call: Call, rank: int, end: float) -> None:
        if call.finished is None and math.isfinite(end):
            call.finished = end
            call.block.finished[call.place] = end
            self._ready.append(rank)

    def _settle(self, block: Block) -> None:
        """Times of ranks that wait for ever stay ``inf``; the ends of single transfers are those of the exchange."""
        if block.transfers and not block.transfer_finished:
            block.transfer_finished = tuple(block.finished for _ in block.transfers)


_NOTHING = Collective("", "AllReduce", 0, "")
_EMPTY = Block(
    -1, "", "", 0, 0, "", np.zeros(1, np.int64), np.zeros(1, np.int64), 0,
    np.zeros(1), np.zeros(1), np.zeros(1), np.zeros(1),
)  # fmt: skip
