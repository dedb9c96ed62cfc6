"""The active probe over TCP: who answers and who does not, and that a listener is not to be had by strangers."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ncclwatch.cli import probe as command
from ncclwatch.errors import NcclwatchError, UsageError
from ncclwatch.nic.rdma import Gid, RdmaPort
from ncclwatch.pathprobe.channel import MAX_MESSAGE, PROTOCOL, Channel
from ncclwatch.pathprobe.listener import MAX_CALLERS, Listener, check_token
from ncclwatch.pathprobe.outcome import Answer, Outcome
from ncclwatch.pathprobe.rdma import device_of
from ncclwatch.pathprobe.tcp import probe_tcp
from ncclwatch.pathprobe.token import TOKEN_VARIABLE, read_token
from ncclwatch.pathprobe.verbs import Address, VerbsError, pick_gid

TOKEN = b"sixteen bytes it is"
HERE = "127.0.0.1"


@contextmanager
def listening(token: bytes = TOKEN) -> Iterator[tuple[Listener, list[str]]]:
    said: list[str] = []
    with Listener(HERE, 0, token, said=said.append) as listener:
        yield listener, said


def end(connection: socket.socket) -> None:
    """Say no more, and wait until the other side has nothing to say either."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        while connection.recv(4096):
            pass


def wait_for(said: list[str], count: int = 1) -> None:
    deadline = time.monotonic() + 120
    while len(said) < count and time.monotonic() < deadline:
        time.sleep(0.01)


def test_round_trips_with_a_listener() -> None:
    with listening() as (listener, said):
        outcome = probe_tcp(HERE, listener.port, token=TOKEN, count=7)
        wait_for(said)
    assert outcome.answer is Answer.OK
    assert (outcome.sent, outcome.answered, len(outcome.round_trips)) == (7, 7, 7)
    assert outcome.median is not None and 0 < outcome.median < 3
    assert outcome.answer.path_is_alive is True
    assert said == ["127.0.0.1: 7 pings"]


def test_nobody_listens() -> None:
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    outcome = probe_tcp(HERE, port)
    assert outcome.answer is Answer.REFUSED
    assert outcome.answer.path_is_alive is True
    assert "nobody listens" in outcome.detail


def test_a_silent_application_is_told_from_a_dead_path() -> None:
    """The kernel takes the connection; the process never says a word."""
    with socket.create_server((HERE, 0)) as silent:
        outcome = probe_tcp(HERE, silent.getsockname()[1], timeout_s=0.3)
    assert outcome.answer is Answer.SILENT
    assert outcome.answer.path_is_alive is True


@pytest.mark.parametrize(
    ("code", "answer"),
    [
        (errno.ENETUNREACH, Answer.NO_ROUTE),
        (errno.EHOSTUNREACH, Answer.NO_ROUTE),
        (errno.ETIMEDOUT, Answer.TIMEOUT),
        (errno.ECONNREFUSED, Answer.REFUSED),
        (errno.ENETDOWN, Answer.NO_ROUTE),
        (errno.EACCES, Answer.UNAVAILABLE),
    ],
)
def test_what_the_kernel_says_of_a_connection(monkeypatch: pytest.MonkeyPatch, code: int, answer: Answer) -> None:
    class Connection(socket.socket):
        def connect(self, _address: object) -> None:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(socket, "socket", Connection)
    outcome = probe_tcp(HERE, 9, timeout_s=0.3)
    assert outcome.answer is answer
    assert outcome.answer.path_is_alive is {Answer.REFUSED: True, Answer.UNAVAILABLE: None}.get(answer, False)


def test_another_protocol_is_not_mistaken_for_ours() -> None:
    with socket.create_server((HERE, 0)) as server:
        thread = threading.Thread(target=lambda: server.accept()[0].sendall(b"SSH-2.0-OpenSSH_9.2\r\n"))
        thread.start()
        outcome = probe_tcp(HERE, server.getsockname()[1], timeout_s=2)
        thread.join()
    assert outcome.answer is Answer.BROKEN
    assert "does not speak" in outcome.detail


@pytest.mark.parametrize(("ours", "theirs"), [(b"another token, as long", TOKEN), (b"", TOKEN), (TOKEN, b"")])
def test_a_caller_with_another_token_gets_nothing(ours: bytes, theirs: bytes) -> None:
    with listening(theirs) as (listener, said):
        outcome = probe_tcp(HERE, listener.port, token=ours)
        wait_for(said)
    assert outcome.answer is Answer.UNAUTHORISED
    assert said == ["127.0.0.1: refused, it does not know the token"]


