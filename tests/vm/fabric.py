"""Two SoftRoCE devices in the guest that really talk over a (virtual) cable, so that links can fail and be throttled.

Both ends live in one network namespace, because rdma_rxe of Linux 6.1 only serves the initial one. The kernel would then route
from one to the other through loopback, where neither link state nor traffic control matters; policy routing moves the ``local``
table behind a table that names the outgoing interface ("send to self").

A virtual cable hands a packet over on whichever CPU sends it, so that packets may overtake each other, which RoCE takes for a
loss: each end is received on one CPU alone.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from testbed.job import Job
from vm.guest import GUEST_VARIABLE


@dataclass(frozen=True, slots=True)
class Port:
    """One end: network device, RDMA device, its IPv4 address, and the index of the RoCE v2 GID of that address."""

    netdev: str
    device: str
    address: str
    mac: str

    @property
    def gid_index(self) -> int:
        """The first GID that is RoCE v2 over IPv4 (``::ffff:a.b.c.d``)."""
        suffix = "{:02x}{:02x}:{:02x}{:02x}".format(*map(int, self.address.split(".")))
        gids = Path("/sys/class/infiniband", self.device, "ports/1/gids")
        for path in sorted(gids.iterdir(), key=lambda p: int(p.name)):
            if path.read_text().strip().endswith("ffff:" + suffix):
                return int(path.name)
        raise LookupError(f"{self.device} has no GID for {self.address}")


PORTS = (Port("nwa", "rxa", "10.77.0.1", "02:00:00:00:77:01"), Port("nwb", "rxb", "10.77.0.2", "02:00:00:00:77:02"))


class Fabric:
    """The pair of ports ``a`` and ``b``."""

    def __init__(self, a: Port, b: Port) -> None:
        self.a = a
        self.b = b

    @classmethod
    def create(cls) -> Fabric:
        """Set the pair up; only ever inside the guest."""
        if GUEST_VARIABLE not in os.environ:
            raise RuntimeError("RDMA devices are only made inside the guest")
        a, b = PORTS
        command("modprobe rdma_rxe")
        command("modprobe ib_uverbs")
        command(f"ip link add {a.netdev} address {a.mac} type veth peer name {b.netdev} address {b.mac}")
        for port in PORTS:
            command(f"sysctl -qw net.ipv4.conf.{port.netdev}.accept_local=1 net.ipv4.conf.{port.netdev}.rp_filter=0")
            command(f"ip addr add {port.address}/24 dev {port.netdev}")
            command(f"ip rule add pref 10 iif {port.netdev} lookup local")
            Path("/sys/class/net", port.netdev, "queues/rx-0/rps_cpus").write_text("1\n")
        for near, far in ((a, b), (b, a)):
            cls._join(near, far)
        command("ip rule add pref 20 to 10.77.0.0/24 lookup 77")
        command("ip rule add pref 30 lookup local")
        command("ip rule del pref 0")
        command("sysctl -qw net.ipv4.conf.all.rp_filter=0")
        for port in PORTS:
            command(f"rdma link add {port.device} type rxe netdev {port.netdev}")
        return cls(a, b)

    @staticmethod
    def _join(near: Port, far: Port) -> None:
        """Routes and neighbours from one end to the other; both are lost whenever the link goes down."""
        command(f"ip link set {near.netdev} up")
        command(f"ip neigh replace {far.address} lladdr {far.mac} dev {near.netdev} nud permanent")
        command(f"ip route replace {far.address} dev {near.netdev} src {near.address} table 77")

    def set_down(self, port: Port) -> None:
        """Take one end of the cable down.

        What the other end sends is swallowed from then on. A virtual cable says of a packet for an end that is down that it was
        dropped, SoftRoCE of Linux 6.1 tries again at once, and may do so for ever inside ``ibv_post_send``; the port's way down
        waits for that processor.
        """
        other = self.b if port == self.a else self.a
        command(f"tc qdisc replace dev {other.netdev} root netem loss 100%")
        command(f"ip link set {port.netdev} down")

    def set_up(self) -> None:
        """Bring both ends up again, and let pass what they send."""
        for near, far in ((self.a, self.b), (self.b, self.a)):
            self._join(near, far)
        for port in (self.a, self.b):
            self._undo(port, "netem")

    @staticmethod
    def _undo(port: Port, kind: str) -> None:
        """Take away what is between a port and the cable, if it is of that kind."""
        if f"qdisc {kind} " in command(f"tc qdisc show dev {port.netdev}"):
            command(f"tc qdisc del dev {port.netdev} root")

    def limit(self, port: Port, bytes_per_s: float | None) -> None:
        """Limit what one end sends (token bucket with room for everything: RoCE recovers slowly from a drop)."""
        if bytes_per_s is None:
            command(f"tc qdisc del dev {port.netdev} root")
        else:
            command(f"tc qdisc replace dev {port.netdev} root tbf rate {int(bytes_per_s * 8)}bit burst 64k limit 64m")

    def unlimited(self) -> None:
        """Take every limit away, and bring both ends up."""
        for port in (self.a, self.b):
            self._undo(port, "tbf")
        self.set_up()

    def job(self, nccl: str, ranks: int = 2, *, port_of: Callable[[int], Port] | None = None, **options: Any) -> Job:
        """A job (not started) over NCCL's InfiniBand transport; hosts of even number use port ``a``, others port ``b``, unless
        ``port_of`` says otherwise.

        Further options are those of :class:`testbed.job.Job`.
        """

        def enter(host: int) -> list[str]:
            port = port_of(host) if port_of is not None else (self.a, self.b)[host % 2]
            return ["env", f"NCCL_IB_HCA=={port.device}", f"NCCL_IB_GID_INDEX={port.gid_index}"]

        environment = {"NCCL_NET": "IB", **options.pop("env", {})}
        return Job(nccl, ranks, transport="ib", enter=enter, env=environment, **options)

    def close(self) -> None:
        """Remove the devices and rules."""
        command("ip rule add pref 0 lookup local")
        for preference in ("10", "10", "20", "30"):
            command(f"ip rule del pref {preference}")
        for port in PORTS:
            command(f"rdma link delete {port.device}")
        command(f"ip link del {self.a.netdev}")


class TwoSides:
    """The fabric as hosts that a scenario is played on: one host behind port ``b``, all others behind port ``a``.

    ``rate`` stands for what a healthy link carries: the cable itself is as fast as the emulated machine. Ranks run ``nice``.
    """

    def __init__(self, fabric: Fabric, *, alone: int, rate: float, nice: int = 0) -> None:
        self.rate = rate
        self._nice = nice
        self._fabric = fabric
        self._alone = alone

    def job(self, nccl: str, ranks: int, **options: Any) -> Job:
        """A job (not started) across both ports."""
        return self._fabric.job(nccl, ranks, port_of=self._port_of, wrap=("nice", "-n", str(self._nice)), **options)

    def link(self, host: int) -> Cable:
        """The cable between the ports, which is the link of the host that is alone."""
        if host != self._alone:
            raise ValueError(f"host {host} shares its port with others")
        return Cable(self._fabric)

    def background(self, source: int, destination: int) -> NoReturn:
        """Not here: perftest.endless_writes."""
        raise NotImplementedError(f"traffic of others from host {source} to {destination}")

    def _port_of(self, host: int) -> Port:
        return self._fabric.b if host == self._alone else self._fabric.a


class Cable:
    """The cable between the two ports as a host's link."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    def down(self) -> None:
        """Take the port of the host that is alone down."""
        self._fabric.set_down(self._fabric.b)

    def limit(self, bytes_per_s: float | None) -> None:
        """Limit what either end sends."""
        for port in (self._fabric.a, self._fabric.b):
            self._fabric.limit(port, bytes_per_s)

    def impair(self, *, delay_s: float = 0.0, loss: float = 0.0) -> NoReturn:
        """Not here: RoCE recovers from a loss in seconds."""
        raise NotImplementedError(f"delay {delay_s} s, loss {loss}")


def command(line: str) -> str:
    """Run one command of words without quoting and return what it printed; a failure raises with its message."""
    result = subprocess.run(line.split(), capture_output=True, text=True, timeout=300, check=False)
    if result.returncode != 0:
        raise RuntimeError(f"{line}: status {result.returncode}: {result.stderr.strip() or result.stdout.strip()}")
    return result.stdout
