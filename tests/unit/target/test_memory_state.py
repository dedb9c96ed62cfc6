"""Decoding made-up memory with the layouts of real releases: what is reported, and what hostile or changing memory does."""

from __future__ import annotations

import time

import pytest

from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import Direction, OpPhase, ProcessInfo, ProcessSample, Transport, VersionSource
from ncclwatch.target import proxy
from ncclwatch.target.layout import Layout
from ncclwatch.target.memory import MemoryReader
from ncclwatch.target.sampler import ProcessFacts, Sampler
from unit.target_fake import MAGIC, FakeJob, ScriptedReader, released_layout

VERSIONS = [(2, 18, 3), (2, 19, 3), (2, 21, 5), (2, 27, 5), (2, 32, 3)]
INFO = ProcessInfo(ProcessKey("boot", 1, 2, "id"), "host", "name", (), "libnccl.so.2", None, VersionSource.DEBUG_INFO)


@pytest.fixture(params=VERSIONS, ids=lambda v: ".".join(map(str, v)))
def layout(request: pytest.FixtureRequest) -> Layout:
    return released_layout(request.param)


@pytest.fixture
def newest() -> Layout:
    return released_layout((2, 32, 3))


def sampler_of(reader: MemoryReader, layout: Layout, comm: int | None) -> Sampler:
    sampler = Sampler(reader, layout, None, keep=False)
    if comm is not None:
        sampler.expect({comm: "hint"})
    return sampler


def look(job: FakeJob, reader: MemoryReader | None = None) -> ProcessSample:
    sampler = sampler_of(reader or job.process.reader(), job.layout, job.comm)
    return sampler.sample(INFO, ProcessFacts(1, 2, "S"))


def test_found_by_searching(layout: Layout) -> None:
    job = FakeJob(layout)
    sampler = sampler_of(job.process.reader(), layout, None)
    assert sampler.search()
    how = "magic" if layout.has("ncclComm.startMagic") else "invariants"
    assert sampler.finder.found == {job.comm: how}
    assert sampler.finder.report.complete


def test_a_communicator_is_read(layout: Layout) -> None:
    job = FakeJob(layout)
    job.connect(1, 2, "send")
    job.connect(0, 0, "recv", "P2P")
    sample = look(job)
    (comm,) = sample.communicators
    assert (comm.address, comm.hash, comm.rank, comm.nranks) == (job.comm, 0xC0FFEE, 1, 4)
    assert (comm.device, comm.bus_id, comm.node, comm.nnodes) == (3, 0x1000, 1, 4)
    assert (comm.op_count, comm.collective_count, comm.async_result, comm.aborted) == (17, 17, "ncclSuccess", False)
    assert [(ring.channel, ring.prev, ring.next) for ring in comm.rings] == [(0, 0, 2), (1, 0, 2)]
    assert [(peer.rank, peer.host_hash) for peer in comm.peers] == [(i, 100 + i) for i in range(4)]
    assert comm.transports == ((0, 0, "recv", Transport.P2P), (1, 2, "send", Transport.NET))
    assert comm.shares_resources is False
    assert (sample.process.rank, sample.process.world_size, sample.process.rank_source) == (1, 4, "communicator")
    assert sample.torn == 0


def test_messages_are_possible_with_whom_connections_for_them_are_made_or_being_made(layout: Layout) -> None:
    job = FakeJob(layout)
    job.connect(0, 0, "recv", "P2P")
    assert look(job).communicators[0].message_peers is None, "these tables cannot be read"
    marks = {"connectSend": [0, 0, 0, 0], "connectRecv": [0, 0, 0, 2]}
    for name, words in marks.items():
        job.process.set(job.comm, f"ncclComm.{name}", job.process.words(words))
    assert look(job).communicators[0].message_peers == (3,)
    job.connect(1, 2, "send", "P2P", index=1)
    (own,) = look(job).communicators
    assert own.message_peers == (2, 3)
    assert [own.may_message(peer) for peer in range(4)] == [False, False, True, True]


