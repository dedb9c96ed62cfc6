"""Reading one communicator: its identity, counters, flags, peers, rings and the connectors to other ranks."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from ncclwatch.model.state import ChannelRing, Communicator, PeerInfo, Transport
from ncclwatch.target.connectors import MAX_CHANNELS, Connector, ConnectorReader
from ncclwatch.target.decode import Decoder, Values
from ncclwatch.target.layout import MissingMemberError

MAGIC = 0x0280028002800280
"""``NCCL_MAGIC``, src/include/comm.h since v2.21.5-1: first and last member of a live communicator."""

MAX_RANKS = 1 << 17
"""Ranks of a communicator; the largest jobs known have tens of thousands."""

MAX_KEPT = 4096
"""Communicators, also past ones, of which lasting facts are kept."""

MAX_LISTED_PEERS = 4096
"""Peers that are listed of one communicator in a sample."""

_COMM = (
    "startMagic",
    "endMagic",
    "commHash",
    "rank",
    "nRanks",
    "cudaDev",
    "busId",
    "node",
    "nNodes",
    "localRank",
    "localRanks",
    "opCount",
    "nChannels",
    "p2pnChannels",
    "asyncResult",
    "initState",
    "finalizeCalled",
    "destroyFlag",
    "revokedFlag",
    "abortFlag",
    "peerInfo",
    "sharedRes",
    "topParentRanks",
    "proxyState",
    "config.commName",
    "intraComm0",
    "intraNext",
)
_SHARED = ("owner", "refCount", "collOpCount", "proxyState")
_PEER = ("rank", "hostHash", "pidHash", "cudaDev", "busId", "comm")
_TID_AT = {40: 720, 48: 208}
"""Where glibc's ``struct pthread`` has the thread's id (nptl/descr.h: behind ``tcbhead_t`` of 704 and 192 bytes and a list), by
the size of a mutex, which is another on x86-64 than on aarch64.
"""
MAX_TID = 1 << 22
"""The kernel gives no higher one (``PID_MAX_LIMIT``, include/linux/threads.h)."""


@dataclass(frozen=True, slots=True)
class _Lasting:
    """What hardly changes while a communicator lives; ``read_at`` is ``time.monotonic()``."""

    read_at: float
    peers: tuple[PeerInfo, ...]
    rings: tuple[ChannelRing, ...]
    connectors: tuple[Connector, ...]
    transports: tuple[tuple[int, int, str, Transport], ...]
    message_peers: tuple[int, ...] | None
    top_parent_ranks: tuple[int, ...]
    name: str
    captured_plans: int | None
    device_initiated: bool | None
    multi_node_nvlink: bool | None
    proxy_thread: int | None
    truncated: tuple[str, ...]
    unavailable: tuple[tuple[str, str], ...]


_LISTS = ("peers", "rings", "transports")


@dataclass(frozen=True, slots=True)
class CommState:
    """A communicator as read, with the addresses that further reading needs (0 where this build has none)."""

    record: Communicator
    values: Values
    connectors: tuple[Connector, ...]
    proxy_state: int
    top_parent_ranks: tuple[int, ...]


class CommReader:
    """Reads communicators of one process; peers, rings and connectors are read again only every ``keep_s`` seconds, or when
    asked.
    """

    def __init__(self, decoder: Decoder, keep_s: float = 5.0) -> None:
        self.decoder = decoder
        self.connectors = ConnectorReader(decoder)
        self._keep_s = keep_s
        self._lasting: dict[tuple[int, int], _Lasting] = {}

    def begin(self) -> None:
        """Start a sample: a reader that keeps nothing reads transport names anew too, so that a recorder sees it."""
        if not self._keep_s:
            self._lasting.clear()
            self.connectors.begin()

    def forget(self, older_than_s: float = 1.0) -> None:
        """Read connectors again next time, if that was not done within ``older_than_s``: connections are made as they are
        needed.
        """
        limit = time.monotonic() - older_than_s
        self._lasting = {key: kept for key, kept in self._lasting.items() if kept.read_at > limit}

    def header(self, address: int, *, again: bool = False) -> Values | None:
        """The members of the communicator itself, or ``None`` when they cannot be read."""
        return self.decoder.structure(self.decoder.fields("ncclComm", _COMM), address, again=again)

    def read(self, address: int, finder: str) -> CommState | None:
        """One communicator, or ``None`` when nothing sane is there (it was destroyed, or changed while it was read: counted as
        torn).
        """
        values = self.header(address)
        if values is None or not sane_header(values):
            return None
        state = self._read(address, values, finder)
        now = self.header(address, again=True)
        if now is None or not sane_header(now) or any(now[name] != values[name] for name in ("commHash", "rank", "nRanks")):
            self.decoder.torn += 1
            return None
        return state

    def _read(self, address: int, values: Values, finder: str) -> CommState:
        decoder = self.decoder
        for name, reason in decoder.fields("ncclComm", _COMM).missing.items():
            if name not in ("startMagic", "endMagic", "destroyFlag", "revokedFlag", "config.commName"):
                decoder.unavailable[f"ncclComm.{name}"] = reason
        nranks, rank = values["nRanks"] or 0, values["rank"] or 0
        if decoder.layout.has("ncclComm.opCount"):
            decoder.counters.append(address + decoder.layout.member("ncclComm.opCount").offset)
        shared = values.get("sharedRes") or 0
        resources = self._shared_resources(shared)
        owner = resources.get("owner")
        proxy_state = values["proxyState"] or resources.get("proxyState") or 0
        lasting = self._lasting_of(address, values, proxy_state)
        record = Communicator(
            address=address,
            hash=values["commHash"] or 0,
            rank=rank,
            nranks=nranks,
            device=values["cudaDev"],
            bus_id=values["busId"],
            node=values["node"],
            nnodes=values["nNodes"],
            local_rank=values["localRank"],
            local_ranks=values["localRanks"],
            op_count=values["opCount"],
            collective_count=resources.get("collOpCount"),
            sequence_numbers=self._sequence_numbers(address),
            async_result=self._async_result(values["asyncResult"], proxy_state),
            init_state=self._result(values["initState"]),
            aborted=self._abort_flag(values),
            finalize_called=_flag(values["finalizeCalled"]),
            destroyed=_flag(values["destroyFlag"]),
            revoked=_flag(values["revokedFlag"]),
            name=lasting.name,
            captured_plans=lasting.captured_plans,
            device_initiated=lasting.device_initiated,
            multi_node_nvlink=lasting.multi_node_nvlink,
            finder=finder,
            peers=lasting.peers,
            rings=lasting.rings,
            transports=lasting.transports,
            message_peers=lasting.message_peers,
            proxy_thread=lasting.proxy_thread,
            shares_resources=None if owner is None else owner != address or (resources.get("refCount") or 1) > 1,
            parent_hash=self._hash_of(owner) if owner and owner != address else None,
        )
        return CommState(
            record=record,
            values=values,
            connectors=lasting.connectors,
            proxy_state=proxy_state,
            top_parent_ranks=lasting.top_parent_ranks,
        )

    def _async_result(self, own: int | None, proxy_state: int) -> str | None:
        """The communicator's result, or that of its proxy: an error there (a peer's socket closed) reaches the communicator only
        when the application asks (``ncclCommGetAsyncError``, ``src/init.cc``).
        """
        result = self._result(own)
        if own or not proxy_state or not self.decoder.layout.has("ncclProxyState.asyncResult"):
            return result
        state = self.decoder.structure(self.decoder.fields("ncclProxyState", ("asyncResult",)), proxy_state)
        failed = state["asyncResult"] if state else None
        return self._result(failed) if failed else result

    def _lasting_of(self, address: int, values: Values, proxy_state: int) -> _Lasting:
        key = (address, values["commHash"] or 0)
        kept = self._lasting.get(key)
        if kept is not None and kept.read_at + self._keep_s > time.monotonic():
            # What limits them limits every sample that repeats them.
            self.decoder.truncated.update(dict.fromkeys(kept.truncated))
            self.decoder.unavailable.update(kept.unavailable)
            return kept
        former, kept = kept, self._read_lasting(address, values, proxy_state)
        if former is not None:
            # What is the same stays the same object: whoever has seen it need not look at it again.
            kept = replace(
                kept, **{name: getattr(former, name) for name in _LISTS if getattr(former, name) == getattr(kept, name)}
            )
        if len(self._lasting) >= MAX_KEPT:
            self._lasting.clear()
        self._lasting[key] = kept
        return kept

    def _read_lasting(self, address: int, values: Values, proxy_state: int) -> _Lasting:
        decoder = self.decoder
        truncated, unavailable = dict(decoder.truncated), dict(decoder.unavailable)
        nranks = values["nRanks"] or 0
        parents = decoder.words(values["topParentRanks"] or 0, nranks, 4, signed=True) or ()
        connectors = self.connectors.read(address, values)
        connecting = self.connectors.connecting(address, values)
        messaged = {c.peer for c in connectors if c.index}  # collectives use index 0
        return _Lasting(
            read_at=time.monotonic(),
            peers=self._peers(values),
            rings=self._rings(address, values),
            connectors=connectors,
            transports=tuple((c.channel, c.peer, str(c.direction), c.transport) for c in connectors),
            message_peers=None if connecting is None else tuple(sorted(messaged | connecting)),
            top_parent_ranks=parents if decoder.layout.has("ncclComm.topParentRanks") else tuple(range(nranks)),
            name=decoder.name(values["config.commName"] or 0),
            captured_plans=self._one_of(address, "ncclComm", ("localPersistentRefs", "persistentRefs")),
            device_initiated=_flag(self._one_of(values["sharedRes"] or 0, "ncclSharedResources", ("ginState.connected",))),
            multi_node_nvlink=_flag(self._one_of(address, "ncclComm", ("MNNVL",))),
            proxy_thread=self._proxy_thread(proxy_state),
            truncated=tuple(line for line in decoder.truncated if line not in truncated),
            unavailable=tuple(item for item in decoder.unavailable.items() if item[0] not in unavailable),
        )

    def _proxy_thread(self, proxy_state: int) -> int | None:
        """The id that glibc keeps of the progress thread, in the ``struct pthread`` that its handle points to."""
        layout = self.decoder.layout
        if not (proxy_state and layout.has("ncclProxyState.progressState.thread") and layout.has("ncclProxyOpsPool.mutex")):
            return None
        handle = self.decoder.words(proxy_state + layout.member("ncclProxyState.progressState.thread").offset, 1, 8)
        offset = _TID_AT.get(layout.member("ncclProxyOpsPool.mutex").size)
        found = self.decoder.words(handle[0] + offset, 1, 4) if handle and handle[0] and offset else None
        return found[0] if found and found[0] <= MAX_TID else None

    def _one_of(self, address: int, struct: str, names: tuple[str, ...]) -> int | None:
        """The first of several members that this build has; one that only tells what else is hidden may be missing."""
        name = next((name for name in names if self.decoder.layout.has(f"{struct}.{name}")), None)
        if name is None or not address:
            return None
        found = self.decoder.structure(self.decoder.fields(struct, (name,)), address)
        return found[name] if found else None

    def _result(self, value: int | None) -> str | None:
        return None if value is None else self.decoder.layout.enum_name("ncclResult_t", value)

    def _abort_flag(self, values: Values) -> bool | None:
        """``*abortFlag``: host memory that the kernels see too; CUDA host memory of some drivers cannot be read from outside."""
        word = self.decoder.words(values["abortFlag"] or 0, 1, 4)
        if word is None:
            if values["abortFlag"]:
                self.decoder.unavailable["abort flag"] = "the memory that holds ncclComm.abortFlag cannot be read from outside"
            return None
        return bool(word[0])

    def _shared_resources(self, address: int) -> Values:
        """What several communicators split from one can share (``ncclSharedResources``); empty where there is no such thing."""
        if not address or not self.decoder.layout.has("ncclSharedResources"):
            return {}
        return self.decoder.structure(self.decoder.fields("ncclSharedResources", _SHARED), address) or {}

    def _hash_of(self, address: int) -> int | None:
        values = self.header(address)
        return values["commHash"] if values is not None and sane_header(values) else None

    def _sequence_numbers(self, address: int) -> dict[str, int]:
        """``seqNumber[]`` by the collective's name: every launch since 2.26, never point-to-point, never graph replays."""
        layout = self.decoder.layout
        if not layout.has("ncclComm.seqNumber"):
            return {}
        member = layout.member("ncclComm.seqNumber")
        numbers = self.decoder.words(address + member.offset, min(member.count, 64), member.stride)
        if numbers is None:
            return {}
        self.decoder.counters += [address + member.at(index) for index, number in enumerate(numbers) if number]
        return {collective_name(layout.enum_name("ncclFunc_t", index)): number for index, number in enumerate(numbers) if number}

    def _peers(self, values: Values) -> tuple[PeerInfo, ...]:
        decoder = self.decoder
        nranks, first = values["nRanks"] or 0, values["peerInfo"] or 0
        try:
            wanted = decoder.fields("ncclPeerInfo", _PEER)
        except MissingMemberError as error:
            decoder.unavailable["peers"] = error.message
            return ()
        if nranks > MAX_LISTED_PEERS:
            decoder.truncated[f"peers: {MAX_LISTED_PEERS} of {nranks} listed"] = None
        count = min(nranks, MAX_LISTED_PEERS)
        salt = values["commHash"] or 0
        found = decoder.structures(wanted, [first + index * wanted.size for index in range(count)]) if first else []
        return tuple(
            PeerInfo(
                index,
                _without(peer["hostHash"], salt),
                _without(peer["pidHash"], salt),
                peer["cudaDev"],
                peer["busId"],
                peer["comm"],
            )
            for index, peer in enumerate(found)
            if peer is not None and peer["rank"] == index
        )

    def _rings(self, address: int, values: Values) -> tuple[ChannelRing, ...]:
        layout, nranks = self.decoder.layout, values["nRanks"] or 0
        if not (layout.has("ncclChannel.ring.prev") and layout.has("ncclComm.channels")):
            self.decoder.unavailable["rings"] = "this build keeps no ncclChannel.ring"
            return ()
        channels = layout.member("ncclComm.channels")
        count = max(0, min(values["nChannels"] or 0, channels.count, MAX_CHANNELS))
        wanted = self.decoder.fields("ncclChannel", ("ring.prev", "ring.next", "tree.up"))
        found = self.decoder.structures(wanted, [address + channels.at(index) for index in range(count)])
        rings = []
        for index, ring in enumerate(found):
            before, after = (ring["ring.prev"], ring["ring.next"]) if ring else (None, None)
            if before is not None and after is not None and 0 <= before < nranks and 0 <= after < nranks:
                parent = ring["tree.up"] if ring else None
                rings.append(ChannelRing(index, before, after, -1 if parent is None else min(max(parent, -1), nranks - 1)))
        return tuple(rings)