def test_a_listener_that_does_not_know_the_token_is_found_out() -> None:
    """It accepts whoever calls; the caller does not."""

    def pretend(server: socket.socket) -> None:
        connection, _ = server.accept()
        channel = Channel(connection, time.monotonic() + 60)
        channel.send({"protocol": PROTOCOL, "nonce": "00" * 32})
        channel.receive()
        channel.send({"mac": "00" * 32})

    with socket.create_server((HERE, 0)) as server:
        thread = threading.Thread(target=pretend, args=(server,))
        thread.start()
        outcome = probe_tcp(HERE, server.getsockname()[1], token=TOKEN)
        thread.join()
    assert outcome.answer is Answer.UNAUTHORISED


def test_a_recorded_greeting_opens_nothing() -> None:
    """What was heard of one call does not let anybody in a second time: the listener's nonce is another."""
    with listening() as (listener, said):
        with socket.create_connection((HERE, listener.port)) as connection:
            channel = Channel(connection, time.monotonic() + 60)
            channel.receive()
            channel.send({"nonce": "11" * 32, "mac": "22" * 32})
            assert channel.receive() == {"error": "token"}
        wait_for(said)
        assert "does not know the token" in said[0]


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        struct.pack(">I", MAX_MESSAGE + 1) + b"x" * 10,
        struct.pack(">I", 0),
        struct.pack(">I", 5) + b"\xff\xfe{}!",
        struct.pack(">I", 2) + b"[]",
        struct.pack(">I", 4000) + b"[" * 4000,
        struct.pack(">I", 30) + b'{"nonce": 17, "mac": [1, 2]}  ',
    ],
)
def test_a_listener_survives_garbage(garbage: bytes) -> None:
    with listening() as (listener, said):
        with socket.create_connection((HERE, listener.port)) as connection:
            connection.sendall(garbage)
            end(connection)
        wait_for(said)
        assert "internal error" not in said[0]
        assert probe_tcp(HERE, listener.port, token=TOKEN, count=1).answer is Answer.OK


def test_strange_requests_of_a_caller_that_knows_the_token() -> None:
    from ncclwatch.pathprobe.channel import greet

    for message in ({"op": "rdma"}, {"op": "rdma", "address": {"qp": "x"}}, {"op": "ping", "n": 1 << 70}, {"op": "?"}, {}):
        with listening() as (listener, said), socket.create_connection((HERE, listener.port)) as connection:
            channel = Channel(connection, time.monotonic() + 60)
            greet(channel, TOKEN)
            channel.send(message)
            if message.get("op") == "rdma":
                assert "address" in channel.receive()["error"]
            end(connection)
            assert not any("internal" in text for text in said)


def test_idle_callers_do_not_lock_others_out_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncclwatch.pathprobe.listener.GREETING_S", 0.3)
    with listening() as (listener, said):
        idle = [socket.create_connection((HERE, listener.port)) for _ in range(MAX_CALLERS)]
        wait_for(said, MAX_CALLERS)
        assert probe_tcp(HERE, listener.port, token=TOKEN, count=1).answer is Answer.OK
        for connection in idle:
            connection.close()


def test_nobody_listens_beyond_this_host_without_a_token() -> None:
    for address in ("0.0.0.0", "::", "10.0.0.1", "node1"):  # noqa: S104
        with pytest.raises(UsageError, match="needs a token"):
            check_token(address, b"")
        check_token(address, TOKEN)
    for address in ("127.0.0.1", "::1"):
        check_token(address, b"")
    with pytest.raises(UsageError, match="can be guessed"):
        check_token("127.0.0.1", b"short")


def test_a_name_that_does_not_resolve_is_an_error_of_the_user() -> None:
    with pytest.raises(NcclwatchError, match="cannot resolve"):
        probe_tcp("no such name", 1)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("node1", ("node1", command.DEFAULT_PORT)),
        ("node1:99", ("node1", 99)),
        ("[fe80::1]:99", ("fe80::1", 99)),
        ("fe80::1", ("fe80::1", command.DEFAULT_PORT)),
    ],
)
def test_hosts_and_ports(text: str, expected: tuple[str, int]) -> None:
    assert command.host_and_port(text) == expected


@pytest.mark.parametrize("text", ["", ":5", "node1:x", "node1:0", "node1:70000", "[::1]:-1"])
def test_what_is_no_host_and_port(text: str) -> None:
    with pytest.raises(UsageError):
        command.host_and_port(text)


def test_a_token_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(TOKEN + b"\n")
    file.chmod(0o644)
    with pytest.raises(UsageError, match="others may read"):
        read_token(file)
    file.chmod(0o600)
    assert read_token(file) == TOKEN
    file.write_bytes(b"\n")
    with pytest.raises(UsageError, match="no token"):
        read_token(file)
    with pytest.raises(UsageError, match="cannot read"):
        read_token(tmp_path / "none")


