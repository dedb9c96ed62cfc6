"""The counter shim as NCCL's profiler plugin: exact counts, unfinished steps, and nothing that could harm the job."""

from __future__ import annotations

import os
import signal
import stat
import time
from pathlib import Path

import numpy as np
import pytest

from ncclwatch.collect.device import decode
from ncclwatch.errors import TargetError
from ncclwatch.model import frame_layout as layout
from ncclwatch.model.device import KernelState
from ncclwatch.target.frame import FrameFile, FrameImage
from unit.shim_harness import CAN_BUILD, FakeNccl, build_shim

pytestmark = pytest.mark.skipif(not CAN_BUILD, reason="needs gcc and make")


def test_known_work_is_counted_exactly() -> None:
    with FakeNccl() as nccl:
        nccl.do("c = plugin.init(0xabc, rank=3, nranks=8, name=b'tensor')")
        nccl.do("[plugin.whole(c, n) for n in range(23)] and None")
        assert nccl.do("plugin.mask") == 2 | 4 | 8 | 16 | 64
        device = nccl.device()
        (own,) = device.communicators
        assert (own.hash, own.rank, own.nranks, own.name) == (0xABC, 3, 8, "tensor")
        assert (own.operations, own.collectives, own.transfers) == (23, 23, 0)
        assert [(c.started, c.finished, c.operation) for c in own.channels] == [(23, 23, 23), (23, 23, 23)]
        last = own.recent[-1]
        assert (last.function, last.sequence, last.count, last.state) == ("AllReduce", 22, 1024, KernelState.FINISHED)
        assert last.duration_ns == 1_000_001, "from the earliest begin to the latest end, by the GPU's clock"
        assert last.peer is None, "an AllReduce has no root"
        header = nccl.header()
        assert (header["proxy_begun"], header["proxy_finished"]) == (46, 46)
        assert (header["steps_begun"], header["steps_finished"]) == (184, 184)
        # Two threads never met: nothing was left out.
        assert (header["unmatched"], header["contended"], device.torn, device.transfers) == (0, 0, 0, ())


def test_unfinished_work_shows_what_it_waits_for() -> None:
    with FakeNccl() as nccl:
        nccl.do("c = plugin.init(1)")
        nccl.do("plugin.whole(c, 0)")
        nccl.do("plugin.whole(c, 1, finish=False)")
        device = nccl.device()
        first, second = device.communicators[0].recent
        assert (first.state, second.state) == (KernelState.FINISHED, KernelState.RUNNING)
        receive, send = sorted(device.transfers, key=lambda transfer: transfer.is_send)
        assert (receive.operation, receive.steps_begun, receive.steps_finished, receive.nsteps) == (2, 4, 0, 4)
        assert [(w.step, w.state) for w in receive.waits] == [(n, "nothing has arrived") for n in range(4)]
        assert {w.state for w in send.waits} == {"handed to the network, not completed"}
        assert send.owner_pid == nccl.pid
        nccl.do("plugin.coll(c, 2)")
        assert nccl.device().communicators[0].recent[-1].state is KernelState.NOT_STARTED


def test_a_kernel_that_is_never_reported_is_not_said_to_hang() -> None:
    """Copy-engine collectives, say: their operations are launched, and no kernel of theirs is ever told of."""
    with FakeNccl() as nccl:
        nccl.do("c = plugin.init(1)")
        nccl.do("plugin.coll(c, 0)")
        assert nccl.device().communicators[0].recent[0].state is KernelState.UNOBSERVED, "nothing was ever reported"
        nccl.do("plugin.whole(c, 1)")
        nccl.do("plugin.coll(c, 2)")
        states = [operation.state for operation in nccl.device().communicators[0].recent]
        assert states == [KernelState.UNOBSERVED, KernelState.FINISHED, KernelState.NOT_STARTED], "a later one ran before it"


def test_the_frame_holds_what_fits_and_counts_the_rest() -> None:
    with FakeNccl() as nccl:
        nccl.do("cs = [plugin.init(n + 1) for n in range(70)]")
        assert nccl.header()["refused_communicators"] == 6
        nccl.do("[plugin.whole(c, 0) for c in cs] and None")
        assert len(nccl.device().communicators) == layout.FRAME_COMMUNICATORS
        nccl.do("o = plugin.coll(cs[0])")
        nccl.do("ps = [plugin.proxy(cs[0], o) for _ in range(1100)]")
        assert nccl.header()["refused_operations"] == 1100 - layout.FRAME_PROXY_OPERATIONS
        assert nccl.do("all(ps)"), "a missing handle would make NCCL leave out what belongs to it"
        nccl.do("[plugin.step(cs[0], p, 0) for p in ps] and None")
        nccl.do("[plugin.stop(p) for p in ps] and None")
        assert nccl.device().transfers == ()
        # Room again, for communicators once others have ended.
        nccl.do("[plugin.finalize(c) for c in cs] and None")
        nccl.do("d = plugin.init(0x999)")
        nccl.do("plugin.whole(d, 0)")
        live = [c for c in nccl.device().communicators if not c.finished]
        assert [(c.hash, c.operations) for c in live] == [(0x999, 1)]


