"""The active probe over SoftRoCE: zero-payload writes of queue pairs of our own, by ports of our choice; a link that is down."""

from __future__ import annotations

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ncclwatch.cli.probe import DEFAULT_PORT
from ncclwatch.pathprobe import varied_rdma
from ncclwatch.pathprobe.capture import capture
from ncclwatch.pathprobe.listener import Listener
from ncclwatch.pathprobe.outcome import Answer
from ncclwatch.pathprobe.rdma import probe_rdma
from ncclwatch.pathprobe.verbs import QueuePairProbe
from ncclwatch.wire import abi
from testbed.syscalls import calls
from vm.fabric import Fabric

pytestmark = pytest.mark.vm


def test_zero_payload_writes_tell_a_live_path_from_a_dead_one(soft_roce: Fabric) -> None:
    """The ends agree over loopback, so that only what is between the two adapters decides."""
    a, b = soft_roce.a, soft_roce.b
    with Listener("127.0.0.1", 0, device=b.device, gid_index=b.gid_index) as listener:
        alive = probe_rdma("127.0.0.1", listener.port, a.device, gid_index=a.gid_index, count=7, timeout_s=10)
        assert (alive.answer, alive.answered) == (Answer.OK, 7), alive
        assert all(0 < trip < 10 for trip in alive.round_trips)
        try:
            soft_roce.set_down(b)
            dead = probe_rdma("127.0.0.1", listener.port, a.device, gid_index=a.gid_index, timeout_s=20)
        finally:
            soft_roce.set_up()
        # The listener's own port is down and says so, or nobody acknowledges.
        assert dead.answer in (Answer.TIMEOUT, Answer.NO_ROUTE, Answer.UNAVAILABLE), dead
        assert dead.answered == 0
        again = probe_rdma("127.0.0.1", listener.port, a.device, gid_index=a.gid_index, count=2, timeout_s=10)
        assert again.answer is Answer.OK, again


def test_a_path_that_dies_while_it_is_probed(soft_roce: Fabric) -> None:
    """Both ends are connected; then packets are dropped on the way: retries run out, and nobody is said to have answered."""
    a, b = soft_roce.a, soft_roce.b
    with QueuePairProbe(a.device, gid_index=a.gid_index) as near, QueuePairProbe(b.device, gid_index=b.gid_index) as far:
        far.connect(near.address)
        near.connect(far.address)
        status, _ = near.write(10)
        assert status == abi.Status.SUCCESS
        try:
            soft_roce.set_down(b)
            status, elapsed = near.write(20)
        finally:
            soft_roce.set_up()
        assert status in (abi.Status.RETRY_EXC_ERR, None)
        assert elapsed > 0.05


@pytest.mark.timeout(1200)
def test_queue_pairs_of_ours_leave_by_the_source_ports_they_are_given(soft_roce: Fabric) -> None:
    """By capture: one way, and the acknowledgements; the lowest port is the one whose label must not be 0."""
    a, b = soft_roce.a, soft_roce.b
    there, back = 0xC000, 50021
    with QueuePairProbe(a.device, gid_index=a.gid_index) as near, QueuePairProbe(b.device, gid_index=b.gid_index) as far:
        far.connect(near.address, back)
        near.connect(far.address, there)
        ends = (a.address, far.address.qp), (b.address, near.address.qp)
        with ThreadPoolExecutor(1) as pool:
            seen = pool.submit(capture, (a.netdev, b.netdev), ends, 120.0)
            while not seen.done():
                assert near.write(60)[0] == abi.Status.SUCCESS
        assert seen.result() == {ends[0]: {there}, ends[1]: {back}}
    with Listener("127.0.0.1", 0, device=b.device, gid_index=b.gid_index) as listener:
        trips = varied_rdma.probe((a.device, 1), ("127.0.0.1", listener.port), [there, 50001], 3)
    assert {port: len(each) for port, each in trips.items()} == {there: 3, 50001: 3}


OWN = {"socket", "bind", "connect", "setsockopt", "getsockopt", "getsockname", "sendto", "recvfrom", "recvmsg", "sendmsg", "poll"}
"""Sockets of its own: datagrams that die on the way, the listener's TCP, netlink to find the adapter."""


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_whatever_a_probe_of_queues_over_roce_can_do(soft_roce: Fabric, tmp_path: Path) -> None:
    """A call that is not listed here fails: who adds one says here what for."""
    b, secret, output = soft_roce.b, tmp_path / "secret", tmp_path / "probe"
    secret.write_text("sixteen-bytes-it-is")
    secret.chmod(0o600)
    words = ["paths", "probe", b.address, "--udp", "--sources", "50001", "--queues", "1", "--looks", "1", "--json"]
    with Listener(b.address, DEFAULT_PORT, secret.read_bytes(), device=b.device, gid_index=b.gid_index):
        made = calls(
            tmp_path / "trace",
            [*words, "--token-file", str(secret), "-o", str(output)],
            more=",openat,open,ioctl,write",
            most_s=900,
        )
    (probe,) = json.loads(output.read_text())["probes"]
    assert [(one["source_port"], one["probes"]) for one in probe["paths"]] == [(50001, 1)], probe
    listed = OWN | {"openat", "open", "ioctl", "write", "rename"}
    assert {name for name, _ in made} <= listed, {name for name, _ in made} - listed
    # The adapter's device is opened, and its queue pairs are made there; what was seen is written to one file.
    opened = {re.findall(r'"([^"]*)"', line)[0] for name, line in made if name in ("open", "openat") and _WRITES.search(line)}
    devices = {one for one in opened if re.fullmatch(r"/dev/infiniband/uverbs\d+", one)}
    assert devices and {Path(one).name for one in opened - devices} <= {".probe.new", "null"}, opened
    commands = {line for name, line in made if name == "ioctl" and "</dev/infiniband/uverbs" not in line}
    assert all(_HARMLESS.search(line) for line in commands), commands
    places = {re.findall(r"<([^>]*)>", line)[0] for name, line in made if name == "write"}
    assert all(one.startswith(("/dev/infiniband/uverbs", "pipe:", str(tmp_path))) for one in places), places
    assert [name for name, _ in made].count("rename") == 1


_WRITES = re.compile(r"O_WRONLY|O_RDWR|O_CREAT|O_TRUNC")
_HARMLESS = re.compile(r", (TCGETS|FIOCLEX|FIONBIO|SIOCGIFNAME)\b")
"""What Python asks of a file or socket of its own, and the name of a NIC."""