def test_an_operation_in_progress(layout: Layout) -> None:
    job = FakeJob(layout)
    tail = job.process.new("ncclRecvMem", tail=960 + 24)
    resources = job.process.new("sendNetResources", netDev=1, tpRank=1, tpRemoteRank=2, recvMem=tail)
    connection = job.connect(1, 2, "send", resources=resources)
    # ProxyOpToArgs copied the collective's root into peer before 2.23: whatever is there, the connector decides.
    job.operation(connection, channelId=1, base=960, posted=24, transmitted=20, done=16, received=77, peer=3)
    sample = look(job)
    (op,) = sample.operations
    assert (op.direction, op.transport, op.phase, op.protocol) == (Direction.SEND, Transport.NET, OpPhase.PROGRESS, "Simple")
    assert (op.comm_hash, op.owners, op.sequence, op.is_point_to_point) == (0xC0FFEE, (0xC0FFEE,), 17, False)
    assert op.net_name == "Socket"
    assert op.algorithm == "Ring"
    (sub,) = op.subs
    assert (sub.channel, sub.peer, sub.nsteps, sub.base, sub.posted, sub.transmitted, sub.done) == (1, 2, 96, 960, 24, 20, 16)
    assert (sub.gpu_ready, sub.net_device, sub.rank) == (24, 1, 1)
    assert sub.received == 0, "a send does not use this counter: what is there is stale"


def test_counters_before_progress_are_stale_and_not_reported(layout: Layout) -> None:
    job = FakeJob(layout)
    connection = job.connect(0, 0, "recv")
    job.operation(connection, state=1, base=960, posted=96, received=96, transmitted=96, done=95)
    (op,) = look(job).operations
    assert op.phase is OpPhase.READY
    (sub,) = op.subs
    assert (sub.nsteps, sub.base, sub.posted, sub.received, sub.transmitted, sub.done) == (96, 0, 0, 0, 0, 0)


STEP_BYTES = 65536
"""Of one slot of an LL buffer, as NCCL has it by default."""


def low_latency_send(job: FakeJob, protocol: int, flags: dict[int, tuple[int, int]]) -> ProcessSample:
    """A send whose slots 4 and 5 have a size of 512 bytes; ``flags`` of a slot are those of its first and last line."""
    layout, process = job.layout, job.process
    memory = process.new("ncclRecvMem", tail=965)
    name = "connFifo" if layout.has("ncclRecvMem.connFifo") else "sizesFifo"
    fifo = layout.member(f"ncclRecvMem.{name}")
    inner = layout.member("ncclConnFifo.size").offset if name == "connFifo" else 0
    for slot in range(fifo.count):
        size = 512 if slot in (4, 5) else -1
        process.write(memory + fifo.offset + slot * fifo.stride + inner, size.to_bytes(4, "little", signed=True))
    buffer = process.allocate(8 * STEP_BYTES, 4096)
    for slot, (first, last) in flags.items():
        process.write(buffer + slot * STEP_BYTES + 4, first.to_bytes(4, "little"))
        process.write(buffer + slot * STEP_BYTES + 512 - 4, last.to_bytes(4, "little"))
    resources = process.new("sendNetResources", recvMem=memory)
    process.set(resources, "sendNetResources.buffers[0]", buffer)
    process.set(resources, "sendNetResources.buffSizes[0]", 8 * STEP_BYTES)
    args = job.operation(job.connect(0, 2, "send", resources=resources), base=960, posted=12, transmitted=4, done=4)
    process.set(args, "ncclProxyArgs.protocol", protocol)
    return look(job)


@pytest.mark.parametrize(
    ("flags", "ready"),
    [
        ({4: (965, 965), 5: (966, 966)}, 6),
        ({4: (965, 965), 5: (966, 958)}, 5),  # the last line is still of eight steps before
        ({4: (965, 965)}, 5),
        ({}, 4),  # sizes are set before there is anything to send
        ({5: (966, 966)}, 4),
    ],
)
def test_low_latency_sends_are_ready_by_their_flags(layout: Layout, flags: dict[int, tuple[int, int]], ready: int) -> None:
    sample = low_latency_send(FakeJob(layout), 0, flags)
    (op,) = sample.operations
    assert (op.protocol, op.subs[0].gpu_ready) == ("LL", ready)
    assert "GPU-ready steps" not in sample.unavailable