@pytest.mark.parametrize("seed", range(4))
def test_any_handle_and_any_event_is_survived(seed: int) -> None:
    """Handles of other processes come with PXN; here all are tried, and the shim still counts right afterwards."""
    with FakeNccl() as nccl:
        nccl.do("c = plugin.init(7)")
        assert nccl.do(f"plugin.fuzz(c, 4000, {seed})") > 0
        decode(nccl.frame.read())
        nccl.do("d = plugin.init(8)")
        nccl.do("[plugin.whole(d, n) for n in range(23)] and None")
        own = next(c for c in nccl.device().communicators if c.hash == 8)
        assert own.operations == 23 and own.recent[-1].state is KernelState.FINISHED


def test_threads_at_once_lose_nothing_but_what_is_counted() -> None:
    with FakeNccl() as nccl:
        nccl.do("c = plugin.init(7)")
        assert nccl.do("hammer(plugin, c, 4, 150)") == 600
        header = nccl.header()
        assert (header["proxy_begun"], header["proxy_finished"]) == (1200, 1200)
        (own,) = nccl.device().communicators
        assert 600 - header["contended"] <= own.collectives <= 600
        assert nccl.device().transfers == ()


def test_a_reader_beside_a_writer_sees_no_half_records() -> None:
    with FakeNccl() as nccl:
        nccl.do("c = plugin.init(7)")
        nccl.do("import itertools, threading; written, stop = [], []")
        nccl.do("numbers = itertools.takewhile(lambda n: n < 1500 or not stop, itertools.count())")
        nccl.do("t = threading.Thread(target=lambda: written.extend(plugin.whole(c, n) for n in numbers)); t.start()")
        looks, torn = 0, 0
        while nccl.do("t.is_alive()"):
            device = nccl.device()
            torn += device.torn
            looks += 1
            if looks == 4:
                nccl.do("stop.append(1)")
            for transfer in device.transfers:
                assert transfer.steps_finished <= transfer.steps_begun <= transfer.nsteps == 4
            for own in device.communicators:
                for operation in own.recent:
                    assert operation.finished <= operation.started <= 2
                    assert operation.count == 1024 and operation.function == "AllReduce"
        assert looks > 3
        assert nccl.device().communicators[0].operations == nccl.do("len(written)")


def test_a_forked_child_leaves_the_parents_frame_alone() -> None:
    with FakeNccl() as nccl:
        nccl.do("c = plugin.init(7)")
        nccl.do("plugin.whole(c, 0)")
        before = nccl.header()["events"]
        # With the parent's handles: they are not its own. Then for itself: a frame of its own.
        assert nccl.do("fork_and(lambda: [plugin.whole(c, n) for n in range(50)])") == 0
        assert nccl.do("fork_and(lambda: plugin.whole(plugin.init(9), 0) or frames_open() == 1 or 1 / 0)") == 0
        assert nccl.do("fork_and(lambda: frames_open() == 0 or 1 / 0)") == 0
        assert nccl.header()["events"] == before
        nccl.do("plugin.whole(c, 1)")
        assert [(c.hash, c.operations) for c in nccl.device().communicators] == [(7, 2)]


def test_a_child_is_not_taken_for_its_parent() -> None:
    with FakeNccl() as nccl:
        nccl.do("plugin.init(7)")
        nccl.do("import subprocess; child = subprocess.Popen(['sleep', '60'], close_fds=False)")
        try:
            assert FrameFile.find(int(nccl.do("child.pid"))) is None
        finally:
            nccl.do("child.kill()")


def test_the_segment_cannot_be_cut_short_and_is_its_owners() -> None:
    with FakeNccl() as nccl:
        nccl.do("plugin.init(7)")
        about = os.stat(nccl.frame.path)  # noqa: PTH116
        assert stat.S_IMODE(about.st_mode) == 0o600 and about.st_uid == os.geteuid()
        with open(nccl.frame.path, "r+b") as file, pytest.raises(PermissionError):  # noqa: PTH123
            file.truncate(4096)
        assert nccl.do("frames_open()") == 1


