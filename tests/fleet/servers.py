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

from ncclwatch.messaging.subjects import MAPPING

PATIENCE_S = 60.0
"""A server is there in a fraction of a second; a machine that is busy with real jobs may need longer."""


def free_port() -> int:
    """A port of loopback that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class NatsServer:
    """One nats-server. ``config``: more of its configuration, beside address and store; ``folder`` keeps all it writes;
    ``mapped``: whether it divides nodes into parts, as ``packaging/nats`` has it done.
    """

    def __init__(self, folder: Path, config: str = "", scheme: str = "nats", *, mapped: bool = True) -> None:
        found = shutil.which("nats-server") or "/usr/sbin/nats-server"
        assert Path(found).exists(), "nats-server is not installed (scripts/fleet-packages.txt)"
        self._program, self.folder, self.port = found, folder, free_port()
        folder.mkdir(parents=True, exist_ok=True)
        self.address = f"{scheme}://127.0.0.1:{self.port}"
        self.config = folder / "nats-server.conf"
        self.log = folder / "nats-server.log"
        mapping = f"mappings {{ {MAPPING} }}" if mapped else ""
        store = f'jetstream {{ store_dir: "{folder / "store"}" }}'
        self.config.write_text(f'server_name: "test"\nlisten: "127.0.0.1:{self.port}"\n{store}\n{mapping}\n{config}\n')
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
def running(folder: Path, config: str = "", scheme: str = "nats", *, mapped: bool = True) -> Iterator[NatsServer]:
    """A server that runs, and is gone afterwards."""
    server = NatsServer(folder, config, scheme, mapped=mapped)
    try:
        server.start()
        yield server
    finally:
        server.kill()


def certificate(folder: Path) -> None:
    """``ca.pem``, ``server.pem`` and ``server.key`` for 127.0.0.1, as docs/bus.md has them made."""
    folder.mkdir(parents=True, exist_ok=True)
    for line in (
        "req -x509 -newkey ed25519 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=ca",
        "req -newkey ed25519 -nodes -keyout server.key -out server.csr -subj /CN=nats",
        "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile names -out server.pem",
    ):
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        subprocess.run(["openssl", *line.split()], cwd=folder, check=True, capture_output=True)


PACKAGED = Path(__file__).parents[2] / "packaging" / "nats" / "nats-server.conf"


class PackagedServer(NatsServer):
    """The server that ``packaging/nats`` describes, with TLS, and tenants in ``folder/tenants``; only its places are ours."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, scheme="tls")
        certificate(folder / "tls")
        text = PACKAGED.read_text()
        for before, now in (
            ('"0.0.0.0:4222"', f'"127.0.0.1:{self.port}"'),
            ("/etc/ncclwatch/nats/", f"{folder / 'tls'}/"),
            ("/var/lib/ncclwatch/nats", str(folder / "store")),
            ('http: "127.0.0.1:8222"', ""),
            ('include "tenants.conf"', 'include "tenants/tenants.conf"'),
            # The disk of a machine for tests may be smaller than what tenants may take together.
            ("max_file_store: 64GB", "max_file_store: 16GB"),
        ):
            assert before in text, before
            text = text.replace(before, now)
        self.config.write_text(text)

    def keys(self, tenant: str) -> Path:
        """The folder of a tenant's keys, as agents and engines are given it."""
        home = self.folder / "tenants" / tenant
        shutil.copy(self.folder / "tls" / "ca.pem", home / "ca.pem")
        return home