def test_every_outcome_has_words_and_a_status() -> None:
    for answer in Answer:
        for kind in ("tcp", "rdma"):
            outcome = Outcome(kind, answer, "detail", "mlx5_0:1", 2, 1, (0.001,))
            verdict, _ = command.in_words(outcome, "node1")
            assert "node1" in verdict
            assert ("alive" in verdict) == (answer.path_is_alive is True)
            assert ("dead" in verdict) == (answer.path_is_alive is False)
            assert int(command.status_of(outcome)) == {True: 3, False: 10, None: 3}[answer.path_is_alive] * (answer != "ok")
    assert "1.000" in command.trips(Outcome("tcp", Answer.OK, "", round_trips=(0.001,)))


def test_the_command_from_both_ends(tmp_path: Path) -> None:
    environment = {**os.environ, TOKEN_VARIABLE: TOKEN.decode()}
    base = [sys.executable, "-m", "ncclwatch", "probe", "--json"]
    with socket.create_server((HERE, 0)) as free:
        port = free.getsockname()[1]
    server = subprocess.Popen([*base, "--listen", f"{HERE}:{port}"], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert server.stdout is not None
        assert json.loads(server.stdout.readline())["type"] == "listening"
        run = subprocess.run([*base, f"{HERE}:{port}"], capture_output=True, text=True, env=environment, timeout=120, check=False)
        answer = json.loads(run.stdout)
        assert (run.returncode, answer["answer"], answer["path_is_alive"]) == (0, "ok", True)
        stranger = subprocess.run([*base, f"{HERE}:{port}"], capture_output=True, text=True, timeout=120, check=False)
        assert (stranger.returncode, json.loads(stranger.stdout)["answer"]) == (3, "unauthorised")
    finally:
        server.terminate()
        server.communicate(timeout=120)
    assert server.returncode == 0


def port_of(device: str, gids: tuple[Gid, ...], state: str = "active") -> RdmaPort:
    return RdmaPort(device, 1, "Ethernet", state, "link-up", 100.0, "", None, gids, {}, {})


LOCAL = "fe80:0000:0000:0000:0200:00ff:fe00:7701"
MAPPED = "0000:0000:0000:0000:0000:ffff:0a4d:0001"


def test_the_gid_of_choice_is_rocev2_over_ipv4() -> None:
    gids = (
        Gid(0, LOCAL, "IB/RoCE v1", "e"),
        Gid(1, LOCAL, "RoCE v2", "e"),
        Gid(2, MAPPED, "IB/RoCE v1", "e"),
        Gid(3, MAPPED, "RoCE v2", "e"),
    )
    port = port_of("rx0", gids)
    assert pick_gid(port) == (3, MAPPED)
    assert pick_gid(port_of("rx0", gids[:2])) == (1, LOCAL)
    assert pick_gid(port_of("rx0", gids[:1])) == (0, LOCAL)
    assert pick_gid(port, 2) == (2, MAPPED)
    with pytest.raises(VerbsError, match="no GID 9"):
        pick_gid(port, 9)
    with pytest.raises(VerbsError, match="no GID"):
        pick_gid(port_of("rx0", ()))


def test_the_listener_takes_the_device_that_has_the_address_it_was_called_at() -> None:
    one, two = port_of("rx0", (Gid(0, LOCAL, "RoCE v2", ""),)), port_of("rx1", (Gid(1, MAPPED, "RoCE v2", ""),))
    assert device_of("10.77.0.1", [one, two]) == ("rx1", 1)
    assert device_of("127.0.0.1", [one]) == ("rx0", 1)
    assert device_of("127.0.0.1", [one, port_of("rx1", (), "down")]) == ("rx0", 1)
    with pytest.raises(VerbsError, match="rx0:1, rx1:1"):
        device_of("127.0.0.1", [one, two])
    with pytest.raises(VerbsError, match="none is active"):
        device_of("not an address", [])


@pytest.mark.parametrize(
    "data", [None, {}, [], {"qp": 1 << 24, "psn": 0, "gid": MAPPED, "lid": 0}, {"qp": 1, "psn": 0, "gid": "x", "lid": 0},
             {"qp": 1, "psn": -1, "gid": MAPPED, "lid": 0}, {"qp": float("inf"), "psn": 1, "gid": MAPPED, "lid": 0}],
)  # fmt: skip
def test_an_address_from_the_other_side_is_not_believed(data: object) -> None:
    with pytest.raises(VerbsError):
        Address.from_json(data)


def test_an_address_goes_there_and_back() -> None:
    address = Address(17, 3, MAPPED, 0)
    assert Address.from_json(json.loads(json.dumps(address.to_json()))) == address
