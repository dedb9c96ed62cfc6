"""Reading a proxy thread: its unfinished operations, and those it has not taken from the pool yet.

Source: NCCL src/proxy.cc (ProxyAppend, removeOp, ncclProxyGetPostedOps) and src/transport/net.cc (sendProxyProgress,
recvProxyProgress), the same in what is used here from v2.18.3-1 to v2.30.7-1; differences are noted where they matter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from ncclwatch.model.state import Direction, OpPhase, PendingOperation, ProxyOperation, ProxySub, Transport
from ncclwatch.target.commstate import CommReader, CommState, Connector, collective_name
from ncclwatch.target.decode import Decoder, Values
from ncclwatch.target.layout import MissingMemberError
from ncclwatch.target.wanted import ALGORITHMS, PROTOCOLS, TRANSPORTS

MAX_OPERATIONS = 4096
"""Operations of one proxy that are read in one sample."""

MAX_PENDING = 1024
"""Operations of one pool that are read in one sample."""

MAX_STEPS = 1 << 40
"""No counter is larger; one that is comes from memory that was reused."""

MAX_LOCAL_RANKS = 1024
"""Ranks of one host that are believed."""

ATTEMPTS = 3
"""How often a list or structure that changed under the reading is tried before it counts as torn."""

_STATE_PATHS = (
    "tpRank",
    "tpnRanks",
    "tpLocalnRanks",
    "asyncResult",
    "ncclNet",
    "ncclCollNet",
    "proxyOps",
    "progressState.active",
    "progressState.opsPool",
    "progressState.nextOps",
)
_ARGS_PATHS = (
    "nsubs",
    "done",
    "opCount",
    "sliceSteps",
    "pattern",
    "coll",
    "protocol",
    "algorithm",
    "state",
    "idle",
    "next",
    "nextPeer",
    "progress",
)
_SUB_PATHS = (
    "connection",
    "channelId",
    "nsteps",
    "nbytes",
    "peer",
    "rank",
    "base",
    "posted",
    "received",
    "transmitted",
    "done",
)
_CONNECTION_PATHS = ("send", "transport", "shared", "tpLocalRank", "tcomm", "transportResources")
_RESOURCE_PATHS = ("tpRank", "tpRemoteRank", "netDev", "connIndex", "recvMem")
_OP_PATHS = (
    "connection",
    "nbytes",
    "opCount",
    "root",
    "next",
    "nsteps",
    "channelId",
    "coll",
    "pattern",
    "protocol",
    "peer",
    "rank",
)

_PATTERN_ALGORITHMS = {
    "Ring": "Ring",
    "RingTwice": "Ring",
    "PipelineFrom": "Ring",
    "PipelineTo": "Ring",
    "TreeUp": "Tree",
    "TreeDown": "Tree",
    "TreeUpDown": "Tree",
    "CollnetChain": "CollNetChain",
    "CollnetDirect": "CollNetDirect",
    "Nvls": "NVLS",
    "NvlsTree": "NVLSTree",
    "PatUp": "PAT",
    "PatDown": "PAT",
}
"""The algorithm that makes a pattern, for builds before ``ncclProxyArgs.algorithm`` (2.23)."""

_TRANSPORTS = {name: Transport(name) for name in TRANSPORTS if name in set(Transport)}


class _ChangedError(Exception):
    """What is being read is changing; try again. ``chain`` is what was read before that showed."""

    def __init__(self, chain: list[tuple[int, Values, int]]) -> None:
        self.chain = chain
        super().__init__()


@dataclass(frozen=True, slots=True)
class ProxyView:
    """What one proxy thread has in hand."""

    operations: tuple[ProxyOperation, ...]
    pending: tuple[PendingOperation, ...]
    strangers: tuple[int, ...] = ()
    """Peers of connections that operations use and no known connector names: new ones, or PXN's."""


@dataclass(frozen=True, slots=True)
class _Connection:
    """A proxy connection with what its transport's resources say; ranks are the top parent's (``tp``)."""

    direction: Direction
    transport: Transport
    tp_local_rank: int | None
    tp_rank: int | None = None
    tp_remote_rank: int | None = None
    net_device: int | None = None
    index: int | None = None
    recv_mem: int = 0


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """A connector and the communicator it was found in."""

    comm: CommState
    connector: Connector


