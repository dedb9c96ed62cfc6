"""Runs of perftest (ib_write_bw and its kin) between the two ports, as loads of known size."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from vm.fabric import Fabric


@dataclass(frozen=True, slots=True)
class PerftestResult:
    """What perftest itself printed: message size in bytes, number of iterations, average bandwidth in bytes a second."""

    size: int
    iterations: int
    average: float


_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s*$", re.MULTILINE)


def run_perftest(
    program: str,
    fabric: Fabric,
    *,
    iterations: int,
    size: int,
    options: tuple[str, ...] = (),
    timeout: float = 60,
    before_client: Callable[[int], None] | None = None,
    port: int = 18515,
) -> PerftestResult:
    """Run server on port ``b`` and client on port ``a`` and return what the client printed.

    ``before_client`` gets the server's pid once it waits for a client. Raises RuntimeError with perftest's own output on failure.
    """
    common = ["-n", str(iterations), "-s", str(size), "-p", str(port), "-F", *options]
    server_command = [program, "-d", fabric.b.device, "-x", str(fabric.b.gid_index), *common]
    client_command = [program, "-d", fabric.a.device, "-x", str(fabric.a.gid_index), *common, fabric.b.address]
    server = subprocess.Popen(server_command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        _wait_listening(port, timeout=20)
        if before_client is not None:
            before_client(server.pid)
        client = subprocess.run(client_command, capture_output=True, text=True, timeout=timeout, check=False)
        output = client.stdout + client.stderr
        server_output, _ = server.communicate(timeout=10)
    finally:
        if server.poll() is None:
            server.kill()
            server.communicate()
    row = _ROW.search(output)
    if client.returncode != 0 or row is None:
        raise RuntimeError(f"{program}: status {client.returncode}\nclient:\n{output}\nserver:\n{server_output}")
    return PerftestResult(int(row[1]), int(row[2]), float(row[4]) * 2**20)


def _wait_listening(port: int, timeout: float) -> None:
    """Wait until somebody listens on a TCP port of this namespace (``/proc/net/tcp*``, state 0A)."""
    wanted = f":{port:04X} "
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for table in ("/proc/net/tcp", "/proc/net/tcp6"):
            with open(table) as file:  # noqa: PTH123 - a table of the kernel
                if any(line.split()[1].endswith(wanted.strip()) and line.split()[3] == "0A" for line in file.readlines()[1:]):
                    return
        time.sleep(0.05)
    raise TimeoutError(f"nobody listens on TCP port {port}")
