"""Links, sockets and the kernel's log on this machine: virtual cables we make ourselves, also in another network namespace."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from ncclwatch.nic.kmsg import KernelLog
from ncclwatch.nic.links import LinkMonitor, read_devices
from ncclwatch.nic.sockets import tcp_sockets
from nic.cables import PREFIX, command

pytestmark = [pytest.mark.attach, pytest.mark.skipif(os.geteuid() != 0, reason="making links needs root")]


def test_a_link_that_goes_down_and_up_is_told(cable: tuple[str, str]) -> None:
    with LinkMonitor() as monitor:
        assert monitor.states[cable[0]]
        command(f"ip link set {cable[1]} down")
        changed = collect(monitor, 2)
        # Both ends lose their carrier: the one because it is switched off, the other because nobody is there.
        assert {(name, up) for name, (up, _) in changed.items()} == {(cable[0], False), (cable[1], False)}
        assert changed[cable[1]][1] == "switched off"
        assert changed[cable[0]][1] == "no carrier"
        command(f"ip link set {cable[1]} up")
        assert {name: up for name, (up, _) in collect(monitor, 2).items()} == dict.fromkeys(cable, True)


def collect(monitor: LinkMonitor, count: int) -> dict[str, tuple[bool, str]]:
    """The last event of each of our links, once ``count`` of them were heard of."""
    found: dict[str, tuple[bool, str]] = {}
    deadline = time.monotonic() + 20
    while len(found) < count and time.monotonic() < deadline:
        for event in monitor.events(timeout_s=1):
            if event.name.startswith(PREFIX):
                found[event.name] = (event.up, event.detail)
    return found


def test_devices_are_what_pyroute2_decodes(cable: tuple[str, str], stranger: subprocess.Popen[str]) -> None:
    """Ours decodes the kernel's answer itself, for pyroute2 takes 24 MiB of an agent; what it says must be the same."""
    from pyroute2 import IPRoute

    assert stranger.stdout is not None
    stranger.stdout.readline()
    for namespace in (None, f"/proc/{stranger.pid}/ns/net"):
        found = read_devices(namespace)
        with IPRoute(netns=namespace) if namespace else IPRoute() as route:
            links = {link.get_attr("IFLA_IFNAME"): link for link in route.get_links()}
        assert found and {device.name for device in found} == set(links)
        for device in found:
            link = links[device.name]
            assert (device.index, device.mtu) == (link["index"], link.get_attr("IFLA_MTU"))
            assert device.operstate == link.get_attr("IFLA_OPERSTATE").lower()
            totals = link.get_attr("IFLA_STATS64")
            # Read one after the other: a counter may have gone on.
            assert {name: value for name, value in device.statistics.items() if name in totals}.keys() == totals.keys()
            assert all(device.statistics[name] <= totals[name] for name in totals)


def test_counters_and_state_of_a_device(cable: tuple[str, str]) -> None:
    (device,) = read_devices(wanted=lambda name: name == cable[0])
    assert device.up
    assert device.mtu == 1500
    assert device.statistics["rx_dropped"] == 0


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[str]]:
    """A process in a network namespace of its own, with two connected sockets there."""
    code = """
import socket, subprocess
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
subprocess.run(["ip", "link", "add", "inner0", "type", "dummy"])
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
accepted, _ = server.accept()
client.sendall(b"x" * 70001)
got = 0
while got < 70001:
    got += len(accepted.recv(65536))
print(client.getsockname()[1], server.getsockname()[1], flush=True)
input()
"""
    process = subprocess.Popen(
        ["unshare", "--net", sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_sockets_of_a_process_in_another_network_namespace(stranger: subprocess.Popen[str]) -> None:
    assert stranger.stdout is not None
    client, server = map(int, stranger.stdout.readline().split())
    found = tcp_sockets(stranger.pid)
    assert sorted((entry.local_port, entry.remote_port) for entry in found) == sorted([(client, server), (server, client)])
    sender = next(entry for entry in found if entry.local_port == client)
    receiver = next(entry for entry in found if entry.local_port == server)
    assert receiver.bytes_received == 70001
    assert sender.bytes_acknowledged is not None and sender.bytes_acknowledged >= 70001
    assert sender.retransmits == 0
    assert sender.peer == f"127.0.0.1:{server}"
    assert sender.state == "established"


def test_links_of_another_network_namespace(stranger: subprocess.Popen[str]) -> None:
    assert stranger.stdout is not None
    stranger.stdout.readline()
    namespace = f"/proc/{stranger.pid}/ns/net"
    names = {device.name for device in read_devices(namespace)}
    assert "lo" in names
    assert names != {device.name for device in read_devices()}


def test_own_sockets_are_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            ports = {entry.local_port for entry in tcp_sockets(os.getpid())}
            assert {client.getsockname()[1], server.getsockname()[1]} <= ports


def test_the_kernels_log_can_be_read_to_its_end() -> None:
    with KernelLog() as log:
        log.events()
        assert log.events() == []
