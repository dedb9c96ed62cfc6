"""Keys of a tenant on a NATS server, and the server's configuration made of them."""

from __future__ import annotations

from pathlib import Path

import nkeys
import pytest

from ncclwatch.errors import UsageError
from ncclwatch.messaging import bus_keys
from ncclwatch.messaging.bus_keys import access, add_user, bus_address, is_bus, make_seed, public_of, read_user, write_tenants
from ncclwatch.messaging.keys import KeyFileError
from ncclwatch.messaging.subjects import MAPPING, token_of

LOCAL = "nats://127.0.0.1:4222"
JWT = (
    "-----BEGIN NATS USER JWT-----\n{}\n------END NATS USER JWT------\n\n"
    "-----BEGIN USER NKEY SEED-----\n{}\n------END USER NKEY SEED------\n"
)


def test_a_seed_is_one_of_nkeys() -> None:
    seed = make_seed()
    pair = nkeys.from_seed(bytearray(seed))
    assert seed.startswith(b"SU") and public_of(seed) == pair.public_key.decode()
    assert pair.verify(b"nonce", pair.sign(b"nonce"))
    assert make_seed() != seed


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("nats://h", "nats://h:4222"),
        ("tls://h:1", "tls://h:1"),
        ("nats://[::1]:5", "nats://[::1]:5"),
        ("tls://[fe80::1]", "tls://[fe80::1]:4222"),
    ],
)
def test_addresses(text: str, full: str) -> None:
    assert (bus_address(text), is_bus(text)) == (full, True)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nats://",
        "nats://h:0",
        "nats://h:99999",
        "nats://u:p@h",
        "nats://h/x",
        "tcp://h:1",
        "nats://h?x=1",
        "h:4222",
        "nats://h:x",
    ],
)
def test_what_is_no_address_is_said(text: str) -> None:
    with pytest.raises(UsageError):
        bus_address(text)


def test_files_are_the_owners_and_never_written_over(tmp_path: Path) -> None:
    secret, public = add_user(tmp_path, "red", "agent", "agent")
    assert secret.stat().st_mode & 0o777 == 0o600
    assert secret.read_text().strip() not in public.read_text()
    with pytest.raises(UsageError, match="exists already"):
        add_user(tmp_path, "red", "agent", "agent")
    found = access(LOCAL, tmp_path / "red", "agent")
    assert found.inbox == f"_INBOX.{read_user(public).public}"
    assert found.seed.decode() not in repr(found)


@pytest.mark.parametrize("name", ["", "a b", "../x", "a.b", "x" * 65, "{", 'a"', "red-nodes"])
def test_names_that_could_be_more_than_names_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        add_user(tmp_path, name, "agent", "agent")
    if name != "red-nodes":
        with pytest.raises(UsageError):
            add_user(tmp_path, "red", name, "agent")


def test_the_configuration_says_what_each_may_say(tmp_path: Path) -> None:
    for role in ("engine", "agent", "viewer"):
        add_user(tmp_path, "red", role, role)
    add_user(tmp_path, "blue", "n7", "agent", job="j", node="node7.example.org")
    file, tenants = write_tenants(tmp_path)
    text = file.read_text()
    users = {name: read_user(tmp_path / "red/known" / f"{name}.pub").public for name in ("engine", "agent", "viewer")}
    lines = {name: next(line for line in text.splitlines() if public in line) for name, public in users.items()}
    assert tenants == 2
    assert "permissions" not in lines["engine"]
    assert '"ncw.batch.*.*"' in lines["agent"] and "ncw.view" not in lines["agent"] and "$JS" not in lines["agent"]
    assert text.count(MAPPING) == 2, "the server of each tenant divides its nodes into parts"
    assert '"ncw.view.*"' in lines["viewer"] and "ncw.batch" not in lines["viewer"]
    assert f'"ncw.batch.j.{token_of("node7.example.org")}"' in text
    assert not any(seed.read_text().strip() in text for seed in tmp_path.glob("*/*.nk"))
    engines = text[text.index("  red: {") : text.index("  red-nodes: {")]
    assert users["engine"] in engines and users["agent"] not in engines, "agents are in an account of their own"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "name a\nrole agent\npublic UX\n",
        "role admin\npublic {}\n",
        'role agent\njob x" ] }} }}\npublic {}\n',
        "role agent\nnode >\npublic {}\n",
        "role agent\npublic {} extra\n",
    ],
)
def test_a_public_half_that_says_more_gets_into_no_configuration(text: str, tmp_path: Path) -> None:
    _, public = add_user(tmp_path, "red", "agent", "agent")
    public.write_text(text.format(read_user(public).public))
    with pytest.raises(KeyFileError):
        write_tenants(tmp_path)


def test_credentials_of_an_operator_take_the_place_of_a_seed(tmp_path: Path) -> None:
    add_user(tmp_path, "red", "agent", "agent")
    seed = (tmp_path / "red/agent.nk").read_text().strip()
    creds = tmp_path / "red/agent.creds"
    creds.write_text(JWT.format("eyJ0.x.y", seed))
    with pytest.raises(KeyFileError, match="read by others"):
        access(LOCAL, tmp_path / "red", "agent")
    creds.chmod(0o600)
    found = access(LOCAL, tmp_path / "red", "agent")
    assert (found.jwt, found.seed) == (b"eyJ0.x.y", seed.encode())
    for damaged in ("", "x" * 100, JWT.format("eyJ0.x.y", "SUABC"), creds.read_text()[:40]):
        creds.write_text(damaged)
        with pytest.raises(KeyFileError):
            access(LOCAL, tmp_path / "red", "agent")


def test_a_damaged_seed_is_said(tmp_path: Path) -> None:
    add_user(tmp_path, "red", "agent", "agent")
    secret = tmp_path / "red/agent.nk"
    for text in ("", "SU" + "A" * 56, "x", secret.read_text()[:30]):
        secret.write_text(text)
        with pytest.raises(KeyFileError):
            access(LOCAL, tmp_path / "red", "agent")


def test_without_the_client_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    from ncclwatch.errors import NcclwatchError
    from ncclwatch.messaging.transports import require_client

    monkeypatch.setitem(sys.modules, "nats", None)
    with pytest.raises(NcclwatchError, match="not installed") as raised:
        require_client()
    assert "ncclwatch[fleet]" in str(raised.value)


def test_the_schemes_an_agent_tells_by_are_those() -> None:
    from ncclwatch.cli.agent_process import BUS

    assert tuple(scheme + "://" for scheme in bus_keys.SCHEMES) == BUS


def test_the_server_of_one_machine_divides_nodes_as_tenants_do() -> None:
    assert MAPPING in (Path(__file__).parents[3] / "packaging/nats/loopback.conf").read_text()
