"""Asking a RAS service: the protocol of several releases, services that do not speak, and a job by its two answers."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ncclwatch.cli.ras import judge_ras, verdicts_of
from ncclwatch.errors import ExitStatus, NcclwatchError, TargetError, UsageError
from ncclwatch.ingest import ras_client
from ncclwatch.ingest.ras_client import KNOWN_CRASHES, PORT, Address, ask, parse_address
from ncclwatch.ingest.ras_live import look
from ncclwatch.model.verdict import VerdictClass

FIXTURES = Path(__file__).parents[2] / "fixtures" / "nccl"
Talk = Callable[[socket.socket], None]


@contextmanager
def service(*talks: Talk) -> Iterator[Address]:
    """A server whose connections are talked to in turn, each by one function; one that does nothing is a stopped process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        held: list[socket.socket] = []

        def serve() -> None:
            for talk in talks:
                connection, _ = server.accept()
                held.append(connection)
                talk(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield Address(*server.getsockname()[:2])
        finally:
            for connection in held:
                connection.close()


def speaks(answer: bytes, *, json: bool, heard: list[str] | None = None) -> Talk:
    """As ``rasClientEventLoop`` does."""

    def talk(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as lines:
            for raw in lines:
                line = raw.decode().strip()
                if heard is not None:
                    heard.append(line)
                if line.startswith("CLIENT PROTOCOL"):
                    connection.sendall(b"SERVER PROTOCOL 2\n")
                elif line.startswith("TIMEOUT") or (line == "SET FORMAT json" and json):
                    connection.sendall(b"OK\n")
                elif line.endswith("STATUS"):
                    connection.sendall(answer)
                    return
                else:
                    connection.sendall(b"ERROR: Unknown command " + raw)

    return talk


def silent(connection: socket.socket) -> None:
    """A process that is stopped: the kernel takes the connection for it."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras_client, "GREETING_S", 0.2)
    monkeypatch.setattr(ras_client, "EXTRA_S", 0.3)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("node7", ("node7", PORT)),
        ("node7:1234", ("node7", 1234)),
        ("[::1]:99", ("::1", 99)),
        ("::1", ("::1", PORT)),
        ("10.0.0.1:28028", ("10.0.0.1", 28028)),
    ],
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", ":1", "node:", "node:x", "node:0", "node:65536", "node:99999999999", "node:²"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="HOST:PORT"):
        parse_address(text)


def test_json_is_asked_for_where_it_can_be_given() -> None:
    heard: list[str] = []
    with service(speaks(b"{}", json=True, heard=heard)) as address:
        assert ask(address) == b"{}"
    assert heard == ["CLIENT PROTOCOL 2", "TIMEOUT 5", "SET FORMAT json", "STATUS"]


def test_older_releases_give_text_with_all_details() -> None:
    heard: list[str] = []
    with service(speaks(b"NCCL version", json=False, heard=heard)) as address:
        assert ask(address) == b"NCCL version"
    assert heard[-1] == "VERBOSE STATUS"


def test_json_alone_is_not_there_before_2_28_7() -> None:
    with service(speaks(b"", json=False)) as address, pytest.raises(TargetError, match=r"2\.28\.7"):
        ask(address, as_json=True)


def test_a_stopped_process_that_gets_the_connection_is_passed_over() -> None:
    with service(silent, silent, speaks(b"{}", json=True)) as address:
        assert ask(address) == b"{}"


def test_who_never_speaks_is_given_up() -> None:
    with service(*[silent] * ras_client.TRIES) as address, pytest.raises(TargetError, match="does not answer"):
        ask(address)


def test_another_service_is_told_apart() -> None:
    with (
        service(lambda connection: connection.sendall(b"220 smtp\r\n")) as address,
        pytest.raises(TargetError, match="no RAS service"),
    ):
        ask(address)


def test_nobody_listens() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = Address(*probe.getsockname())
    with pytest.raises(TargetError, match="NCCL_RAS_ENABLE"):
        ask(address)


def test_an_answer_without_end_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ras_client, "MAX_ANSWER_BYTES", 1 << 16)
    with service(speaks(b"x" * (1 << 20), json=True)) as address, pytest.raises(TargetError, match="larger than"):
        ask(address)


def test_an_answer_that_stops_is_given_up() -> None:
    def stops(connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            for answer in (b"SERVER PROTOCOL 2\n", b"OK\n", b"OK\n", b"{"):
                lines.readline()
                connection.sendall(answer)

    with service(stops) as address, pytest.raises(TargetError, match="does not answer"):
        ask(address, leg_timeout_s=0)


# --- a job by its answers --------------------------------------------------------------------------------------------


class Clock:
    """Time that passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_two_answers_tell_whether_the_job_moves() -> None:
    stuck = (FIXTURES / "2.29.2-stuck.json").read_bytes()
    moved = stuck.replace(b'"AllReduce": 21', b'"AllReduce": 22')
    said = {}
    for name, second in (("stands", stuck), ("moves", moved)):
        clock, answers = Clock(), [second, stuck]

        def asked(_address: Address, answers: list[bytes] = answers) -> bytes:
            return answers.pop()

        [job] = look(Address("node", 1), 5.0, asked=asked, clock=clock, sleep=clock.sleep)
        assert [batch.time_ns for batch in job.batches] == [0, 5 * 10**9]
        said[name] = verdicts_of(job)[0].verdict_class
    assert said == {"stands": VerdictClass.NOT_ENTERED, "moves": VerdictClass.RUNNING}


def test_known_crashes_are_printed_before_anything_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        host, port = probe.getsockname()
    with pytest.raises(NcclwatchError):
        judge_ras(f"{host}:{port}", wait=0.0, as_json=False, exit_code=False, why=False)
    said = capsys.readouterr().err
    assert all(one in said for one in KNOWN_CRASHES) and all(f"nccl#{number}" in said for number in (1669, 1718, 1762, 2346))


def test_exit_status_tells_of_an_accusation(capsys: pytest.CaptureFixture[str]) -> None:
    stuck = (FIXTURES / "2.29.2-stuck.json").read_bytes()
    with service(speaks(stuck, json=True), speaks(stuck, json=True)) as address:
        status = judge_ras(f"{address.host}:{address.port}", wait=0.1, as_json=False, exit_code=True, why=False)
    assert status == ExitStatus.VERDICT
    assert "rank 1" in capsys.readouterr().out
