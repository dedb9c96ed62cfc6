"""RDMA ports from a sysfs of files, lines of the kernel's log, and TCP_INFO against the installed header."""

from __future__ import annotations

import os
import shutil
import socket
import struct
import subprocess
from pathlib import Path

import pytest

from ncclwatch.nic import kmsg, links, sockets
from ncclwatch.nic.links import IFF_UP, read_devices
from ncclwatch.nic.rdma import port_state, read_port, read_ports


def make_port(sys: Path, device: str, port: int, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = sys / "class/infiniband" / device / "ports" / str(port) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")


ROCE = {
    "state": "4: ACTIVE",
    "phys_state": "5: LinkUp",
    "rate": "200 Gb/sec (4X HDR)",
    "link_layer": "Ethernet",
    "lid": "0x0",
    "gids/0": "fe80:0000:0000:0000:0ac0:ebff:fe00:0001",
    "gids/3": "0000:0000:0000:0000:0000:ffff:0a00:0001",
    "gids/4": "0000:0000:0000:0000:0000:0000:0000:0000",
    "gid_attrs/types/0": "IB/RoCE v1",
    "gid_attrs/types/3": "RoCE v2",
    "gid_attrs/ndevs/0": "ens1f0np0",
    "gid_attrs/ndevs/3": "ens1f0np0",
    "counters/port_xmit_data": "1000",
    "counters/link_downed": "2",
    "hw_counters/out_of_sequence": "5",
    "hw_counters/local_ack_timeout_err": "2",
    "hw_counters/rp_cnp_handled": "11",
    "hw_counters/lifespan": "10",
}


def test_a_roce_port(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_0", 1, ROCE)
    (port,) = read_ports(tmp_path)
    assert (port.name, port.state, port.physical, port.rate_gbps, port.netdev) == (
        "mlx5_0:1",
        "active",
        "link-up",
        200.0,
        "ens1f0np0",
    )
    assert port.is_up
    assert [(gid.index, gid.kind) for gid in port.gids] == [(0, "IB/RoCE v1"), (3, "RoCE v2")]
    assert port.sent_bytes == 4000
    assert port.retries == 7
    assert port.congestion_notifications == 11
    assert "lifespan" not in port.hw_counters


def test_an_infiniband_port_has_no_network_device(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_1", 2, {"state": "1: DOWN", "phys_state": "3: Disabled", "link_layer": "InfiniBand", "lid": "0x1f"})
    port = read_port("mlx5_1", 2, tmp_path)
    assert port is not None
    assert (port.netdev, port.lid, port.is_up, port.physical) == ("", 31, False, "disabled")
    assert port.rate_gbps is None
    assert port.sent_bytes is None
    assert port_state("mlx5_1", 2, tmp_path) == "down"


def test_a_host_without_rdma_has_no_ports(tmp_path: Path) -> None:
    assert read_ports(tmp_path) == []
    assert read_port("mlx5_0", 1, tmp_path) is None
    assert port_state("mlx5_0", 1, tmp_path) == ""


@pytest.mark.parametrize(
    ("text", "kind", "device", "code", "pid"),
    [
        ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, name=python, GPU has fallen off the bus.", "xid", "0000:3b:00", 79, 1234),
        ("NVRM: Xid (PCI:0000:9a:00): 94, pid='<unknown>', name=<unknown>, Contained: SM", "xid", "0000:9a:00", 94, None),
        ("mlx5_core 0000:5e:00.0 ens1f0np0: Link down", "link", "ens1f0np0", None, None),
        ("mlx5_core 0000:5e:00.0: health recovery succeeded", "nic", "0000:5e:00.0", None, None),
        (
            "mlx5_core 0000:5e:00.0: poll_health:801: device's health compromised - reached miss count",
            "nic",
            "0000:5e:00.0",
            None,
            None,
        ),
        ("Out of memory: Killed process 71 (python) total-vm:3717540kB, anon-rss:789356kB, UID:0", "memory", "", None, 71),
        ("Memory cgroup out of memory: Killed process 72 (pt_data_worker) total-vm:145044kB", "memory", "", None, 72),
        ("python[73]: segfault at 8 ip 00007f8040c52ad8 sp 00007f80407f2678 error 4 in libc.so.6[167ad8]", "crash", "", None, 73),
        ("traps: python3.11[74] general protection fault ip:7f sp:7e error:0 in libtorch.so", "crash", "", None, 74),
        ("traps: pt_main_thread[75] trap invalid opcode ip:7f sp:7e error:0 in libtorch.so", "crash", "", None, 75),
        ("pcieport 0000:5d:00.0: AER: Corrected error received: 0000:5e:00.0", "pcie", "0000:5d:00.0", None, None),
    ],
)
def test_lines_that_matter(text: str, kind: str, device: str, code: int | None, pid: int | None) -> None:
    event = kmsg.parse(f"3,1201,5140900,-;{text}\n SUBSYSTEM=pci\n".encode())
    assert event is not None
    assert (event.kind, event.device, event.code, event.pid) == (kind, device, code, pid)
    assert (event.sequence, event.time_ns, event.severity) == (1201, 5140900000, 3)


@pytest.mark.parametrize(
    "text", ["systemd[1]: Started Session 5 of user root.", "mlx5_core 0000:5e:00.0: firmware version: 20.31.1014", ""]
)
def test_lines_that_do_not(text: str) -> None:
    assert kmsg.parse(f"6,1,2,-;{text}\n".encode()) is None
    assert kmsg.parse(text.encode()) is None


def test_a_hostile_line_cannot_steer_a_terminal() -> None:
    event = kmsg.parse(b"3,1,2,-;NVRM: Xid (PCI:0000:3b:00): 13, \x1b[2J\x07 pid=1\n")
    assert event is not None
    assert "\x1b" not in event.text and "\x07" not in event.text


@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")
def test_tcp_info_offsets(tmp_path: Path) -> None:
    members = {
        "unacknowledged": "tcpi_unacked",
        "lost": "tcpi_lost",
        "last_received_ms": "tcpi_last_data_recv",
        "rtt_us": "tcpi_rtt",
        "rtt_variance_us": "tcpi_rttvar",
        "congestion_window": "tcpi_snd_cwnd",
        "retransmits": "tcpi_total_retrans",
        "bytes_acknowledged": "tcpi_bytes_acked",
        "bytes_received": "tcpi_bytes_received",
        "delivery_rate": "tcpi_delivery_rate",
        "receive_window_limited_us": "tcpi_rwnd_limited",
        "bytes_retransmitted": "tcpi_bytes_retrans",
        "window_probes": "tcpi_probes",
        "timeouts": "tcpi_backoff",
        "last_acknowledged_ms": "tcpi_last_ack_recv",
        "min_rtt_us": "tcpi_min_rtt",
        "busy_us": "tcpi_busy_time",
    }
    assert set(members) == set(sockets._INFO)
    lines = "".join(f'printf("%zu\\n", offsetof(struct tcp_info, {member}));' for member in members.values())
    source = tmp_path / "check.c"
    source.write_text(
        f"#include <stddef.h>\n#include <stdio.h>\n#include <linux/tcp.h>\nint main(void) {{ {lines} return 0; }}\n"
    )
    subprocess.run(["gcc", "-o", tmp_path / "check", source], check=True, timeout=120)
    output = subprocess.run([tmp_path / "check"], check=True, capture_output=True, text=True, timeout=120).stdout
    assert {name: sockets._INFO[name][0] for name in members} == dict(zip(members, map(int, output.split()), strict=True))


def test_network_devices_are_what_sysfs_says() -> None:
    shown = {path.name: path for path in Path("/sys/class/net").iterdir() if (path / "ifindex").exists()}
    found = {device.name: device for device in read_devices()}
    assert found.keys() == shown.keys()
    for name, device in found.items():
        assert device.index == int((shown[name] / "ifindex").read_text())
        assert device.mtu == int((shown[name] / "mtu").read_text())
        assert device.operstate == (shown[name] / "operstate").read_text().strip()
        flags = int((shown[name] / "flags").read_text(), 16)
        assert device.up == bool(flags & IFF_UP and (shown[name] / "carrier").read_text().strip() == "1")
        totals = {path.name: int(path.read_text()) for path in (shown[name] / "statistics").iterdir()}
        assert totals.keys() <= device.statistics.keys() | {"rx_compressed", "tx_compressed"}
        # Read one after the other, so that a counter may have gone on.
        assert all(device.statistics[key] <= total for key, total in totals.items() if key in device.statistics)


def test_links_in_a_message_that_is_cut_or_lies_are_left_out() -> None:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as route:
        route.sendto(struct.pack("=IHHIIBxHiII", 32, 18, 0x301, 1, 0, 0, 0, 0, 0, 0), (0, 0))
        data = route.recv(1 << 16)
    whole = list(links._link_messages(data))
    assert whole and all(name for _, name, _ in whole)
    for size in range(len(data)):
        assert list(links._link_messages(data[:size])) == whole[: len(list(links._link_messages(data[:size])))]
    assert list(links._link_messages(b"\xff" * 64)) == []


def test_names_of_sockets_that_are_closed_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every job brings hundreds of connections, each with ports of its own."""
    monkeypatch.setattr(sockets, "SPARE_NAMES", 8)
    with sockets.SocketTable() as table, socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(20):
            pairs = [(socket.create_connection(server.getsockname()), server.accept()[0]) for _ in range(8)]
            table.refresh()
            found = {one.inode for one in table.by_descriptor([os.getpid()])[os.getpid()].values()}
            assert {os.fstat(end.fileno()).st_ino for pair in pairs for end in pair} <= found
            assert len(table._names) <= 2 * len(found) + 8
            for pair in pairs:
                for end in pair:
                    end.close()
