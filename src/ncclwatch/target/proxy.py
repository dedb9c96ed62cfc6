"""Reading a proxy thread: its unfinished operations, and (by :mod:`ncclwatch.target.proxypool`) those it has not taken yet.

Source: NCCL src/proxy.cc (ProxyAppend, removeOp, ncclProxyGetPostedOps) and src/transport/net.cc (sendProxyProgress,
recvProxyProgress), the same in what is used here from v2.18.3-1 to v2.30.7-1; differences are noted where they matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ncclwatch.model.state import Direction, OpPhase, PendingOperation, ProxyOperation, ProxySub, Transport
from ncclwatch.target.commstate import CommReader, CommState
from ncclwatch.target.decode import Decoder, Values
from ncclwatch.target.layout import MissingMemberError
from ncclwatch.target.netdev import NetDevices
from ncclwatch.target.proxyconn import Connections, ProxyConnection, name_of
from ncclwatch.target.proxypool import PROFILER, PoolReader, collective_of, pattern_name
from ncclwatch.target.proxysteps import counters_agree, gpu_ready
from ncclwatch.target.wanted import ALGORITHMS, PROTOCOLS

MAX_OPERATIONS = 4096
"""Operations of one proxy that are read in one sample."""

ATTEMPTS = 3
"""How often a list or structure that changed under the reading is tried before it counts as torn."""

_STATE_PATHS = (
    "ncclNet",
    "ncclCollNet",
    "progressState.active",
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
    "reg",
    "base",
    "posted",
    "received",
    "transmitted",
    "done",
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
"""The algorithm that makes a pattern, for builds before ``ncclProxyArgs.algorithm`` (v2.24.3-1)."""


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
    full: Mapping[int, bool] = field(default_factory=dict)
    """By address of a proxy's state, whether its launcher has no slot left to put operations into."""


