"""Two leaves joined by spines, as network namespaces: a leaf routes to the other by ECMP over the five-tuple, as switches do.

    with Spines() as fabric:
        fabric.route(0, "10.79.1.2", 40000, 50000)      # which spine the kernel takes for that five-tuple (for checks alone)
        fabric.down(0)                                   # spine 0 loses every link

Host H is behind leaf H: one rank each. The queue that fills is that of a leaf's uplink, limited by ``tc``. Needs root.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from typing import Any, Self

from testbed.job import Job
from testbed.netns import MTU, Namespace

HOSTS, UPLINKS = "10.79", "10.80"
LEAVES = 2
FIVE_TUPLE = 0x37
"""``FIB_MULTIPATH_HASH_FIELD_``: both addresses, protocol, both ports (include/net/ip_fib.h). Policy 1, which is meant to hash
the same, takes the hash that a socket of this machine has put on its packet where there is one (``fib_multipath_hash``, net/ipv4/
route.c): a random number for each connection, which no switch sees, and which is drawn anew after a timeout."""


class Spines:
    """The fabric; ``rate`` is that of each uplink, each way, in bytes a second; ``answers``: routers say where packets die;
    ``room``: how long a packet may wait before an uplink, as ``tc`` writes it."""

    def __init__(self, spines: int = 2, *, rate: float = 2_500_000, answers: bool = True, room: str = "latency 60ms") -> None:
        self._stack = contextlib.ExitStack()
        self._answers = answers
        self._room = room
        self.number = spines
        try:
            self.hosts = self._hosts()
            self.leaves = [self._namespace(f"leaf{leaf}", router=True) for leaf in range(LEAVES)]
            self.spines = [self._namespace(f"spine{spine}", router=True) for spine in range(spines)]
            for leaf in range(LEAVES):
                self._host(leaf)
                for spine in range(spines):
                    self._uplink(leaf, spine, rate)
            for leaf in range(LEAVES):
                other = 1 - leaf
                hops = " ".join(f"nexthop via {UPLINKS}.{leaf * 16 + spine}.2" for spine in range(spines))
                self.leaves[leaf].run(f"ip route add {HOSTS}.{other}.0/24 {hops}")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every namespace."""
        self._stack.close()

    def address(self, leaf: int) -> str:
        """Of the host behind a leaf."""
        return f"{HOSTS}.{leaf}.2"

    def _hosts(self) -> list[Namespace]:
        return [self._namespace(f"spinehost{leaf}") for leaf in range(LEAVES)]

    def _namespace(self, name: str, *, router: bool = False) -> Namespace:
        made = Namespace(name)
        self._stack.callback(made.close)
        # A job that begins within a minute of another takes the same two ends again: else a plan's ports are free only where the
        # other end was the one that closed first.
        made.run("sysctl -qw net.ipv4.tcp_tw_reuse=1")
        if router:
            made.run("sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0")
            made.run(f"sysctl -qw net.ipv4.fib_multipath_hash_policy=3 net.ipv4.fib_multipath_hash_fields={FIVE_TUPLE}")
            made.run("sysctl -qw net.ipv4.conf.default.rp_filter=0 net.ipv4.conf.all.ignore_routes_with_linkdown=1")
            # As switches do: the address that a packet came in by says who it was that it died at; and they say so often.
            made.run("sysctl -qw net.ipv4.icmp_errors_use_inbound_ifaddr=1 net.ipv4.icmp_ratelimit=0")
            if not self._answers:
                made.run("ip rule add ipproto icmp blackhole")
        return made

    def _host(self, leaf: int) -> None:
        host, switch = self.hosts[leaf], self.leaves[leaf]
        switch.run(f"ip link add hosts0 mtu {MTU} type veth peer name nic mtu {MTU} netns {host.holder}")
        switch.run(f"ip addr add {HOSTS}.{leaf}.1/24 dev hosts0")
        switch.run("ip link set hosts0 up")
        host.run(f"ip addr add {self.address(leaf)}/24 dev nic")
        host.run("ip link set nic up")
        host.run(f"ip route add default via {HOSTS}.{leaf}.1")

    def _uplink(self, leaf: int, spine: int, rate: float) -> None:
        switch, above, subnet = self.leaves[leaf], self.spines[spine], f"{UPLINKS}.{leaf * 16 + spine}"
        switch.run(f"ip link add up{spine} mtu {MTU} type veth peer name leaf{leaf} mtu {MTU} netns {above.holder}")
        switch.run(f"ip addr add {subnet}.1/30 dev up{spine}")
        above.run(f"ip addr add {subnet}.2/30 dev leaf{leaf}")
        above.run(f"ip link set leaf{leaf} up")
        switch.run(f"ip link set up{spine} up")
        above.run(f"ip route add {HOSTS}.{leaf}.0/24 via {subnet}.1")
        self.limit(leaf, spine, rate)

    def limit(self, leaf: int, spine: int, rate: float) -> None:
        """Let a leaf's uplink to a spine carry so many bytes a second."""
        what = f"tbf rate {int(rate * 8)}bit burst {16 * MTU} {self._room}"
        self.leaves[leaf].run(f"tc qdisc replace dev up{spine} root {what}")

    def route(self, leaf: int, destination: str, port: int, source_port: int, protocol: str = "tcp") -> int:
        """The spine that the kernel of a leaf takes: what a test checks by; the product never asks."""
        said = self.leaves[leaf].run(
            f"ip route get {destination} from {self.address(leaf)} iif hosts0 ipproto {protocol} sport {source_port} dport {port}"
        )
        found = re.search(r"\bdev up(\d+)\b", said)
        assert found, said
        return int(found[1])

    def down(self, spine: int) -> None:
        """Take every link of a spine away."""
        for leaf in range(LEAVES):
            self.spines[spine].run(f"ip link set leaf{leaf} down")

    def swallow(self, spine: int) -> None:
        """Let a spine forward nothing more, with all its links up: leaves send to it as before."""
        self.spines[spine].run("sysctl -qw net.ipv4.ip_forward=0")

    def job(self, *, pins: tuple[str, str | Sequence[str]] | None = None, **options: Any) -> Job:
        """A job of two ranks, one behind each leaf (not started); ``pins`` are the library and its plan, or one for each host."""
        environment = {
            "NCCL_SOCKET_IFNAME": "nic",
            "NCCL_MIN_NCHANNELS": "2",
            "NCCL_MAX_NCHANNELS": "2",
            **options.pop("env", {}),
        }
        library, plan = pins or ("", "")
        if library:
            environment["LD_PRELOAD"] = library

        def enter(host: int) -> list[str]:
            follows = plan if isinstance(plan, str) else plan[host]
            return [*self.hosts[host].enter, *(["env", f"NCCLWATCH_PATH_PINS={follows}"] if library else [])]

        return Job("2.27.5", 2, hosts=(1, 1), env=environment, enter=enter, **options)

    def ports(
        self, leaf: int, destination: str, port: int, candidates: range, protocol: str = "tcp"
    ) -> Iterator[tuple[int, int]]:
        """(spine, source port) of each candidate."""
        for candidate in candidates:
            yield self.route(leaf, destination, port, candidate, protocol), candidate
