"""Two SoftRoCE ports of the guest behind two leaves that are joined by spines: RoCE over routers that hash, as a fabric does.

rdma_rxe of Linux 6.1 only serves the initial network namespace, so both ports live there ("send to self", ``fabric.py``); leaves
and spines are namespaces (``testbed/spines.py``). Each interface on the way is received on one CPU alone: what overtook another
packet RoCE would take for a loss.
"""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import time
from collections.abc import Collection
from pathlib import Path

from ncclwatch.nic.namespaces import open_socket
from ncclwatch.pathprobe.capture import ETH_P_IP, HEAD_BYTES, QueuePairAt, parse
from testbed.netns import MTU, Namespace
from testbed.spines import HOSTS, LEAVES, Spines
from vm.fabric import Fabric, Port, command

ROOM = "limit 4m"
"""A queue with room for everything: RoCE recovers slowly from a drop."""
TABLE = 79
IP_PACKETS = socket.htons(ETH_P_IP)
_ON_ONE_CPU = "mount -t sysfs none /sys && for one in /sys/class/net/*/queues/rx-*/rps_cpus; do echo 1 >$one; done"


class RoceSpines(Spines):
    """The fabric of namespaces with the guest's two ports as its hosts; ``roce`` is a job's (:class:`vm.fabric.Fabric`).

    Besides a :class:`vm.fabric.Fabric` only, which has put the table of local addresses behind the others."""

    def __init__(self, rate: float) -> None:
        self._ends = [Port(f"rnic{leaf}", f"rsp{leaf}", self.address(leaf), f"02:00:00:00:79:0{leaf}") for leaf in range(LEAVES)]
        super().__init__(rate=rate, room=ROOM)
        self.roce = Fabric(*self._ends)
        for switch in (*self.leaves, *self.spines):
            subprocess.run([*switch.enter, "unshare", "--mount", "sh", "-c", _ON_ONE_CPU], check=True, timeout=30)

    def _hosts(self) -> list[Namespace]:
        return []

    def _host(self, leaf: int) -> None:
        switch, port, other = self.leaves[leaf], self._ends[leaf], self._ends[1 - leaf]
        switch.run(f"ip link add hosts0 mtu {MTU} type veth peer name {port.netdev} address {port.mac} mtu {MTU} netns 1")
        switch.run(f"ip addr add {HOSTS}.{leaf}.1/24 dev hosts0")
        switch.run("ip link set hosts0 up")
        command(f"sysctl -qw net.ipv4.conf.{port.netdev}.accept_local=1 net.ipv4.conf.{port.netdev}.rp_filter=0")
        Path("/sys/class/net", port.netdev, "queues/rx-0/rps_cpus").write_text("1\n")
        command(f"ip addr add {port.address}/24 dev {port.netdev}")
        command(f"ip link set {port.netdev} up")
        way = f"{other.address} via {HOSTS}.{leaf}.1 dev {port.netdev} src {port.address} table {TABLE}"
        for rule in (f"iif {port.netdev} lookup local pref 11", f"to {other.address} lookup {TABLE} pref 21"):
            command(f"ip rule add {rule}")
            self._stack.callback(command, f"ip rule del {rule}")
        command(f"ip route add {way}")
        command(f"rdma link add {port.device} type rxe netdev {port.netdev}")
        self._stack.callback(command, f"rdma link delete {port.device}")

    def seen(self, wanted: Collection[QueuePairAt], seconds: float) -> list[dict[QueuePairAt, set[int]]]:
        """UDP source ports of RoCE's packets at each spine, by sender and queue pair they go to; until all that are wanted were
        seen at one or the other."""
        found: list[dict[QueuePairAt, set[int]]] = [{} for _ in self.spines]
        with contextlib.ExitStack() as stack:
            ends = [
                stack.enter_context(open_socket(Path(spine.network_path), socket.AF_PACKET, socket.SOCK_DGRAM, IP_PACKETS))
                for spine in self.spines
            ]
            until = time.monotonic() + seconds
            while set(wanted) - {place for each in found for place in each} and time.monotonic() < until:
                for end in select.select(ends, [], [], 1.0)[0]:
                    if (packet := parse(end.recv(HEAD_BYTES))) is not None:
                        found[ends.index(end)].setdefault(packet[0], set()).add(packet[1])
        return found