class ProxyReader:
    """Reads the proxies of one process; ``endpoints`` of the communicators tell whom an operation belongs to."""

    def __init__(self, decoder: Decoder, comms: Sequence[CommState], comm_reader: CommReader) -> None:
        self.decoder = decoder
        self._comms = comms
        self._comm_reader = comm_reader
        self._connections: dict[int, _Connection | None] = {}
        self._endpoints: dict[int, list[_Endpoint]] = {}
        for comm in comms:
            for connector in comm.connectors:
                if connector.connection and connector.same_process:
                    self._endpoints.setdefault(connector.connection, []).append(_Endpoint(comm, connector))

    def read_all(self) -> ProxyView:
        """Every distinct proxy of the communicators: one that several split communicators share is read once."""
        operations: list[ProxyOperation] = []
        pending: list[PendingOperation] = []
        for address in dict.fromkeys(comm.proxy_state for comm in self._comms if comm.proxy_state):
            view = self.read(address)
            operations += view.operations
            pending += view.pending
        strangers = {sub.peer for op in operations for sub in op.subs if sub.connection not in self._endpoints}
        return ProxyView(tuple(operations), tuple(pending), tuple(sorted(strangers)))

    def read(self, proxy_state: int) -> ProxyView:
        """One proxy; empty, with the reason in ``unavailable``, when this build keeps it in another way."""
        decoder = self.decoder
        try:
            state = decoder.structure(decoder.fields("ncclProxyState", _STATE_PATHS), proxy_state)
            if state is None:
                decoder.unavailable["proxy operations"] = "the proxy state of a communicator cannot be read"
                return ProxyView((), ())
            operations = self._operations(proxy_state, state)
            pending = self._pending(proxy_state, state)
        except MissingMemberError as error:
            decoder.unavailable["proxy operations"] = error.message
            return ProxyView((), ())
        # An operation that is being appended is in both places for a moment.
        taken = {(sub.connection, op.op_count) for op in operations for sub in op.subs}
        waiting = tuple(record for connection, record in pending if (connection, record.op_count) not in taken)
        return ProxyView(operations, waiting)

    # -- operations the proxy thread works on ------------------------------------------------------------------------------------

    def _operations(self, proxy_state: int, state: Values) -> tuple[ProxyOperation, ...]:
        chain: list[tuple[int, Values, int]] = []
        for attempt in range(ATTEMPTS):
            head = state["progressState.active"] or 0
            if attempt:
                fresh = self.decoder.structure(self.decoder.fields("ncclProxyState", _STATE_PATHS), proxy_state, again=True)
                head = (fresh or {}).get("progressState.active") or 0
            try:
                chain = self._walk(head, again=attempt > 0)
                break
            except _ChangedError as changed:
                chain = changed.chain
        else:
            # The list never held still: what was read before the change is sound by itself, the rest is missing.
            self.decoder.torn += 1
        records = (self._operation(proxy_state, address, values, behind, state) for address, values, behind in chain)
        return tuple(record for record in records if record is not None)

    def _walk(self, head: int, *, again: bool) -> list[tuple[int, Values, int]]:
        """Every operation from ``active`` by ``next``, and behind each those of the same connection by ``nextPeer``.

        A finished operation goes to the free pool and its ``next`` then leads there: an operation whose state is None says that
        the list changed under the walk.
        """
        wanted = self.decoder.fields("ncclProxyArgs", _ARGS_PATHS)
        chain: list[tuple[int, Values, int]] = []
        seen: set[int] = set()
        address = head
        while address:
            follower: int = 0
            behind = 0
            queued = address
            while queued:
                if queued in seen:
                    raise _ChangedError(chain)
                if len(chain) >= MAX_OPERATIONS:
                    self.decoder.truncated[f"proxy operations: the first {MAX_OPERATIONS}"] = None
                    return chain
                seen.add(queued)
                values = self.decoder.structure(wanted, queued, again=again)
                if values is None or not values["state"]:
                    raise _ChangedError(chain)
                chain.append((queued, values, behind))
                if behind == 0:
                    follower = values["next"] or 0
                queued = values["nextPeer"] or 0
                behind += 1
            address = follower
        return chain

    def _operation(self, proxy_state: int, address: int, values: Values, behind: int, state: Values) -> ProxyOperation | None:
        """One operation with its subs, or ``None`` when it changed identity under the reading, or is not about data
        (profiler).
        """
        layout = self.decoder.layout
        pattern = layout.enum_name("ncclPattern_t", values["pattern"] or 0).removeprefix("ncclPattern")
        if pattern == "Profiler":
            return None
        for attempt in range(ATTEMPTS):
            subs = self._subs(address, values, again=attempt > 0)
            now = self.decoder.structure(self.decoder.fields("ncclProxyArgs", _ARGS_PATHS), address, again=True)
            if now is not None and not now["state"]:
                # Finished meanwhile, so there is nothing unfinished to report.
                return None
            if now is None or any(now[name] != values[name] for name in ("opCount", "progress")):
                self.decoder.torn += 1
                return None
            if subs is not None and all(now[name] == values[name] for name in ("nsubs", "state")):
                break
            values = now
        else:
            self.decoder.torn += 1
            return None
        return self._record(proxy_state, address, values, behind, state, pattern, subs)

    def _record(
        self,
        proxy_state: int,
        address: int,
        values: Values,
        behind: int,
        state: Values,
        pattern: str,
        subs: Sequence[tuple[Values, _Connection | None]],
    ) -> ProxyOperation:
        layout = self.decoder.layout
        connection = next((c for _, c in subs if c is not None), None)
        direction = connection.direction if connection else Direction.SEND
        transport = connection.transport if connection else Transport.UNKNOWN
        phase = _phase(layout.enum_name("ncclProxyOpState", values["state"] or 0))
        protocol = _name(PROTOCOLS, values["protocol"])
        ready = (
            self._gpu_ready(subs, protocol) if phase is OpPhase.PROGRESS and direction is Direction.SEND else [None] * len(subs)
        )
        owners = self._owners(proxy_state, subs)
        algorithm = _name(ALGORITHMS, values["algorithm"]) if layout.has("ncclProxyArgs.algorithm") else ""
        collective = self._collective(values, pattern)
        if (values["opCount"] or 0) & 1:
            algorithm = ""
        elif not algorithm:
            algorithm = _PATTERN_ALGORITHMS.get(pattern, "")
        return ProxyOperation(
            address=address,
            comm_hash=owners[0].record.hash if len(owners) == 1 else 0,
            comm_address=owners[0].record.address if len(owners) == 1 else 0,
            direction=direction,
            transport=transport,
            phase=phase,
            op_count=values["opCount"] or 0,
            collective=collective,
            protocol=protocol,
            algorithm=algorithm,
            slice_steps=values["sliceSteps"] or 0,
            subs=tuple(self._sub_record(sub, made, got, phase, owners) for (sub, made), got in zip(subs, ready, strict=True)),
            queued_behind=behind,
            net_name=self._net_name(state, transport),
            pattern=pattern,
            idle=None if values["idle"] is None else values["idle"] != 0,
            proxy_state=proxy_state,
            owners=tuple(owner.record.hash for owner in owners),
        )

    def _collective(self, values: Values, pattern: str) -> str:
        """The collective's name; before 2.19 ``ncclProxyArgs`` has no ``coll``, and only point-to-point patterns tell.

        Of a point-to-point operation 2.21 leaves ``coll`` at 0, which is a broadcast: the pattern goes first.
        """
        if pattern in ("Send", "Recv"):
            return pattern
        return "" if values["coll"] is None else collective_name(self.decoder.layout.enum_name("ncclFunc_t", values["coll"]))

    def _subs(self, address: int, values: Values, *, again: bool) -> list[tuple[Values, _Connection | None]] | None:
        """The subs with their connections, or ``None`` when their counters contradict each other (torn)."""
        decoder = self.decoder
        member = decoder.layout.member("ncclProxyArgs.subs")
        wanted = decoder.fields("ncclProxySubArgs", _SUB_PATHS)
        count = values["nsubs"] or 0
        if not 0 < count <= member.count:
            return None
        found = decoder.structures(wanted, [address + member.at(index) for index in range(count)], again=again)
        running = values["state"] == self._progress_value()
        subs: list[tuple[Values, _Connection | None]] = []
        for sub in found:
            if sub is None:
                return None
            connection = self._connection(sub["connection"] or 0)
            if running and not _counters_agree(sub, connection, values["sliceSteps"] or 1):
                return None
            subs.append((sub, connection))
        return subs

    def _progress_value(self) -> int:
        names = self.decoder.layout.enums.get("ncclProxyOpState", {})
        return next((value for value, name in names.items() if name == "ncclProxyOpProgress"), 2)

    def _sub_record(
        self, sub: Values, made: _Connection | None, gpu_ready: int | None, phase: OpPhase, owners: Sequence[CommState]
    ) -> ProxySub:
        """Counters are 0 until the operation is in progress: before, the memory holds those of the operation that used it
        last.
        """
        running = phase is OpPhase.PROGRESS
        endpoint = next(iter(self._endpoints.get(sub["connection"] or 0, ())), None)
        return ProxySub(
            channel=sub["channelId"] or 0,
            peer=self._peer(sub, made, endpoint, owners),
            nsteps=sub["nsteps"] or 0,
            base=(sub["base"] or 0) if running else 0,
            posted=(sub["posted"] or 0) if running else 0,
            received=(sub["received"] or 0) if running and made and made.direction is Direction.RECV else 0,
            transmitted=(sub["transmitted"] or 0) if running else 0,
            done=(sub["done"] or 0) if running else 0,
            rank=self._rank(sub, made, endpoint, owners),
            nbytes=sub["nbytes"],
            gpu_ready=gpu_ready,
            connection=sub["connection"] or 0,
            connection_index=endpoint.connector.index if endpoint else (made.index if made else None),
            net_device=made.net_device if made else None,
        )

    def _peer(self, sub: Values, made: _Connection | None, endpoint: _Endpoint | None, owners: Sequence[CommState]) -> int:
        """The rank at the other end.

        From the connector that uses the connection; else by the transport's resources. ``ncclProxySubArgs.peer`` is the peer
        only since ``ncclProxyOp.peer`` exists (2.24): before, ProxyOpToArgs copied the *root* of the collective into it.
        """
        if endpoint is not None:
            return endpoint.connector.peer
        if self.decoder.layout.has("ncclProxyOp.peer") and sub["peer"] is not None:
            return sub["peer"]
        if made is not None and made.tp_remote_rank is not None:
            return _from_parent(made.tp_remote_rank, owners)
        return -1

    def _rank(self, sub: Values, made: _Connection | None, endpoint: _Endpoint | None, owners: Sequence[CommState]) -> int | None:
        """The rank on whose behalf it runs: ``ncclProxySubArgs.rank`` (2.24 and later), else the connector's, else the
        resources'.
        """
        if sub["rank"] is not None:
            return sub["rank"]
        if endpoint is not None:
            return endpoint.comm.record.rank
        if made is not None and made.tp_rank is not None:
            return _from_parent(made.tp_rank, owners)
        return None

    def _owners(self, proxy_state: int, subs: Sequence[tuple[Values, _Connection | None]]) -> list[CommState]:
        """The communicators an operation can belong to: whose connectors use its connections; with PXN, those of the same
        proxy.
        """
        candidates: list[CommState] | None = None
        for sub, _ in subs:
            here = [endpoint.comm for endpoint in self._endpoints.get(sub["connection"] or 0, ())]
            if here:
                candidates = here if candidates is None else [comm for comm in candidates if comm in here]
        if candidates:
            return list({comm.record.address: comm for comm in candidates}.values())
        return [comm for comm in self._comms if comm.proxy_state == proxy_state]

    def _connection(self, address: int) -> _Connection | None:
        if address not in self._connections:
            self._connections[address] = self._read_connection(address)
        return self._connections[address]

    def _read_connection(self, address: int) -> _Connection | None:
        decoder, layout = self.decoder, self.decoder.layout
        values = decoder.structure(decoder.fields("ncclProxyConnection", _CONNECTION_PATHS), address) if address else None
        if values is None:
            return None
        direction = Direction.SEND if values["send"] else Direction.RECV
        transport = self._comm_reader.transport_of(values["tcomm"] or 0, direction)
        if transport is Transport.UNKNOWN:
            transport = _TRANSPORTS.get(_name(TRANSPORTS, values["transport"]), Transport.UNKNOWN)
        plain = _Connection(direction, transport, values["tpLocalRank"])
        structure = "sendNetResources" if direction is Direction.SEND else "recvNetResources"
        if transport is not Transport.NET or not layout.has(structure):
            return plain
        resources = decoder.structure(decoder.fields(structure, _RESOURCE_PATHS), values["transportResources"] or 0)
        if resources is None:
            return plain
        return replace(
            plain,
            tp_rank=resources["tpRank"],
            tp_remote_rank=resources["tpRemoteRank"],
            net_device=resources["netDev"],
            index=resources["connIndex"],
            recv_mem=resources["recvMem"] or 0,
        )

    def _gpu_ready(self, subs: Sequence[tuple[Values, _Connection | None]], protocol: str) -> list[int | None]:
        """How far the GPU has produced, for sends over the network.

        Simple: the receive tail, which the GPU writes, minus base. LL and LL128 do not use the tail: a slot is ready once the
        GPU has set its size in the FIFO (``connFifo[slot].size``, ``sizesFifo`` before 2.19), so the ready slots from
        ``transmitted`` on are counted.
        """
        layout = self.decoder.layout
        if not layout.has("ncclRecvMem.tail"):
            self.decoder.unavailable["GPU-ready steps"] = "this build keeps no ncclRecvMem.tail"
            return [None] * len(subs)
        tail = layout.member("ncclRecvMem.tail")
        places = [
            (made.recv_mem + tail.offset if made and self.decoder.is_readable(made.recv_mem) else 0, tail.size)
            for _, made in subs
        ]
        if protocol != "Simple":
            return [self._ready_slots(sub, made) for sub, made in subs]
        ready: list[int | None] = []
        for (sub, made), data in zip(subs, self.decoder.reader.read_many(places), strict=True):
            if data is None:
                if made is not None and made.recv_mem:
                    self.decoder.unavailable["GPU-ready steps"] = (
                        "some receive tails lie in memory that cannot be read from outside"
                    )
                ready.append(None)
                continue
            produced = int.from_bytes(data, "little") - (sub["base"] or 0)
            ready.append(max(0, min(produced, sub["nsteps"] or 0)))
        return ready

    def _ready_slots(self, sub: Values, made: _Connection | None) -> int | None:
        layout = self.decoder.layout
        name = "connFifo" if layout.has("ncclRecvMem.connFifo") else "sizesFifo"
        if made is None or not made.recv_mem or not layout.has(f"ncclRecvMem.{name}"):
            return None
        fifo = layout.member(f"ncclRecvMem.{name}")
        data = self.decoder.reader.read_many([(made.recv_mem + fifo.offset, fifo.size)])[0]
        if data is None:
            return None
        inner = layout.member("ncclConnFifo.size").offset if fifo.element == "struct" and layout.has("ncclConnFifo.size") else 0
        done, transmitted, base = sub["done"] or 0, sub["transmitted"] or 0, sub["base"] or 0
        ready = transmitted
        while ready < min(done + fifo.count, sub["nsteps"] or 0):
            slot = (base + ready) % fifo.count
            size = int.from_bytes(data[fifo.stride * slot + inner : fifo.stride * slot + inner + 4], "little", signed=True)
            if size == -1:
                break
            ready += 1
        return ready

    def _net_name(self, state: Values, transport: Transport) -> str:
        """The network plugin's own name (``IB``, ``Socket``, ``AWS Libfabric``): the first member of every ``ncclNet_t``."""
        if transport not in (Transport.NET, Transport.COLLNET):
            return ""
        table = state["ncclNet" if transport is Transport.NET else "ncclCollNet"] or 0
        pointer = self.decoder.words(table, 1)
        return self.decoder.string(pointer[0], 64) if pointer else ""

    # -- operations still in the pool --------------------------------------------------------------------------------------------

    def _pending(self, proxy_state: int, state: Values) -> list[tuple[int, PendingOperation]]:
        """What main threads have put into the pool and the proxy has not taken, each with its connection.

        Operations move from chain to chain and then to the free list while they are read, and their links with them: when the
        heads of the chains changed under the walk, it is done again, and given up as torn in the end.
        """
        for attempt in range(ATTEMPTS):
            heads = self._pool_heads(state, again=attempt > 0)
            found: dict[tuple[int, int], Values] = {}
            for pool, first in heads:
                self._walk_pool(pool, first, found)
            if self._pool_heads(self._fresh(proxy_state, state), again=True) == heads:
                break
            state = self._fresh(proxy_state, state)
        else:
            self.decoder.torn += 1
            return []
        records = ((values["connection"] or 0, self._pending_record(proxy_state, values)) for values in found.values())
        return [(connection, record) for connection, record in records if record is not None]

    def _fresh(self, proxy_state: int, otherwise: Values) -> Values:
        wanted = self.decoder.fields("ncclProxyState", _STATE_PATHS)
        return self.decoder.structure(wanted, proxy_state, again=True) or otherwise

    def _pool_heads(self, state: Values, *, again: bool) -> list[tuple[int, int]]:
        """(pool, index of its first operation) of the chains: posted (``pool.nextOps``), taken but not yet appended
        (``progressState.nextOps``), and of each local rank's pool what this process has not posted yet (``proxyOps[].nextOps``).
        """
        decoder, layout = self.decoder, self.decoder.layout
        pool = state["progressState.opsPool"] or 0
        heads: list[tuple[int, int | None]] = []
        if pool and layout.has("ncclProxyOpsPool.nextOps"):
            posted = decoder.structure(decoder.fields("ncclProxyOpsPool", ("nextOps",)), pool, again=again)
            heads += [(pool, (posted or {}).get("nextOps")), (pool, state["progressState.nextOps"])]
        local, proxy_ops = state["tpLocalnRanks"] or 0, state["proxyOps"] or 0
        if proxy_ops and 0 < local <= MAX_LOCAL_RANKS and layout.has("ncclProxyOps.nextOps"):
            wanted = decoder.fields("ncclProxyOps", ("pool", "nextOps"))
            places = [proxy_ops + index * wanted.size for index in range(local)]
            heads += [
                (own["pool"], own["nextOps"]) for own in decoder.structures(wanted, places, again=again) if own and own["pool"]
            ]
        return [(place, first) for place, first in heads if first is not None and first >= 0]

    def _walk_pool(self, pool: int, first: int, found: dict[tuple[int, int], Values]) -> None:
        decoder = self.decoder
        ops = decoder.layout.member("ncclProxyOpsPool.ops")
        wanted = decoder.fields("ncclProxyOp", _OP_PATHS)
        index = first
        while 0 <= index < ops.count and (pool, index) not in found:
            if len(found) >= MAX_PENDING:
                decoder.truncated[f"pending operations: the first {MAX_PENDING}"] = None
                return
            values = decoder.structure(wanted, pool + ops.at(index))
            if values is None:
                return
            found[(pool, index)] = values
            index = values["next"] if values["next"] is not None else -1

    def _pending_record(self, proxy_state: int, values: Values) -> PendingOperation | None:
        connection = self._connection(values["connection"] or 0)
        pattern = self.decoder.layout.enum_name("ncclPattern_t", values["pattern"] or 0).removeprefix("ncclPattern")
        if connection is None or pattern == "Profiler":
            return None
        endpoint = next(iter(self._endpoints.get(values["connection"] or 0, ())), None)
        owners = self._owners(proxy_state, [(values, connection)])
        return PendingOperation(
            comm_hash=owners[0].record.hash if len(owners) == 1 else 0,
            comm_address=owners[0].record.address if len(owners) == 1 else 0,
            direction=connection.direction,
            op_count=values["opCount"] or 0,
            channel=values["channelId"] or 0,
            peer=self._peer(values, connection, endpoint, owners),
            nsteps=values["nsteps"] or 0,
            collective=self._collective(values, pattern),
            protocol=_name(PROTOCOLS, values["protocol"]),
            nbytes=values["nbytes"],
            rank=self._rank(values, connection, endpoint, owners),
        )


