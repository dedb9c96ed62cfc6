"""A nats-server with an operator: accounts and users are JWTs that it signed, as ``nsc`` writes them (jwt v2, nats-io/jwt)."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nkeys

from fleet.servers import NatsServer
from ncclwatch.messaging.bus_keys import HEARD, NODES, SAID
from ncclwatch.messaging.subjects import MAPPING

UNLIMITED = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1) | {"wildcards": True}
STORED = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
TENANT = "red"


@dataclass
class Signer:
    """A key pair of an operator, an account or a user."""

    prefix: int
    seed: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.seed = nkeys.encode_seed(os.urandom(32), self.prefix)
        self._keys = nkeys.from_seed(bytearray(self.seed))

    @property
    def public(self) -> str:
        return str(self._keys.public_key.decode())

    def claim(self, kind: str, of: Signer, name: str, about: dict[str, Any]) -> str:
        """A JWT about ``of``, signed by us."""
        claims = {"iat": int(time.time()), "iss": self.public, "name": name, "sub": of.public,
                  "nats": about | {"type": kind, "version": 2}}  # fmt: skip
        claims["jti"] = base64.b32encode(hashlib.sha256(json.dumps(claims).encode()).digest()).decode().rstrip("=")
        text = f"{_encoded({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{_encoded(claims)}"
        return f"{text}.{_plain(self._keys.sign(text.encode()))}"


def _encoded(value: dict[str, Any]) -> str:
    return _plain(json.dumps(value).encode())


def _plain(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


class OperatorServer(NatsServer):
    """A server that knows its operator alone; a tenant has two accounts (docs/bus.md), and its users creds in ``folder/ROLE``."""

    def __init__(self, folder: Path) -> None:
        operator, system = Signer(nkeys.PREFIX_BYTE_OPERATOR), Signer(nkeys.PREFIX_BYTE_ACCOUNT)
        self._own, self._nodes = Signer(nkeys.PREFIX_BYTE_ACCOUNT), Signer(nkeys.PREFIX_BYTE_ACCOUNT)
        mapped, to = (word.strip('"') for word in MAPPING.split(": "))
        own = {
            "limits": UNLIMITED | STORED, "mappings": {mapped: [{"subject": to, "weight": 100}]},
            "exports": [{"name": f"s{n}", "subject": one, "type": "service"} for n, one in enumerate(HEARD)]
            + [{"name": f"t{n}", "subject": one, "type": "stream"} for n, one in enumerate(SAID)],
        }  # fmt: skip
        nodes = {
            "limits": UNLIMITED,
            "imports": [{"name": one, "subject": one, "account": self._own.public, "type": "service"} for one in HEARD]
            + [{"name": one, "subject": one, "account": self._own.public, "type": "stream"} for one in SAID],
        }
        accounts = {
            system.public: operator.claim("account", system, "SYS", {"limits": UNLIMITED}),
            self._own.public: operator.claim("account", self._own, TENANT, own),
            self._nodes.public: operator.claim("account", self._nodes, TENANT + NODES, nodes),
        }
        preload = "\n".join(f"  {public}: {jwt}" for public, jwt in accounts.items())
        config = f"""operator: {operator.claim("operator", operator, "test", {})}
system_account: {system.public}
resolver: MEMORY
resolver_preload: {{
{preload}
}}
"""
        super().__init__(folder, config, mapped=False)

    def keys(self, role: str, *, publish: list[str] | None = None, subscribe: list[str] | None = None) -> Path:
        """A folder with the creds of a new user; without lists it may say and hear anything in the account of engines."""
        user = Signer(nkeys.PREFIX_BYTE_USER)
        limits = {"subs": -1, "data": -1, "payload": -1}
        about: dict[str, Any] = limits
        if publish is not None:
            inbox = f"_INBOX.{user.public}.>"
            about = limits | {"pub": {"allow": publish}, "sub": {"allow": [*(subscribe or []), inbox]}}
        jwt = (self._own if publish is None else self._nodes).claim("user", user, role, about)
        folder = self.folder / role
        folder.mkdir()
        creds = folder / f"{role}.creds"
        creds.write_text(
            f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
        )
        creds.chmod(0o600)
        return folder
