"""Who may speak on a NATS server: NKEY pairs of a tenant, the part of the server's configuration that follows from them.

A tenant is an account, whose subjects, streams and buckets are out of reach for every other; its engines are in it. Its agents
and viewers are in a second account, which reaches of the first what it needs and nothing else: JetStream answers a message at the
subject its sender names, and in one account that could be JetStream's own interface (seen: an agent's answer that purged the
stream). A folder of tenants holds, for each, a
folder with ``ROLE.nk`` (a seed: secret) and ``known/NAME.pub`` (public half, role, job and node it is bound to), and for all of
them ``tenants.conf``, which ``packaging/nats/nats-server.conf`` includes. Instead of ``ROLE.nk`` there may be ``ROLE.creds``, a
JWT and its seed as ``nsc`` writes them, for a server with an operator.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from ncclwatch.errors import NcclwatchError, UsageError
from ncclwatch.messaging.keys import KNOWN, ROLES, KeyFileError
from ncclwatch.messaging.protocol import is_loopback
from ncclwatch.messaging.subjects import ALL_PINGS, ALL_WATCHES, MAPPING, SAID_BATCHES, token_of
from ncclwatch.text import clean

SCHEMES = ("nats", "tls")
PORT = 4222
TENANTS = "tenants.conf"
CA = "ca.pem"
"""In a folder of keys: who signed the server's certificate, where that is nobody the machine knows anyway."""
_MAX_FILE = 65536
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_PUBLIC = re.compile(r"U[A-Z2-7]{55}\Z")
_SEED = re.compile(rb"SU[A-Z2-7]{56}\Z")
_BLOCK = re.compile(rb"-----BEGIN ([A-Z ]+)-----\s+(\S+)\s+-+END ")
_FIX = "make one with 'ncclwatch keys nats'"
_USER = 20 << 3
_SEED_OF = 18 << 3
"""Prefixes of an NKEY's bytes (github.com/nats-io/nkeys, strkey.go): a user's public key, a seed."""

NODES = "-nodes"
"""The account of a tenant's agents and viewers is called after the tenant."""
STORAGE = "    jetstream: { max_memory: 256MB, max_file: 8GB, max_streams: 8, max_consumers: 256 }"
LIMITS = "    limits: { max_connections: 20000 }"
"""Of a tenant, as a server's configuration has them."""
HEARD = SAID_BATCHES, ALL_PINGS, ALL_WATCHES
SAID = "ncw.ask.*.*", "ncw.view.*"
"""What agents and viewers say to engines, and engines to them."""


@dataclass(frozen=True, slots=True)
class Access:
    """How a NATS server is reached: its address, and what one shows there. ``seed`` and ``jwt`` are secret."""

    address: str
    name: str = ""
    """Names our inbox: what others of the account cannot subscribe to. Our public key where we have one."""
    seed: bytes = field(default=b"", repr=False)
    jwt: bytes = field(default=b"", repr=False)
    ca: str = ""
    """Certificates that may have signed the server's; empty: those the machine knows."""

    @property
    def tls(self) -> bool:
        """Whether nothing is said before the server has shown its certificate."""
        return self.address.startswith("tls://")

    @property
    def inbox(self) -> str:
        """Prefix of subjects on which only we hear."""
        return f"_INBOX.{self.name}" if self.name else f"_INBOX.{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class User:
    """One who may speak: what ``known/NAME.pub`` says. ``job`` and ``node`` are tokens of subjects, or ``*``."""

    name: str
    role: str
    public: str
    job: str = "*"
    node: str = "*"

    def text(self) -> str:
        """The contents of the file."""
        return f"name {self.name}\nrole {self.role}\njob {self.job}\nnode {self.node}\npublic {self.public}\n"

    def line(self) -> str:
        """The user in a server's configuration: an agent sends batches and hears what is asked of it, a viewer sees views."""
        inbox = f'"_INBOX.{self.public}.>"'
        if self.role == "engine":
            return f"      {{ nkey: {self.public} }}"
        if self.role == "agent":
            publish = f'"ncw.batch.{self.job}.{self.node}", "ncw.ping.{self.job}.{self.node}"'
            subscribe = f'"ncw.ask.{self.job}.{self.node}", {inbox}'
        else:
            publish, subscribe = f'"ncw.watch.{self.job}"', f'"ncw.view.{self.job}", {inbox}'
        return (
            f"      {{ nkey: {self.public}, permissions: {{ publish: {{ allow: [{publish}] }}, "
            f"subscribe: {{ allow: [{subscribe}] }} }} }}"
        )


