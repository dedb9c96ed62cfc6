"""Hosts of their own for the testbed's jobs, on one machine: network namespaces joined by switches, with links that can fail.

    with Network(hosts=3) as network:
        with network.job("2.27.5", ranks=4, hosts=(2, 1, 1), shape="allreduce") as job:
            network.link(1).limit(2_500_000)         # bytes a second, both ways
            network.link(1).impair(delay_s=0.01)     # and loss=0.02
            network.link(1).down()                   # its cable is pulled
            network.link(1).up()
            with network.background(0, 1):           # somebody else's traffic
                ...

Host H has an interface ``nicRhH`` with address ``10.78.R.(H+1)`` on each rail R; each rail is a bridge in a namespace of its own,
``network.switch``, where addresses end in 254. With ``containers``, hosts also have their own process ids, mounts, ``/proc``,
``/sys`` and ``/dev/shm``, as containers do; otherwise they have their own network and host name only.

Nothing of the machine's own network is touched, and nothing outlives the processes that hold the namespaces: those die with
this process whatever ends it, and the kernel removes the rest.

Needs root, ``ip``, ``tc``, ``nsenter`` and ``unshare``.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from testbed.job import HERE, Job, JobError, die_with_parent, only_child

PREFIX = "10.78"
MTU = 1500
_START_S = 20.0

# Reno, since a kernel may allow other namespaces than the first no more than that and its default, and BBR hardly minds loss.
_HOLDER = """set -e
hostname {name}
ip link set lo up
sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1
sysctl -qw net.ipv4.tcp_congestion_control=reno net.ipv4.conf.all.arp_ignore=1
{mounts}
echo ready
exec sleep infinity
"""
_MOUNTS = """mount -t sysfs none /sys
mount -t tracefs none /sys/kernel/tracing
mount -t bpf none /sys/fs/bpf
mount -t tmpfs none /dev/shm"""


class NetworkError(JobError):
    """A namespace, an interface or a fault could not be made; the text holds what the tool said."""


class Namespace:
    """A set of namespaces, kept by one sleeping process; ``enter`` is the command prefix that runs something in it."""

    def __init__(self, name: str, *, container: bool = False) -> None:
        self.name = name
        self.container = container
        script = _HOLDER.format(name=name, mounts=_MOUNTS if container else "")
        more = ["--pid", "--mount", "--ipc", "--fork", "--kill-child=SIGKILL", "--mount-proc"] if container else []
        self._process = subprocess.Popen(
            ["unshare", "--net", "--uts", *more, "sh", "-c", script],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one prctl, safe after fork
        )
        assert self._process.stdout is not None and self._process.stderr is not None
        if self._process.stdout.readline().strip() != "ready":
            self._process.kill()
            said = self._process.communicate()[1]
            raise NetworkError(f"cannot make namespaces for {name}: {said.strip() or 'no reason given'}")
        self.holder = only_child(self._process.pid) if container else self._process.pid

    @property
    def enter(self) -> list[str]:
        """``nsenter`` with its options; the command to run follows."""
        inner = ["--pid", "--mount", "--ipc"] if self.container else []
        return ["nsenter", "--target", str(self.holder), "--net", "--uts", *inner, f"--wdns={Path.cwd()}", "--"]

    @property
    def network_path(self) -> str:
        """The network namespace, as something that can be opened."""
        return f"/proc/{self.holder}/ns/net"

    def run(self, line: str) -> str:
        """Run one command of words without quoting and return what it printed. Raises NetworkError with its message."""
        return _run([*self.enter, *line.split()])

    def popen(self, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command that dies with this process; options are Popen's."""
        return subprocess.Popen([*self.enter, *command], preexec_fn=die_with_parent, **options)  # noqa: PLW1509

    def close(self) -> None:
        """End the holder, and with it the namespaces, once nobody else is in them."""
        self._process.kill()
        self._process.communicate()


class Host(Namespace):
    """A host of the network; ``index`` is its number."""

    def __init__(self, index: int, *, container: bool) -> None:
        super().__init__(f"host{index}", container=container)
        self.index = index

    def address(self, rail: int = 0) -> str:
        """Its IPv4 address on a rail."""
        return f"{PREFIX}.{rail}.{self.index + 1}"


