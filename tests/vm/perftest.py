"""Runs of perftest (ib_write_bw and its kin) and ibv_rc_pingpong between the two ports, as loads of known size."""

from __future__ import annotations

import itertools
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ncclwatch.wire.plane import WirePlane
from vm.fabric import Fabric, Port
from vm.gate import Gate

_ports = itertools.count(18515, 2)
_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Processes:
    """Both ends while they run: the server is on port ``b``, the client on port ``a``."""

    server: int
    client: int


@dataclass(frozen=True, slots=True)
class PerftestResult:
    """What perftest itself printed: message size in bytes, number of iterations, average bandwidth in bytes a second."""

    size: int
    iterations: int
    average: float
    processes: Processes


def run_perftest(
    program: str,
    fabric: Fabric,
    *,
    iterations: int,
    size: int,
    options: tuple[str, ...] = (),
    held: Callable[[Processes], None] | None = None,
    while_running: Callable[[], None] = lambda: None,
) -> PerftestResult:
    """One run; ``held`` is called again and again while both processes wait for each other, before anything is posted.
    ``while_running`` is called once, after that.

    The first time, both have their devices open; the last time, all queues exist. Raises RuntimeError with perftest's own output.
    """

    def command(port: Port, tcp_port: int) -> list[str]:
        return [
            *(program, "-d", port.device, "-x", str(port.gid_index), "-p", str(tcp_port)),
            *("-n", str(iterations), "-s", str(size), "-F", *options),
        ]

    output, processes = _run_pair(fabric, command, held, while_running)
    row = _ROW.search(output)
    if row is None:
        raise RuntimeError(f"{program} printed no result:\n{output}")
    return PerftestResult(int(row[1]), int(row[2]), float(row[4]) * 2**20, processes)


def run_pingpong(fabric: Fabric, *, iterations: int, size: int, held: Callable[[Processes], None] | None = None) -> Processes:
    """``ibv_rc_pingpong``: each side sends ``iterations`` messages of ``size`` bytes."""

    def command(port: Port, tcp_port: int) -> list[str]:
        return [
            *("ibv_rc_pingpong", "-d", port.device, "-g", str(port.gid_index), "-p", str(tcp_port)),
            *("-n", str(iterations), "-s", str(size)),
        ]

    _, processes = _run_pair(fabric, command, held)
    return processes


@contextmanager
def endless_writes(
    fabric: Fabric, *, size: int = 65536, options: tuple[str, ...] = ("-Q", "1"), held: Callable[[Processes], None] | None = None
) -> Iterator[Processes]:
    """``ib_write_bw`` from port ``a`` to ``b`` until the end of the block: a load to be disturbed, or somebody else's traffic.

    ``held`` as in :func:`run_perftest`; posting has begun, or is about to, when the block is entered.
    """

    def command(port: Port, tcp_port: int) -> list[str]:
        return [
            *("ib_write_bw", "-d", port.device, "-x", str(port.gid_index), "-p", str(tcp_port)),
            *("-n", "100000000", "-s", str(size), "-F", *options),
        ]

    tcp_port = next(_ports)
    pair: list[subprocess.Popen[str]] = [_start(command(fabric.b, tcp_port))]
    gate: Gate | None = None
    try:
        wait_listening(tcp_port, pair[0], timeout=30)
        gate = Gate(tcp_port + 1, (fabric.b.address, tcp_port), lambda: held(Processes(*_pids(pair))) if held else None)
        pair.append(_start([*command(fabric.a, tcp_port + 1), "127.0.0.1"]))
        yield Processes(*_pids(pair))
    finally:
        for process in pair:
            process.kill()
            process.communicate()
        if gate is not None:
            gate.close()


def wait_for_posts(plane: WirePlane, pid: int, timeout: float = 60) -> None:
    """Wait until a process that the plane follows has posted something."""
    deadline = time.monotonic() + timeout
    while not any(account.pid == pid and account.posted for account in plane.accounts()):
        plane.handle_events()
        if time.monotonic() > deadline:
            raise TimeoutError(f"process {pid} posted nothing for {timeout:g} s")
        time.sleep(0.05)


def _pids(pair: list[subprocess.Popen[str]]) -> list[int]:
    """Of server and client; the client connects as soon as it runs, maybe before Popen has returned its pid here."""
    deadline = time.monotonic() + 10
    while len(pair) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    return [process.pid for process in pair]


def _run_pair(
    fabric: Fabric,
    command: Callable[[Port, int], list[str]],
    held: Callable[[Processes], None] | None,
    while_running: Callable[[], None] = lambda: None,
    timeout: float = 90,
) -> tuple[str, Processes]:
    """Server, gate and client; returns what the client printed."""
    tcp_port = next(_ports)
    server = _start(command(fabric.b, tcp_port))
    client: subprocess.Popen[str] | None = None
    try:
        wait_listening(tcp_port, server, timeout=30)
        started: list[int] = []

        def hold() -> None:
            # The client connects as soon as it runs, maybe before Popen has returned its pid here.
            deadline = time.monotonic() + 10
            while not started and time.monotonic() < deadline:
                time.sleep(0.01)
            if held is not None:
                held(Processes(server.pid, started[0]))

        gate = Gate(tcp_port + 1, (fabric.b.address, tcp_port), hold)
        client = _start([*command(fabric.a, tcp_port + 1), "127.0.0.1"])
        started.append(client.pid)
        while_running()
        output, _ = client.communicate(timeout=timeout)
        server_output, _ = server.communicate(timeout=20)
        gate.close()
        if client.returncode != 0 or server.returncode != 0:
            statuses = f"status {client.returncode} and {server.returncode}"
            raise RuntimeError(f"{command(fabric.a, tcp_port)[0]}: {statuses}\nclient:\n{output}\nserver:\n{server_output}")
        return output, Processes(server.pid, client.pid)
    finally:
        for process in (client, server):
            if process is not None and process.poll() is None:
                process.kill()
                process.communicate()


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_listening(port: int, process: subprocess.Popen[str], timeout: float) -> None:
    """Wait until somebody listens on a TCP port of this namespace (``/proc/net/tcp*``, state 0A)."""
    wanted = f":{port:04X}"
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            if any(row[1].endswith(wanted) and row[3] == "0A" for row in rows):
                return
        if process.poll() is not None:
            raise RuntimeError(f"the server ended with status {process.returncode}: {process.communicate()[0]}")
        time.sleep(0.05)
    raise TimeoutError(f"nobody listens on TCP port {port}")