def test_flags_wrap_after_32_bits(newest: Layout) -> None:
    job = FakeJob(newest)
    low_latency_send(job, 0, {4: (5, 5), 5: (6, 6)})
    job.process.set(job.operations[0], "ncclProxyArgs.subs[0].base", 1 << 32)
    (op,) = look(job).operations
    assert op.subs[0].gpu_ready == 6


def test_an_unreadable_low_latency_buffer_says_nothing(newest: Layout) -> None:
    job = FakeJob(newest)
    memory = job.process.new("ncclRecvMem", tail=965)
    resources = job.process.new("sendNetResources", recvMem=memory)
    args = job.operation(job.connect(0, 2, "send", resources=resources), base=960, posted=12, transmitted=4, done=4)
    job.process.set(args, "ncclProxyArgs.protocol", 0)
    fifo = newest.member("ncclRecvMem.connFifo")
    job.process.write(memory + fifo.at(4) + newest.member("ncclConnFifo.size").offset, (512).to_bytes(4, "little"))
    sample = look(job)
    assert sample.operations[0].subs[0].gpu_ready is None
    assert sample.unavailable["GPU-ready steps"] == "some LL buffers lie in memory that cannot be read from outside"


def test_ll128_sends_are_ready_by_the_tail(layout: Layout) -> None:
    """Sizes of slots 4 and 5 are set; the tail says that one of them is filled."""
    (op,) = low_latency_send(FakeJob(layout), 1, {}).operations
    assert (op.protocol, op.subs[0].gpu_ready) == ("LL128", 5)


def test_queued_operations_of_one_connection(layout: Layout) -> None:
    job = FakeJob(layout)
    connection = job.connect(0, 2, "send")
    first = job.operation(connection, op_count=34)
    second = job.operation(connection, op_count=36, state=1, link=False)
    third = job.operation(connection, op_count=38, state=1, link=False)
    job.process.set(first, "ncclProxyArgs.nextPeer", second)
    job.process.set(second, "ncclProxyArgs.nextPeer", third)
    job.operation(job.connect(1, 0, "recv"), op_count=34)
    assert [(op.sequence, op.queued_behind) for op in look(job).operations] == [(17, 0), (18, 1), (19, 2), (17, 0)]


def test_operations_still_in_the_pool(layout: Layout) -> None:
    job = FakeJob(layout)
    connection = job.connect(1, 2, "send")
    ops = layout.member("ncclProxyOpsPool.ops")
    for index, following in ((5, 9), (9, -1)):
        for name, value in (("connection", connection), ("opCount", 40), ("nsteps", 12), ("channelId", 1), ("next", following)):
            job.process.set(job.pool + ops.at(index), f"ncclProxyOp.{name}", value)
    job.process.set(job.pool, "ncclProxyOpsPool.nextOps", 5)
    pending = look(job).pending
    assert [(p.comm_hash, p.direction, p.op_count >> 1, p.channel, p.peer, p.nsteps) for p in pending] == [
        (0xC0FFEE, Direction.SEND, 20, 1, 2, 12)
    ] * 2


def test_a_shared_proxy_is_counted_once(layout: Layout) -> None:
    job = FakeJob(layout)
    shared = job.shared
    other = job._communicator(0, 2)
    job.process.set(other, "ncclComm.commHash", 0xBEEF)
    job.process.set(other, "ncclComm.sharedRes", shared)
    job.process.set(shared, "ncclSharedResources.refCount", 2)
    connection = job.process.new("ncclProxyConnection", send=1, transport=2)
    job.operation(connection)
    sampler = sampler_of(job.process.reader(), layout, job.comm)
    sampler.expect({other: "hint"})
    sample = sampler.sample(INFO, ProcessFacts(1, 2, "S"))
    assert len(sample.communicators) == 2
    assert [comm.shares_resources for comm in sample.communicators] == [True, True]
    (op,) = sample.operations
    assert op.comm_hash == 0, "either may own it: nobody is named"
    assert set(op.owners) == {job.hash, 0xBEEF}