def is_bus(address: str) -> bool:
    """Whether an address is that of a NATS server."""
    return address.split("://", 1)[0] in SCHEMES and "://" in address


def bus_address(text: str) -> str:
    """``nats://HOST:PORT`` or ``tls://HOST:PORT`` in full; raises ``UsageError``."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname or "", PORT if parts.port is None else parts.port
        odd = bool(parts.path.strip("/") or parts.query or parts.fragment or parts.username)
    except ValueError:
        parts, host, port, odd = urlsplit(""), "", 0, True
    if odd or parts.scheme not in SCHEMES or not host or not 0 < port < 65536:
        raise UsageError(f"'{clean(text, 100)}' is no address of a NATS server", "write it like tls://nats-host:4222")
    return f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def access(text: str, folder: Path | None, role: str) -> Access:
    """What is needed to reach a server as ``role``; beyond loopback that is TLS and a key. Raises ``UsageError``."""
    address = bus_address(text)
    local = is_loopback(address)
    if not local and not address.startswith("tls://"):
        raise UsageError(f"{address} is on another machine, and what is said there is not encrypted", "write tls:// for nats://")
    if folder is None:
        if not local:
            raise UsageError(
                f"{address} is on another machine, and there are no keys",
                "give the folder made by 'ncclwatch keys nats' with --keys",
            )
        return Access(address)
    ca = _certificates(folder / CA)
    creds = folder / f"{role}.creds"
    if creds.exists():
        blocks = dict(_BLOCK.findall(_secret(creds)))
        jwt, seed = blocks.get(b"NATS USER JWT", b""), blocks.get(b"USER NKEY SEED", b"")
        if not jwt or not _SEED.match(seed):
            raise KeyFileError(f"{creds} holds no JWT and seed of a user", "write it with 'nsc generate creds'")
        return Access(address, public_of(seed), seed, jwt, ca)
    seed = _secret(folder / f"{role}.nk").strip()
    if not _SEED.match(seed):
        raise KeyFileError(f"{folder / f'{role}.nk'} holds no seed of a user", _FIX)
    return Access(address, public_of(seed), seed, b"", ca)


def _certificates(file: Path) -> str:
    # Read now: an agent that has become another user may not be able to later.
    try:
        with file.open("rb") as stream:
            return stream.read(_MAX_FILE).decode("ascii", "replace")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise KeyFileError(f"cannot read {file}: {error.strerror}", "make it readable") from error


def _secret(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_FILE)
            mode = os.fstat(stream.fileno()).st_mode
    except OSError as error:
        raise KeyFileError(f"cannot read the key {file}: {error.strerror}", _FIX) from error
    # Kubernetes mounts secrets as links into a folder of its own, whose modes the pod's manifest sets.
    if mode & 0o077 and not file.is_symlink():
        raise KeyFileError(f"{file} can be read by others", f"run: chmod 600 {file}")
    return data


# --- making them -----------------------------------------------------------------------------------------------------------


def make_seed() -> bytes:
    """A new seed of a user: 32 random bytes in NKEY's encoding."""
    raw = bytes([_SEED_OF | _USER >> 5, (_USER & 31) << 3]) + secrets.token_bytes(32)
    return _encoded(raw)


def public_of(seed: bytes) -> str:
    """The public half of a seed; raises ``NcclwatchError`` where what it takes is not installed, ``KeyFileError`` for no seed."""
    try:
        import nkeys
    except ImportError as error:
        raise missing() from error
    try:
        public: bytes = nkeys.from_seed(bytearray(seed)).public_key
        whole = _encoded(base64.b32decode(seed + b"=" * (-len(seed) % 8))[:-2])
    except Exception as error:
        raise KeyFileError("a seed of a NATS user is damaged", _FIX) from error
    if whole != seed:
        # nkeys does not look at the sum.
        raise KeyFileError("a seed of a NATS user is damaged", _FIX)
    return public.decode("ascii")


def missing() -> NcclwatchError:
    """What to say where the client of NATS is not installed."""
    return NcclwatchError("a NATS server is spoken to by nats-py, which is not installed", "run: pip install 'ncclwatch[fleet]'")


