"""A real nats-server for tests, on a free port with a store of its own; it can be killed and begun again on that store."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PATIENCE_S = 60.0
"""A server is there in a fraction of a second; a machine that is busy with real jobs may need longer."""


def free_port() -> int:
    """A port of loopback that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class NatsServer:
    """One nats-server. ``config``: more of its configuration, beside address and store; ``folder`` keeps all it writes."""

    def __init__(self, folder: Path, config: str = "", scheme: str = "nats") -> None:
        found = shutil.which("nats-server") or "/usr/sbin/nats-server"
        assert Path(found).exists(), "nats-server is not installed (scripts/fleet-packages.txt)"
        self._program, self.folder, self.port = found, folder, free_port()
        folder.mkdir(parents=True, exist_ok=True)
        self.address = f"{scheme}://127.0.0.1:{self.port}"
        self.config = folder / "nats-server.conf"
        self.log = folder / "nats-server.log"
        self.config.write_text(
            f'server_name: "test"\nlisten: "127.0.0.1:{self.port}"\njetstream {{ store_dir: "{folder / "store"}" }}\n{config}\n'
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the process that runs now."""
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Begin, or begin again on the same store and port; returns once it answers."""
        assert self._process is None
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([self._program, "-c", str(self.config)], stdout=log, stderr=log)
        limit = time.monotonic() + PATIENCE_S
        while not self._answers():
            ended = self._process.poll() is not None
            assert not ended and time.monotonic() < limit, f"nats-server does not run:\n{self.log_text()}"
            time.sleep(0.02)

    def kill(self) -> None:
        """SIGKILL: what it had not written is gone."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, and wait."""
        self._end(signal.SIGTERM)

    def log_text(self) -> str:
        """What it has written so far."""
        return self.log.read_text("utf-8", "replace") if self.log.exists() else ""

    def _end(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(PATIENCE_S)
            self._process = None

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1.0) as connection:
                connection.settimeout(1.0)
                return connection.recv(5) == b"INFO "
        except OSError:
            return False


@contextmanager
def running(folder: Path, config: str = "", scheme: str = "nats") -> Iterator[NatsServer]:
    """A server that runs, and is gone afterwards."""
    server = NatsServer(folder, config, scheme)
    try:
        server.start()
        yield server
    finally:
        server.kill()