def test_communicators_that_share_a_connection(layout: Layout) -> None:
    """A split communicator uses its parent's connection under another rank and peer: builds whose subs carry both tell whose
    it is.
    """
    job = FakeJob(layout)
    shared, parent_peers = job.shared, dict(job.peers)
    connection = job.connect(1, 2, "send")
    child = job._communicator(0, 2)
    job.process.set(child, "ncclComm.commHash", 0xBEEF)
    job.process.set(child, "ncclComm.sharedRes", shared)
    tables = job.process.words([parent_peers[1, 1], parent_peers[1, 2]])
    job.process.set(child + layout.member("ncclComm.channels").at(1), "ncclChannel.peers", tables)
    job.operation(connection, rank=0, peer=1, channelId=1)
    sampler = sampler_of(job.process.reader(), layout, job.comm)
    sampler.expect({child: "hint"})
    (op,) = sampler.sample(INFO, ProcessFacts(1, 2, "S")).operations
    if layout.has("ncclProxyOp.peer"):
        assert (op.owners, op.comm_hash, op.subs[0].peer, op.subs[0].rank) == ((0xBEEF,), 0xBEEF, 1, 0)
    else:
        assert (op.comm_hash, set(op.owners)) == (0, {0xC0FFEE, 0xBEEF})


@pytest.mark.parametrize("version", [(2, 21, 5), (2, 32, 3)])
def test_a_registered_buffer_is_ready_as_its_build_counts(version: tuple[int, int, int]) -> None:
    layout = released_layout(version)
    job = FakeJob(layout)
    resources = job.process.new("sendNetResources", recvMem=job.process.new("ncclRecvMem", tail=960 + 2))
    job.operation(job.connect(1, 2, "send", resources=resources), base=960, reg=1, posted=8, transmitted=2)
    (op,) = look(job).operations
    assert op.subs[0].gpu_ready == (96 if version == (2, 21, 5) else 2)


def test_head_and_tail_of_shared_memory(layout: Layout) -> None:
    job = FakeJob(layout)
    send, recv = job.process.new("ncclSendMem", head=100), job.process.new("ncclRecvMem", tail=104)
    job.connect(0, 2, "send", "SHM", job.process.new("shmSendResources", hostMem=send, remHostMem=recv))
    job.connect(0, 0, "recv", "SHM", job.process.new("shmRecvResources", hostMem=recv, remHostMem=send))
    job.connect(1, 0, "recv", "SHM", job.process.new("shmRecvResources", hostMem=0xDEAD0000, remHostMem=send))
    sample = look(job)
    connections = sample.communicators[0].host_connections
    assert [(c.channel, c.peer, c.direction, c.head, c.tail) for c in connections] == [
        (0, 0, "recv", 100, 104),
        (0, 2, "send", 100, 104),
        (1, 0, "recv", 100, None),
    ]
    assert "shared-memory head and tail" in sample.unavailable


# -- hostile and changing memory


def test_a_cycle_in_the_list_ends_and_counts_as_torn(layout: Layout) -> None:
    job = FakeJob(layout)
    first = job.operation(job.connect(0, 2, "send"))
    second = job.operation(job.connect(1, 2, "send"))
    job.process.set(second, "ncclProxyArgs.next", first)
    sample = look(job)
    assert [op.address for op in sample.operations] == [first, second]
    assert sample.torn == 1


def test_a_list_longer_than_the_bound_is_cut_and_says_so(newest: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "MAX_OPERATIONS", 5)
    job = FakeJob(newest)
    for number in range(9):
        job.operation(job.connect(0, 2, "send"), op_count=number * 2)
    sample = look(job)
    assert len(sample.operations) == 5
    assert sample.truncated == ("proxy operations: the first 5",)