def test_the_frame_is_read_after_the_process_died() -> None:
    with FakeNccl() as nccl:
        nccl.do("c = plugin.init(7)")
        nccl.do("plugin.whole(c, 0, finish=False)")
        assert len(nccl.device().transfers) == 2
        nccl.process.send_signal(signal.SIGKILL)
        nccl.process.wait()
        assert len(nccl.device().transfers) == 2


def test_a_named_frame_stays_for_a_look_afterwards(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    with FakeNccl(env={"NCCLWATCH_FRAME_DIR": str(tmp_path)}) as nccl:
        nccl.do("c = plugin.init(7)")
        nccl.do("plugin.whole(c, 0, finish=False)")
        assert nccl.device().entry == "plugin"
        nccl.process.kill()
        nccl.process.wait()
    (path,) = tmp_path.iterdir()
    assert stat.S_IMODE(path.lstat().st_mode) == 0o600
    with FrameFile.open_path(path) as frame:
        assert len(decode(frame.read()).transfers) == 2
    link = tmp_path / "link.frame"
    link.symlink_to(path)
    with pytest.raises(TargetError):
        FrameFile.open_path(link)


def test_no_frame_is_made_where_a_link_or_anybody_could_lead_it(tmp_path: Path) -> None:
    private, link, shared = tmp_path / "private", tmp_path / "link", tmp_path / "shared"
    private.mkdir(mode=0o700)
    link.symlink_to(private)
    shared.mkdir()
    shared.chmod(0o777)
    for folder in (link, shared, tmp_path / "missing"):
        with FakeNccl(env={"NCCLWATCH_FRAME_DIR": str(folder)}) as nccl:
            nccl.do("c = plugin.init(7)")
            assert nccl.do("plugin.mask") == 0, "NCCL is asked for nothing"
            nccl.do("plugin.whole(c, 0)")
            assert FrameFile.find(nccl.pid) is None
    assert list(private.iterdir()) == list(shared.iterdir()) == []


def test_switched_off_it_does_nothing() -> None:
    with FakeNccl(env={"NCCLWATCH_SHIM": "0"}) as nccl:
        nccl.do("c = plugin.init(7)")
        nccl.do("plugin.whole(c, 0)")
        assert nccl.do("plugin.mask") == 0 and nccl.do("frames_open()") == 0


def test_a_frame_of_another_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    frame = np.zeros((), layout.FRAME_DTYPE)
    frame["header"]["magic"] = layout.FRAME_MAGIC
    frame["header"]["version"] = layout.FRAME_VERSION + 1
    frame["header"]["size"] = layout.FRAME_DTYPE.itemsize
    path = tmp_path / "other.frame"
    path.write_bytes(frame.tobytes())
    with pytest.raises(TargetError, match="restart the job"):
        FrameFile.open_path(path)
    path.write_bytes(b"no frame")
    with pytest.raises(TargetError, match="no probing frame"):
        FrameFile.open_path(path)


@pytest.mark.parametrize("seed", range(8))
def test_a_hostile_frame_breaks_no_reader(seed: int, tmp_path: Path) -> None:
    chance = np.random.default_rng(seed)
    data = chance.integers(0, 256, layout.FRAME_DTYPE.itemsize, dtype=np.uint8)
    if seed % 2:  # sparse: mostly plausible
        data[chance.random(len(data)) < 0.98] = 0
    frame = data.tobytes()
    decode(FrameImage(np.frombuffer(frame, layout.FRAME_DTYPE)[0], 0, time.monotonic_ns()))
    header = np.zeros((), layout.FRAME_HEADER_DTYPE)
    header["magic"], header["version"], header["size"] = layout.FRAME_MAGIC, layout.FRAME_VERSION, len(frame)
    path = tmp_path / "hostile.frame"
    path.write_bytes(header.tobytes() + frame[header.nbytes :])
    with FrameFile.open_path(path) as file:
        assert decode(file.read()).torn > 0
        path.write_bytes(b"short")
        with pytest.raises(TargetError, match="cut short"):
            file.read()


def test_it_needs_nothing_but_libc() -> None:
    """No CUDA, no Python: what the dynamic loader has to find is there on every machine."""
    text = build_shim().read_bytes()
    for name in (b"libcuda.so.1\0libc", b"libcudart", b"libpython"):
        assert name not in text