class ProxyReader:
    """Reads the proxies of one process; the connectors of its communicators tell whom an operation belongs to."""

    def __init__(
        self, decoder: Decoder, comms: Sequence[CommState], comm_reader: CommReader, net_devices: NetDevices | None = None
    ) -> None:
        self.decoder = decoder
        self._net_devices = net_devices
        self._proxies = tuple(dict.fromkeys(comm.proxy_state for comm in comms if comm.proxy_state))
        self._connections = Connections(decoder, comms, comm_reader)
        # Split communicators may share a proxy: its pool counts the ranks of the largest on this host.
        by_size = sorted(comms, key=lambda comm: comm.record.local_ranks or 0)
        places = {comm.proxy_state: comm.record.local_rank for comm in by_size if comm.record.local_rank is not None}
        self._pool = PoolReader(decoder, self._connections, places)
        self._net_names: dict[int, str] = {}
        names = decoder.layout.enums.get("ncclProxyOpState", {})
        self._in_progress = next((value for value, name in names.items() if name == "ncclProxyOpProgress"), 2)

    def read_all(self) -> ProxyView:
        """Every distinct proxy of the communicators: one that several split communicators share is read once."""
        operations: list[ProxyOperation] = []
        pending: list[PendingOperation] = []
        for address in self._proxies:
            view = self.read(address)
            operations += view.operations
            pending += view.pending
        strangers = {sub.peer for op in operations for sub in op.subs if not self._connections.is_known(sub.connection)}
        return ProxyView(tuple(operations), tuple(pending), tuple(sorted(strangers)), self._pool.full)

    def read(self, proxy_state: int) -> ProxyView:
        """One proxy; empty, with the reason in ``unavailable``, when this build keeps it in another way."""
        decoder = self.decoder
        try:
            state = decoder.structure(decoder.fields("ncclProxyState", _STATE_PATHS), proxy_state)
            if state is None:
                decoder.unavailable["proxy operations"] = "the proxy state of a communicator cannot be read"
                return ProxyView((), ())
            operations = self._operations(proxy_state, state)
            pending = self._pool.read(proxy_state)
        except MissingMemberError as error:
            decoder.unavailable["proxy operations"] = error.message
            return ProxyView((), ())
        # An operation that is being appended is in both places for a moment.
        taken = {(sub.connection, op.op_count) for op in operations for sub in op.subs}
        waiting = tuple(record for connection, record in pending if (connection, record.op_count) not in taken)
        return ProxyView(operations, waiting)

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
        pattern = pattern_name(self.decoder.layout, values)
        if pattern == PROFILER:
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
        subs: Sequence[tuple[Values, ProxyConnection | None]],
    ) -> ProxyOperation:
        layout = self.decoder.layout
        connection = next((c for _, c in subs if c is not None), None)
        direction = connection.direction if connection else Direction.SEND
        transport = connection.transport if connection else Transport.UNKNOWN
        phase = _phase(layout.enum_name("ncclProxyOpState", values["state"] or 0))
        protocol = name_of(PROTOCOLS, values["protocol"])
        ready = (
            gpu_ready(self.decoder, subs, protocol)
            if phase is OpPhase.PROGRESS and direction is Direction.SEND
            else [None] * len(subs)
        )
        net_name = self._net_name(state, transport)
        owners = self._connections.owners(proxy_state, [sub for sub, _ in subs])
        algorithm = name_of(ALGORITHMS, values["algorithm"]) if layout.has("ncclProxyArgs.algorithm") else ""
        collective = collective_of(layout, values, pattern)
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
            subs=tuple(
                self._sub_record(sub, made, got, phase, owners, net_name) for (sub, made), got in zip(subs, ready, strict=True)
            ),
            queued_behind=behind,
            net_name=net_name,
            pattern=pattern,
            idle=None if values["idle"] is None else values["idle"] != 0,
            proxy_state=proxy_state,
            owners=tuple(owner.record.hash for owner in owners),
        )

    def _subs(self, address: int, values: Values, *, again: bool) -> list[tuple[Values, ProxyConnection | None]] | None:
        """The subs with their connections, or ``None`` when their counters contradict each other (torn)."""
        decoder = self.decoder
        member = decoder.layout.member("ncclProxyArgs.subs")
        wanted = decoder.fields("ncclProxySubArgs", _SUB_PATHS)
        count = values["nsubs"] or 0
        if not 0 < count <= member.count:
            return None
        found = decoder.structures(wanted, [address + member.at(index) for index in range(count)], again=again)
        running = values["state"] == self._in_progress
        subs: list[tuple[Values, ProxyConnection | None]] = []
        for sub in found:
            if sub is None:
                return None
            connection = self._connections.at(sub["connection"] or 0)
            if running and not counters_agree(sub, connection, values["sliceSteps"] or 1):
                return None
            subs.append((sub, connection))
        return subs

    def _sub_record(
        self,
        sub: Values,
        made: ProxyConnection | None,
        ready: int | None,
        phase: OpPhase,
        owners: Sequence[CommState],
        net_name: str,
    ) -> ProxySub:
        """Counters are 0 until the operation is in progress: before, the memory holds those of the operation that used it
        last.
        """
        running = phase is OpPhase.PROGRESS
        endpoint = next(iter(self._connections.endpoints(sub)), None)
        return ProxySub(
            channel=sub["channelId"] or 0,
            peer=self._connections.peer(sub, made, owners),
            nsteps=sub["nsteps"] or 0,
            base=(sub["base"] or 0) if running else 0,
            posted=(sub["posted"] or 0) if running else 0,
            received=(sub["received"] or 0) if running and made and made.direction is Direction.RECV else 0,
            transmitted=(sub["transmitted"] or 0) if running else 0,
            done=(sub["done"] or 0) if running else 0,
            rank=self._connections.rank(sub, made, owners),
            nbytes=sub["nbytes"],
            gpu_ready=ready,
            connection=sub["connection"] or 0,
            connection_index=endpoint.connector.index if endpoint else (made.index if made else None),
            net_device=made.net_device if made else None,
            net_device_name=self._net_devices.name(net_name, made.net_device) if made and self._net_devices else "",
        )

    def _net_name(self, state: Values, transport: Transport) -> str:
        """The network plugin's own name (``IB``, ``Socket``, ``AWS Libfabric``): the first member of every ``ncclNet_t``."""
        if transport not in (Transport.NET, Transport.COLLNET):
            return ""
        table = state["ncclNet" if transport is Transport.NET else "ncclCollNet"] or 0
        if table not in self._net_names:
            pointer = self.decoder.words(table, 1)
            self._net_names[table] = self.decoder.string(pointer[0], 64) if pointer else ""
        return self._net_names[table]


def _phase(enumerator: str) -> OpPhase:
    return {"ncclProxyOpReady": OpPhase.READY, "ncclProxyOpProgress": OpPhase.PROGRESS}.get(enumerator, OpPhase.NONE)