def sane_header(values: Values) -> bool:
    """Whether the members of a communicator can be those of a live one that knows its rank: magics where this build has them,
    bounds.
    """
    for name in ("startMagic", "endMagic"):
        if values.get(name) not in (None, MAGIC):
            return False
    rank, nranks = values.get("rank"), values.get("nRanks")
    if rank is None or nranks is None or not 0 <= rank < nranks <= MAX_RANKS:
        return False
    pairs = (("node", "nNodes"), ("localRank", "localRanks"))
    return all(_below(values.get(low), values.get(high), nranks) for low, high in pairs)


def _below(value: int | None, count: int | None, limit: int) -> bool:
    """``value < count <= limit``, or both still 0 (not yet known during initialisation), or not in this build."""
    if value is None or count is None:
        return True
    return (value == 0 and count == 0) or 0 <= value < count <= limit


def collective_name(enumerator: str) -> str:
    """``ncclFuncAllReduce`` → ``AllReduce``."""
    return enumerator.removeprefix("ncclFunc")


def _without(value: int | None, salt: int) -> int | None:
    """A host or process hash without the communicator's hash, which fillInfo (src/init.cc) adds."""
    return None if value is None else (value - salt) % (1 << 64)


def _flag(value: int | None) -> bool | None:
    return None if value is None else value != 0