class Link:
    """The connection of one host to one rail: ``nic`` is its interface in the host, ``port`` its other end at the switch."""

    def __init__(self, switch: Namespace, host: Host, rail: int) -> None:
        self.host = host
        self.rail = rail
        self.nic = f"nic{rail}h{host.index}"
        self.port = f"port{host.index}.{rail}"
        self._bridge = f"rail{rail}"
        self._switch = switch
        self._cable: subprocess.Popen[str] | None = None
        self._limit: float | None = None
        self._down = ""
        switch.run(
            f"ip link add {self.port} mtu {MTU} type veth peer name {self.nic} mtu {MTU} netns {host.holder}",
        )
        switch.run(f"ip link set {self.port} master {self._bridge} up")
        host.run(f"ip addr add {host.address(rail)}/24 dev {self.nic}")
        host.run(f"ip link set {self.nic} up")

    def down(self, where: str = "cable") -> None:
        """Take the link down: ``cable`` takes the carrier away (what a pulled cable or a dead switch port does), ``nic``
        switches the interface itself off.
        """
        self._down = where
        if where == "nic":
            self.host.run(f"ip link set {self.nic} down")
        else:
            self._switch.run(f"ip link set {self.port} down")

    def up(self) -> None:
        """Undo :meth:`down`."""
        if self._down == "nic":
            self.host.run(f"ip link set {self.nic} up")
        elif self._down:
            self._switch.run(f"ip link set {self.port} up")
        self._down = ""

    def limit(self, bytes_per_s: float | None) -> None:
        """Limit the rate both ways (token bucket), or take the limit away.

        A token bucket never lets go of a packet larger than its burst. It cuts those that come, but not one that already waits
        when a larger limit gives way to a smaller: the link would be dead, not slow. So what waits goes with the old limit.
        """
        for where, device in ((self.host, self.nic), (self._switch, self.port)):
            if self._limit is not None and bytes_per_s is not None and bytes_per_s < self._limit:
                where.run(f"tc qdisc del dev {device} root")
            if bytes_per_s is not None:
                burst = max(16 * MTU, int(bytes_per_s * 0.002))
                where.run(
                    f"tc qdisc replace dev {device} root tbf rate {int(bytes_per_s * 8)}bit burst {burst} latency 50ms",
                )
            elif self._limit is not None:
                where.run(f"tc qdisc del dev {device} root")
        self._limit = bytes_per_s

    def impair(self, *, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """Delay every frame by ``delay_s`` each way and lose a share of them (see cable.py), until told otherwise."""
        if self._cable is None:
            if not delay_s and not loss:
                return
            self._insert_cable()
        self._command({"delay_s": delay_s, "loss": loss})

    def frames(self) -> tuple[int, int]:
        """Frames that an impaired link has passed and lost so far, both ways together."""
        if self._cable is None:
            return 0, 0
        counts = self._command({})
        return sum(way["passed"] for way in counts), sum(way["dropped"] for way in counts)

    def clear(self) -> None:
        """No limit, no delay, no loss, up. Frames under way in a slow cable are lost, as TCP can stand."""
        if self._down:
            self.up()
        self.limit(None)
        if self._cable is not None:
            self._switch.run(f"ip link set {self.port} master {self._bridge}")
            self.close()
            self._switch.run(f"ip link del {self._inner}")

    def close(self) -> None:
        """End the cable's process, if there is one."""
        if self._cable is not None:
            self._cable.kill()
            self._cable.communicate()
            self._cable = None

    @property
    def _inner(self) -> str:
        return f"in{self.host.index}.{self.rail}"

    def _insert_cable(self) -> None:
        """Between the port and the bridge; connections in use survive it."""
        far = f"far{self.host.index}.{self.rail}"
        self._switch.run(f"ip link add {self._inner} mtu {MTU} type veth peer name {far} mtu {MTU}")
        self._switch.run(f"ip link set {far} up")
        self._switch.run(f"ip link set {self._inner} up")
        self._cable = self._switch.popen(
            [sys.executable, "-I", str(HERE / "cable.py"), self.port, self._inner],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._cable.stdout is not None
        if self._cable.stdout.readline().strip() != "ready":
            raise NetworkError(f"the cable of {self.host.name} did not start")
        self._switch.run(f"ip link set {self.port} nomaster")
        self._switch.run(f"ip link set {far} master {self._bridge}")

    def _command(self, settings: dict[str, float]) -> list[dict[str, int]]:
        assert self._cable is not None and self._cable.stdin is not None and self._cable.stdout is not None
        self._cable.stdin.write(json.dumps(settings) + "\n")
        self._cable.stdin.flush()
        said = self._cable.stdout.readline()
        if not said:
            raise NetworkError(f"the cable of {self.host.name} ended: nothing goes through its link")
        answer: list[dict[str, int]] = json.loads(said)
        return answer


class Network:
    """Hosts and the rails between them; a context manager. ``rate`` limits every link from the start, in bytes a second."""

    def __init__(self, hosts: int = 2, *, rails: int = 1, containers: bool = False, rate: float | None = None) -> None:
        missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
        if missing:
            raise NetworkError(f"not installed: {', '.join(missing)} (Debian: iproute2, util-linux)")
        self._stack = contextlib.ExitStack()
        self._traffic_port = 18000
        self.rate = math.inf if rate is None else rate
        try:
            self.switch = Namespace("switch")
            self._stack.callback(self.switch.close)
            self.hosts: list[Host] = []
            for index in range(hosts):
                self.hosts.append(Host(index, container=containers))
                self._stack.callback(self.hosts[-1].close)
            self._links: dict[tuple[int, int], Link] = {}
            for rail in range(rails):
                self.switch.run(f"ip link add rail{rail} type bridge stp_state 0 forward_delay 0 mcast_snooping 0")
                self.switch.run(f"ip addr add {PREFIX}.{rail}.254/24 dev rail{rail}")
                self.switch.run(f"ip link set rail{rail} up")
                for host in self.hosts:
                    link = Link(self.switch, host, rail)
                    self._links[host.index, rail] = link
                    self._stack.callback(link.close)
                    if rate is not None:
                        link.limit(rate)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End everything that was started here."""
        self._stack.close()

    def host(self, index: int) -> Host:
        """One host."""
        return self.hosts[index]

    def link(self, host: int, rail: int = 0) -> Link:
        """The link of a host to a rail."""
        return self._links[host, rail]

    def job(self, nccl: str = "2.27.5", ranks: int = 2, *, hosts: Sequence[int] | None = None, **options: Any) -> Job:
        """A job (not started) whose host number H runs on this network's host H; ``hosts`` are ranks on each, evenly if not
        given. Further options are those of :class:`testbed.job.Job`.
        """
        if hosts is None:
            each, rest = divmod(ranks, len(self.hosts))
            hosts = tuple(each + (index < rest) for index in range(len(self.hosts)))
        environment = {"NCCL_SOCKET_IFNAME": "nic", **options.pop("env", {})}
        return Job(nccl, ranks, hosts=hosts, env=environment, enter=self.enter, **options)

    def enter(self, host: int) -> list[str]:
        """What starts a rank's command on a host."""
        return self.hosts[host].enter

    @contextlib.contextmanager
    def background(self, source: int, destination: int, *, rail: int = 0, flows: int = 8, rate: int = 0) -> Iterator[None]:
        """Traffic of others from one host to another meanwhile: ``flows`` connections, each of ``rate`` bytes a second (0: all
        it can get).
        """
        self._traffic_port += 1
        address = self.hosts[destination].address(rail)
        program = [sys.executable, "-I", str(HERE / "traffic.py")]
        ends = (
            (self.hosts[destination], [*program, "sink", address, str(self._traffic_port)]),
            (self.hosts[source], [*program, "source", address, str(self._traffic_port), str(flows), str(rate)]),
        )
        with contextlib.ExitStack() as stack:
            for host, command in ends:
                process = host.popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
                stack.callback(_end, process, host)
                assert process.stdout is not None
                if process.stdout.readline().strip() != "ready":
                    raise NetworkError(f"background traffic did not start on {host.name}")
            yield


def _end(process: subprocess.Popen[str], host: Host) -> None:
    if host.container and process.poll() is None:  # nsenter has forked: end what it started
        with contextlib.suppress(JobError, ProcessLookupError, OSError):
            _run(["kill", "-KILL", str(only_child(process.pid, timeout=1))])
    process.kill()
    process.communicate()


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_START_S, check=False)
    if done.returncode != 0:
        raise NetworkError(f"{' '.join(command)}: status {done.returncode}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def wait_until(what: str, holds: Any, timeout: float = 30.0) -> None:
    """Wait until ``holds()`` is true; raises NetworkError that names ``what``."""
    deadline = time.monotonic() + timeout
    while not holds():
        if time.monotonic() > deadline:
            raise NetworkError(f"not within {timeout:g} s: {what}")
        time.sleep(0.05)