@pytest.mark.parametrize("nsubs", [0, -1, 65, 1 << 30])
def test_a_senseless_number_of_subs_drops_the_operation(newest: Layout, nsubs: int) -> None:
    job = FakeJob(newest)
    job.operation(job.connect(0, 2, "send"), nsubs=nsubs)
    sample = look(job)
    assert sample.operations == ()
    assert sample.torn == 1


@pytest.mark.parametrize("pointer", [1, 0x1001, 0xDEAD0000, (1 << 64) - 8, 0x7F0000000004])
def test_hostile_pointers_lead_nowhere(newest: Layout, pointer: int) -> None:
    job = FakeJob(newest)
    job.operation(pointer)
    for path in ("peerInfo", "proxyState", "sharedRes", "abortFlag", "topParentRanks"):
        job.process.set(job.comm, f"ncclComm.{path}", pointer)
    base = job.comm + newest.member("ncclComm.channels").at(0)
    job.process.set(base, "ncclChannel.peers", pointer)
    (comm,) = look(job).communicators
    assert comm.peers == ()
    assert comm.aborted is None


def test_a_next_pointer_into_nowhere_is_torn(newest: Layout) -> None:
    job = FakeJob(newest)
    args = job.operation(job.connect(0, 2, "send"))
    job.process.set(args, "ncclProxyArgs.next", 0xDEAD0000)
    sample = look(job)
    assert ([op.address for op in sample.operations], sample.torn) == ([args], 1)


def test_the_free_list_is_not_taken_for_pending_operations(newest: Layout) -> None:
    """The head moves on while the chain is walked: the links then lead through operations that are free again."""
    job = FakeJob(newest)
    connection = job.connect(1, 2, "send")
    ops = newest.member("ncclProxyOpsPool.ops")
    for index in range(50):
        job.process.set(job.pool + ops.at(index), "ncclProxyOp.connection", connection)
        job.process.set(job.pool + ops.at(index), "ncclProxyOp.next", index + 1 if index < 49 else -1)
    head = job.pool + newest.member("ncclProxyOpsPool.nextOps").offset
    job.process.write(head, (0).to_bytes(4, "little"))
    quiet = ScriptedReader(job.process)
    assert len(look(job, quiet).pending) == 50
    for moment in range(1, quiet.reads + 1):
        job.process.write(head, (0).to_bytes(4, "little"))
        reader = ScriptedReader(job.process)
        reader.after(moment, head, (-1).to_bytes(4, "little", signed=True))
        assert len(look(job, reader).pending) in (0, 50)


def test_an_operation_being_appended_is_not_counted_twice(newest: Layout) -> None:
    job = FakeJob(newest)
    connection = job.connect(1, 2, "send")
    job.operation(connection, op_count=40)
    at = job.pool + newest.member("ncclProxyOpsPool.ops").at(3)
    for name, value in (("connection", connection), ("opCount", 40), ("next", -1)):
        job.process.set(at, f"ncclProxyOp.{name}", value)
    job.process.set(job.pool, "ncclProxyOpsPool.nextOps", 3)
    sample = look(job)
    assert (len(sample.operations), sample.pending) == (1, ())


def test_counters_that_cannot_stand_together_are_torn(newest: Layout) -> None:
    job = FakeJob(newest)
    job.operation(job.connect(0, 0, "recv"), posted=8, received=4, transmitted=6, done=2)
    sample = look(job)
    assert (sample.operations, sample.torn) == ((), 1)


def test_an_operation_reused_while_it_is_read_is_dropped(newest: Layout) -> None:
    job = FakeJob(newest)
    args = job.operation(job.connect(0, 2, "send"), op_count=34, posted=8)
    reader = ScriptedReader(job.process)
    quiet = ScriptedReader(job.process)
    assert len(look(job, quiet).operations) == 1
    offset = newest.member("ncclProxyArgs.opCount").offset
    dropped = 0
    for moment in range(1, quiet.reads + 1):
        job.process.set(args, "ncclProxyArgs.opCount", 34)
        reader = ScriptedReader(job.process)
        reader.after(moment, args + offset, (40).to_bytes(8, "little"))
        sample = look(job, reader)
        assert [op.op_count for op in sample.operations] in ([], [34], [40])
        dropped += sample.torn
    assert dropped >= 1, "at some moment the change falls between the readings"