def _encoded(raw: bytes) -> bytes:
    # CRC-16/XMODEM, low byte first, as NKEY's own encoding has it.
    crc = 0
    for byte in raw:
        crc ^= byte << 8
        for _ in range(8):
            crc = (crc << 1 ^ 0x1021 if crc & 0x8000 else crc << 1) & 0xFFFF
    return base64.b32encode(raw + crc.to_bytes(2, "little")).rstrip(b"=")


def add_user(folder: Path, tenant: str, name: str, role: str, *, job: str = "*", node: str = "*") -> list[Path]:
    """Make a user of a tenant: its seed and its public half, never over an existing one. ``job`` as ``keys.job_of`` names it."""
    for word, what in ((tenant, "tenant"), (name, "key")):
        if not _NAME.match(word):
            raise UsageError(f"'{clean(word, 80)}' cannot name a {what}", "use letters, digits, '-' and '_'")
    if tenant.endswith(NODES):
        raise UsageError(f"a tenant's name does not end with {NODES}", "the account of its agents is called so")
    seed = make_seed()
    user = User(name, role, public_of(seed), job if job == "*" else token_of(job), node if node == "*" else token_of(node))
    home = folder / tenant
    secret, public = home / f"{name}.nk", home / KNOWN / f"{name}.pub"
    try:
        (home / KNOWN).mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(seed + b"\n")
        public.write_text(user.text(), "ascii")
    except FileExistsError as error:
        raise UsageError(f"{secret} exists already", "delete it first, or choose another name with --name") from error
    except OSError as error:
        raise KeyFileError(f"cannot write keys into {home}: {error.strerror}", "choose a folder that can be written") from error
    return [secret, public]


def read_user(file: Path) -> User:
    """A user from ``known/NAME.pub``; raises ``KeyFileError``: what stands there gets into a server's configuration."""
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_FILE).decode("ascii", "replace")
    except OSError as error:
        raise KeyFileError(f"cannot read the key {file}: {error.strerror}", _FIX) from error
    words = dict(line.split(" ", 1) for line in data.splitlines() if " " in line)
    user = User(
        file.stem, words.get("role", ""), words.get("public", ""), words.get("job", "*").strip(), words.get("node", "*").strip()
    )
    bound = all(word == "*" or _NAME.match(word) for word in (user.job, user.node))
    if user.role not in ROLES or not _PUBLIC.match(user.public) or not bound:
        raise KeyFileError(f"{file} is no key of a NATS user", _FIX)
    return user


def write_tenants(folder: Path) -> tuple[Path, int]:
    """``tenants.conf`` of every tenant in a folder; returns the file and how many tenants there are."""
    tenants = sorted(home.parent.name for home in folder.glob(f"*/{KNOWN}") if _NAME.match(home.parent.name))
    parts = [
        _accounts(tenant, [read_user(file) for file in sorted((folder / tenant / KNOWN).glob("*.pub"))]) for tenant in tenants
    ]
    head = "# Written by 'ncclwatch keys nats': the tenants, and what each of their keys may say and hear."
    file = folder / TENANTS
    try:
        file.write_text("\n".join([head, "accounts {", *parts, "}", ""]), "ascii")
    except OSError as error:
        raise KeyFileError(f"cannot write {file}: {error.strerror}", "choose a folder that can be written") from error
    return file, len(tenants)


def _accounts(tenant: str, users: Sequence[User]) -> str:
    nodes = tenant + NODES
    exports = [f'      {{ service: "{one}", accounts: [{nodes}] }}' for one in HEARD]
    exports += [f'      {{ stream: "{one}", accounts: [{nodes}] }}' for one in SAID]
    imports = [f'      {{ service: {{ account: {tenant}, subject: "{one}" }} }}' for one in HEARD]
    imports += [f'      {{ stream: {{ account: {tenant}, subject: "{one}" }} }}' for one in SAID]
    engines = [user.line() for user in users if user.role == "engine"]
    others = [user.line() for user in users if user.role != "engine"]
    lines = [f"  {tenant}: {{", STORAGE, LIMITS, f"    mappings: {{ {MAPPING} }}"]
    lines += ["    exports: [", *exports, "    ]", "    users: [", *engines, "    ]", "  }"]
    lines += [f"  {nodes}: {{", LIMITS, "    imports: [", *imports, "    ]", "    users: [", *others, "    ]", "  }"]
    return "\n".join(lines)
