"""A made-up NCCL process: memory that tests write structures into, with the layout of a real release from the manifest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ncclwatch.target import manifest
from ncclwatch.target.layout import Layout
from ncclwatch.target.maps import Mapping
from ncclwatch.target.memory import PAGE_SIZE, Range
from ncclwatch.target.recorded import ImageReader, pages_of

MAGIC = 0x0280028002800280


def released_layout(version: tuple[int, int, int]) -> Layout:
    """The layout of an NCCL release on PyPI."""
    layout = manifest.load().by_version(version, "12.4")
    assert layout is not None, version
    return layout


class FakeProcess:
    """Memory in one writable mapping, sparse, filled by members' names; ``reader`` gives what a snapshot of it would."""

    def __init__(self, layout: Layout, base: int = 0x7F0000000000, size: int = 1 << 30) -> None:
        self.layout = layout
        self.base = base
        self.memory: dict[int, bytearray] = {}
        self._next = base + PAGE_SIZE
        self._end = base + size
        self.mappings: list[Mapping] = [mapping(base, base + size)]

    def allocate(self, size: int, alignment: int = 16) -> int:
        """Fresh zeroed memory; of a large one only what is written takes space."""
        address = -(-self._next // alignment) * alignment
        self._next = address + size
        assert self._next <= self._end
        if size <= 4 << 20:
            for page in pages_of(address, size):
                self.memory.setdefault(page, bytearray(PAGE_SIZE))
        return address

    def new(self, structure: str, **members: int) -> int:
        """A structure with some members set; nested paths have ``__`` for the dot."""
        address = self.allocate(self.layout.size(structure))
        for name, value in members.items():
            self.set(address, f"{structure}.{name.replace('__', '.')}", value)
        return address

    def set(self, address: int, path: str, value: int) -> None:
        """Set one member; one that the build lacks is left out."""
        if self.layout.has(path):
            member = self.layout.member(path)
            self.write(address + member.offset, (value % (1 << (8 * member.size))).to_bytes(member.size, "little"))

    def write(self, address: int, data: bytes) -> None:
        for page in pages_of(address, len(data)):
            content = self.memory.setdefault(page, bytearray(PAGE_SIZE))
            low, high = max(address, page), min(address + len(data), page + PAGE_SIZE)
            content[low - page : high - page] = data[low - address : high - address]

    def content(self, address: int, size: int) -> bytes | None:
        """What is in memory, zeros where nothing was written, ``None`` outside."""
        if not self.base <= address <= address + size <= self._end:
            return None
        zeros = bytes(PAGE_SIZE)
        first = address & -PAGE_SIZE
        return b"".join(self.memory.get(page, zeros) for page in pages_of(address, size))[address - first :][:size]

    def words(self, values: Sequence[int], size: int = 8) -> int:
        """An array of integers."""
        address = self.allocate(len(values) * size)
        self.write(address, b"".join((value % (1 << (8 * size))).to_bytes(size, "little") for value in values))
        return address

    def pages(self) -> dict[int, bytes]:
        return {page: bytes(content) for page, content in self.memory.items()}

    def reader(self) -> ImageReader:
        return ImageReader(self.pages(), self.mappings)


def mapping(start: int, end: int, perms: str = "rw-p", path: str = "", inode: int = 0) -> Mapping:
    return Mapping(start, end, perms, 0, 0, inode, path)


class ScriptedReader(ImageReader):
    """Memory that changes: ``on_read`` is called with every range before it is answered, and may write to the process."""

    def __init__(self, process: FakeProcess) -> None:
        super().__init__({}, process.mappings)
        self._process = process
        self.script: list[tuple[int, int, bytes]] = []
        self.reads = 0

    def after(self, reads: int, address: int, data: bytes) -> None:
        """Write ``data`` once so many calls have been answered."""
        self.script.append((reads, address, data))

    def read_many(self, ranges: Sequence[Range], *, again: bool = False) -> list[bytes | None]:
        self.reads += 1
        for due, address, data in self.script:
            if self.reads == due:
                self._process.write(address, data)
        return [self._process.content(address, size) for address, size in ranges]

    def read(self, address: int, size: int) -> bytes:
        (data,) = self.read_many([(address, size)])
        assert data is not None
        return data

    def scan(self, address: int, size: int) -> NDArray[np.uint64]:
        data = self._process.content(address, size) or b""
        return np.frombuffer(data, dtype=np.uint64)


class FakeJob:
    """One rank of a made-up communicator with a proxy, on a :class:`FakeProcess`; enough for every path of the readers."""

    def __init__(self, layout: Layout, rank: int = 1, nranks: int = 4, channels: int = 2) -> None:
        self.process = process = FakeProcess(layout)
        self.layout = layout
        self.channels = channels
        self.hash = 0xC0FFEE
        self.transports = {name: self._transport(name) for name in ("NET", "SHM", "P2P")}
        self.abort_flag = process.words([0], 4)
        net_name = process.allocate(16)
        process.write(net_name, b"Socket\0")
        self.net = process.words([net_name] + [0] * 40)
        self.proxy_state = process.new(
            "ncclProxyState",
            refCount=1,
            tpRank=rank,
            tpnRanks=nranks,
            tpLocalnRanks=1,
            ncclNet=self.net,
            abortFlag=self.abort_flag,
            progressState__nextOps=-1,
        )
        self.pool = process.new("ncclProxyOpsPool", nextOps=-1, nextOpsEnd=-1)
        process.set(self.proxy_state, "ncclProxyState.progressState.opsPool", self.pool)
        self.comm = self._communicator(rank, nranks)
        self.operations: list[int] = []

    def _transport(self, name: str) -> int:
        address = self.process.new("ncclTransport")
        self.process.write(address + self.layout.member("ncclTransport.name").offset, name.encode() + b"\0")
        return address

    def _communicator(self, rank: int, nranks: int) -> int:
        process, layout = self.process, self.layout
        size = layout.size("ncclPeerInfo")
        peers = process.allocate(size * nranks)
        comm = process.new(
            "ncclComm",
            startMagic=MAGIC,
            endMagic=MAGIC,
            commHash=self.hash,
            rank=rank,
            nRanks=nranks,
            cudaDev=3,
            busId=0x1000,
            node=rank,
            nNodes=nranks,
            localRank=0,
            localRanks=1,
            opCount=17,
            nChannels=self.channels,
            abortFlag=self.abort_flag,
            peerInfo=peers,
            proxyState=self.proxy_state,
            topParentRanks=process.words(list(range(nranks)), 4),
        )
        process.set(comm, "ncclComm.intraComm0", comm)
        for index in range(nranks):
            process.set(peers + index * size, "ncclPeerInfo.rank", index)
            process.set(peers + index * size, "ncclPeerInfo.hostHash", self.hash + 100 + index)
        process.set(peers + rank * size, "ncclPeerInfo.comm", comm)
        self.shared = process.new("ncclSharedResources", refCount=1, owner=comm, collOpCount=17, tpNRanks=nranks)
        process.set(self.shared, "ncclSharedResources.proxyState", self.proxy_state)
        process.set(comm, "ncclComm.sharedRes", self.shared)
        self._peer_tables(comm, rank, nranks)
        return comm

    def _peer_tables(self, comm: int, rank: int, nranks: int) -> None:
        process, layout = self.process, self.layout
        channels = layout.member("ncclComm.channels")
        self.peers: dict[tuple[int, int], int] = {}
        for channel in range(self.channels):
            base = comm + channels.at(channel)
            entries = [process.new("ncclChannelPeer") for _ in range(nranks)]
            self.peers.update({(channel, peer): address for peer, address in enumerate(entries)})
            process.set(base, "ncclChannel.peers", process.words(entries))
            process.set(base, "ncclChannel.ring.prev", (rank - 1) % nranks)
            process.set(base, "ncclChannel.ring.next", (rank + 1) % nranks)

    def connect(
        self, channel: int, peer: int, direction: str, transport: str = "NET", resources: int = 0, *, index: int = 0
    ) -> int:
        """Make one connection, of index 1 for Send and Recv; the address of its proxy connection."""
        process, layout = self.process, self.layout
        is_send = direction == "send"
        tcomm = self.transports[transport] + layout.member(f"ncclTransport.{direction}").offset
        connection = process.new(
            "ncclProxyConnection",
            send=int(is_send),
            transport={"P2P": 0, "SHM": 1, "NET": 2}[transport],
            tcomm=tcomm,
            transportResources=resources,
        )
        connector = self.peers[(channel, peer)] + layout.member(f"ncclChannelPeer.{direction}").at(index)
        for path, value in (
            ("connected", 1),
            ("proxyConn.connection", connection),
            ("proxyConn.sameProcess", 1),
            ("transportComm", tcomm),
            ("transportResources", resources),
        ):
            process.set(connector, f"ncclConnector.{path}", value)
        return connection

    def operation(
        self, connection: int, *, state: int = 2, op_count: int = 34, nsubs: int = 1, link: bool = True, **sub: int
    ) -> int:
        """An operation of the proxy with one sub described; appended to the active list."""
        process, layout = self.process, self.layout
        args = process.new(
            "ncclProxyArgs", nsubs=nsubs, opCount=op_count, sliceSteps=2, state=state, protocol=2, coll=4, pattern=1, algorithm=1
        )
        at = args + layout.member("ncclProxyArgs.subs").at(0)
        for name, value in {"connection": connection, "nsteps": 96, "peer": 2, "rank": 1, **sub}.items():
            process.set(at, f"ncclProxySubArgs.{name}", value)
        if link:
            if self.operations:
                process.set(self.operations[-1], "ncclProxyArgs.next", args)
            else:
                process.set(self.proxy_state, "ncclProxyState.progressState.active", args)
            self.operations.append(args)
        return args