def test_a_freed_communicator_is_no_longer_one(newest: Layout) -> None:
    job = FakeJob(newest)
    reader = ScriptedReader(job.process)
    sampler = sampler_of(reader, newest, job.comm)
    assert len(sampler.sample(INFO, ProcessFacts(1, 2, "S")).communicators) == 1
    job.process.set(job.comm, "ncclComm.startMagic", 0)
    assert sampler.sample(INFO, ProcessFacts(1, 2, "S")).communicators == ()


@pytest.mark.parametrize(
    ("member", "value"),
    [("rank", 4), ("rank", -1), ("nRanks", 0), ("nRanks", 1 << 30), ("endMagic", MAGIC + 1), ("localRank", 9), ("nNodes", 5)],
)
def test_what_only_looks_like_a_communicator(newest: Layout, member: str, value: int) -> None:
    job = FakeJob(newest)
    job.process.set(job.comm, f"ncclComm.{member}", value)
    sampler = sampler_of(job.process.reader(), newest, None)
    assert not sampler.search()


@pytest.mark.parametrize("version", [(2, 18, 3), (2, 19, 3)])
def test_invariants_refuse_a_foreign_structure(version: tuple[int, int, int]) -> None:
    layout = released_layout(version)
    job = FakeJob(layout)
    member = layout.member("ncclPeerInfo.comm")
    peers_pointer = int.from_bytes(job.process.content(job.comm + layout.member("ncclComm.peerInfo").offset, 8) or b"", "little")
    job.process.write(peers_pointer + layout.size("ncclPeerInfo") + member.offset, (0x1234).to_bytes(8, "little"))
    assert not sampler_of(job.process.reader(), layout, None).search()


@pytest.mark.parametrize(
    ("there", "name"), [(b"dp \xc3\xa9 group", "dp \u00e9 group"), (b"dp\x1b[2J group", ""), (b"dp\xff", "")]
)
def test_only_text_is_a_name(newest: Layout, there: bytes, name: str) -> None:
    """What else lies there is what came after a name that the program has freed, or wants to steer a terminal."""
    job = FakeJob(newest)
    address = job.process.allocate(64)
    job.process.write(address, there + b"\0")
    job.process.set(job.comm, "ncclComm.config.commName", address)
    assert look(job).communicators[0].name == name


def test_a_missing_member_is_an_unavailable_signal() -> None:
    layout = released_layout((2, 18, 3))
    job = FakeJob(layout)
    sample = look(job)
    (comm,) = sample.communicators
    assert comm.destroyed is None
    assert comm.sequence_numbers == {}


def test_searching_stays_within_its_budget(newest: Layout) -> None:
    job = FakeJob(newest)
    sampler = sampler_of(job.process.reader(), newest, None)
    finder = sampler.finder
    calls = 0
    while not finder.search(1 << 20, time.monotonic() + 60):
        calls += 1
        assert calls < 1000
    assert calls > 0
    assert finder.found == {job.comm: "magic"}