def _counters_agree(sub: Values, connection: _Connection | None, slice_steps: int) -> bool:
    """Whether the counters of a running sub can have stood together: each stage is at most as far as the one before it.

    They are read in the order they lie in memory (posted first), so a stage may seem ahead by what happened in between: at
    most the slots of a connection. ``nsteps`` grows while registered buffers are sent in pieces (2.19-2.22).
    """
    done, transmitted, posted = sub["done"] or 0, sub["transmitted"] or 0, sub["posted"] or 0
    nsteps, base = sub["nsteps"] or 0, sub["base"] or 0
    if not 0 <= nsteps <= MAX_STEPS or base > MAX_STEPS:
        return False
    stages = [done, transmitted, posted]
    if connection is not None and connection.transport is Transport.NET:
        if connection.direction is Direction.RECV:
            stages.insert(2, sub["received"] or 0)
        if any(low > high for low, high in pairwise(stages)):
            return False
    return max(stages) <= nsteps + max(slice_steps, 1)


def _from_parent(tp_rank: int, owners: Sequence[CommState]) -> int:
    """A rank of the top parent as a rank of the communicator, where the only owner is known to map it."""
    if len(owners) == 1 and owners[0].top_parent_ranks:
        try:
            return owners[0].top_parent_ranks.index(tp_rank)
        except ValueError:
            return -1
    return tp_rank


def _name(names: Sequence[str], index: int | None) -> str:
    if index is None:
        return ""
    return names[index] if 0 <= index < len(names) else str(index)


def _phase(enumerator: str) -> OpPhase:
    return {"ncclProxyOpReady": OpPhase.READY, "ncclProxyOpProgress": OpPhase.PROGRESS}.get(enumerator, OpPhase.NONE)