def test_large_communicators_are_read_in_part_and_every_sample_says_so(newest: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours in the ring come first, so that what matters is known although not everybody is looked at."""
    monkeypatch.setattr("ncclwatch.target.connectors.MAX_CONNECTORS", 4 * 2 * 8)
    job = FakeJob(newest, rank=500, nranks=1000)
    for channel, peer in ((0, 499), (1, 501), (0, 10)):
        job.connect(channel, peer, "send")
    sampler = Sampler(job.process.reader(), newest, None)
    sampler.expect({job.comm: "hint"})
    samples = [sampler.sample(INFO, ProcessFacts(1, 2, "S")) for _ in range(2)]
    for sample in samples:
        assert [line[:2] for line in sample.communicators[0].transports] == [(0, 499), (1, 501)]
        assert "connections: to 8 of 1000 peers" in sample.truncated


def test_an_operation_to_an_unknown_peer_makes_its_connection_known(newest: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncclwatch.target.connectors.MAX_CONNECTORS", 4 * 2 * 8)
    job = FakeJob(newest, rank=500, nranks=1000)
    job.operation(job.connect(0, 10, "send"), peer=10, rank=500)
    sampler = Sampler(job.process.reader(), newest, None, keep=False)
    sampler.expect({job.comm: "hint"})
    first, second = (sampler.sample(INFO, ProcessFacts(1, 2, "S")) for _ in range(2))
    assert first.communicators[0].transports == ()
    assert second.communicators[0].transports == ((0, 10, "send", Transport.NET),)
    assert first.operations[0].subs[0].peer == second.operations[0].subs[0].peer == 10


class GrowingReader(ScriptedReader):
    """A process that maps more memory later; the map can be read again."""

    def refresh_mappings(self) -> bool:
        self._mappings = tuple(self._process.mappings)
        return True


def test_memory_mapped_later_is_readable_whoever_noticed_it(newest: Layout) -> None:
    job = FakeJob(newest)
    whole = job.process.mappings[0]
    job.process.mappings[:] = []
    reader = GrowingReader(job.process)
    sampler = sampler_of(reader, newest, None)
    assert not sampler.decoder.is_readable(job.comm)
    job.process.mappings.append(whole)
    reader.refresh_mappings()
    reader.refresh_mappings = lambda: False  # type: ignore[method-assign]
    assert sampler.decoder.is_readable(job.comm)


def with_a_communicator_to_come(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeJob, Sampler]:
    """A sampler that has looked through a process before its communicator was there."""
    job = FakeJob(layout)
    sampler = Sampler(job.process.reader(), layout, None)
    with monkeypatch.context() as before:
        before.setattr(sampler.finder, "_is_live", lambda _: False)
        assert not sampler.search()
    return job, sampler


def found_by_samples(sampler: Sampler, monkeypatch: pytest.MonkeyPatch, looks: int = 3) -> list[int]:
    monkeypatch.setattr("ncclwatch.target.sampler.CHECK_INTERVAL_S", 0.0)
    sampler._next_check = 0.0
    for _ in range(looks):
        found = sampler.sample(INFO, ProcessFacts(1, 2, "S", threads=3)).communicators
    return [communicator.address for communicator in found]


def test_the_first_communicator_is_found_although_nothing_outside_tells_of_it(
    newest: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that waits in the creation of its first communicator starts no thread for it: it must not seem to be missing."""
    job, sampler = with_a_communicator_to_come(newest, monkeypatch)
    sampler._signs = (3, 0)
    monkeypatch.setattr("ncclwatch.target.sampler.RETRY_INTERVAL_S", 1e9)
    assert found_by_samples(sampler, monkeypatch) == [job.comm]


def test_a_communicator_is_looked_for_while_a_call_makes_it(newest: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    job, sampler = with_a_communicator_to_come(newest, monkeypatch)
    sampler._signs, sampler._next_retry = (3, 0), time.monotonic() + 1e9
    assert found_by_samples(sampler, monkeypatch) == []
    sampler.creation_begun()
    assert found_by_samples(sampler, monkeypatch, looks=1) == [job.comm]


def test_a_search_that_ran_out_of_time_goes_on_in_the_next_samples(newest: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    job, sampler = with_a_communicator_to_come(newest, monkeypatch)
    sampler._signs = (2, 0)
    monkeypatch.setattr("ncclwatch.target.sampler.RESTART_S", -1.0)
    sampler._next_retry = time.monotonic() + 1e9
    monkeypatch.setattr("ncclwatch.target.sampler.SEARCH_S", 60.0)
    assert found_by_samples(sampler, monkeypatch, looks=8) == [job.comm]
