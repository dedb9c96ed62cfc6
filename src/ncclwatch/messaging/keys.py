"""Keys of engine, agents and viewers (ZeroMQ's CURVE), and tokens that keep jobs apart.

A folder of keys holds ``engine.key`` and ``engine.pub``, a ``NAME.key`` for whoever runs here, and in ``known/`` the public
halves of everybody the engine takes. A ``.key`` file is secret; ``.pub`` files may be seen by anybody.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

import zmq

from ncclwatch.errors import NcclwatchError, UsageError
from ncclwatch.messaging.protocol import is_loopback
from ncclwatch.text import clean

ROLES = ("engine", "agent", "viewer")
KNOWN = "known"
_MAX_FILE = 4096
_Z85 = frozenset(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#")
_FIX = "make one with 'ncclwatch keys make'"


class KeyFileError(NcclwatchError):
    """A key file that is not there, cannot be read, or is none."""


@dataclass(frozen=True, slots=True)
class Key:
    """A key pair, or only its public half; both in Z85, 40 characters."""

    name: str
    role: str
    public: bytes
    secret: bytes = b""

    @property
    def fingerprint(self) -> str:
        """Enough of a hash of the public half for people to compare."""
        return hashlib.sha256(self.public).hexdigest()[:16]

    def text(self, *, secret: bool) -> str:
        """The contents of its file."""
        lines = [f"name {self.name}", f"role {self.role}", f"public {self.public.decode()}"]
        if secret:
            lines = [
                "# A secret key of ncclwatch: whoever has it can speak as its owner.",
                *lines,
                f"secret {self.secret.decode()}",
            ]
        return "\n".join([*lines, ""])


def make_key(name: str, role: str) -> Key:
    """A new key pair; raises ``UsageError`` for names that are no file names."""
    if not name or len(name) > 64 or not all(ch.isalnum() or ch in "-_." for ch in name) or name.startswith("."):
        raise UsageError(f"'{clean(name, 80)}' cannot name a key", "use letters, digits, '-', '_' and '.'")
    public, secret = zmq.curve_keypair()
    return Key(name, role, public, secret)


def write_key(folder: Path, key: Key) -> list[Path]:
    """Write ``NAME.key`` and its public half; never over an existing secret. Returns the files."""
    try:
        (folder / KNOWN).mkdir(parents=True, exist_ok=True)
        secret = folder / f"{key.name}.key"
        with os.fdopen(os.open(secret, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(key.text(secret=True))
        public = folder / "engine.pub" if key.role == "engine" else folder / KNOWN / f"{key.name}.pub"
        public.write_text(key.text(secret=False), "ascii")
    except FileExistsError as error:
        raise UsageError(f"{secret} exists already", "delete it first, or choose another name with --name") from error
    except OSError as error:
        raise KeyFileError(f"cannot write keys into {folder}: {error.strerror}", "choose a folder that can be written") from error
    return [secret, public]


def read_key(file: Path, *, secret: bool = False) -> Key:
    """A key from its file; raises ``KeyFileError``."""
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_FILE)
        mode = file.stat().st_mode
    except OSError as error:
        raise KeyFileError(f"cannot read the key {file}: {error.strerror}", _FIX) from error
    fields: dict[bytes, bytes] = {}
    for line in data.splitlines():
        if line and not line.startswith(b"#"):
            word, _, rest = line.partition(b" ")
            fields[word] = rest.strip()
    public, private, role = (
        fields.get(b"public", b""),
        fields.get(b"secret", b""),
        fields.get(b"role", b"").decode("ascii", "replace"),
    )
    if not _is_z85(public) or role not in ROLES or (private and not _is_z85(private)):
        raise KeyFileError(f"{file} is no key of ncclwatch", _FIX)
    if secret and not private:
        raise KeyFileError(f"{file} holds no secret key", "use the .key file, not the .pub")
    if secret and mode & 0o077 and not _is_mounted_secret(file):
        raise KeyFileError(f"{file} can be read by others", f"run: chmod 600 {file}")
    return Key(clean(file.stem, 64), role, public, private)


def _is_z85(text: bytes) -> bool:
    return len(text) == 40 and all(byte in _Z85 for byte in text)


def _is_mounted_secret(file: Path) -> bool:
    """Kubernetes mounts secrets as links into a folder of its own, whose modes the pod's manifest sets."""
    return file.is_symlink()


def own_key(folder: Path, role: str, name: str | None = None) -> Key:
    """The secret key of whoever runs here: ``NAME.key``, by default named after the role; a viewer may use an agent's."""
    names = [name] if name else [role, *(["agent"] if role == "viewer" else [])]
    for word in names:
        if (folder / f"{word}.key").exists():
            return read_key(folder / f"{word}.key", secret=True)
    return read_key(folder / f"{names[0]}.key", secret=True)


class KnownKeys:
    """Public keys an engine takes, from the files in ``known/``; read again when the folder changes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / KNOWN
        self._stamp: tuple[int, int] | None = None
        self._keys: dict[bytes, Key] = {}
        self.problems: list[str] = []

    def find(self, public: bytes) -> Key | None:
        """The key whose public half this is (Z85)."""
        self._read()
        return self._keys.get(public)

    def __len__(self) -> int:
        self._read()
        return len(self._keys)

    def _read(self) -> None:
        try:
            files = sorted(self._folder.glob("*.pub"))[:65536]
            stat = self._folder.stat()
        except OSError:
            self._keys = {}
            return
        stamp = (stat.st_mtime_ns, len(files))
        if stamp == self._stamp:
            return
        self._stamp, self._keys, self.problems = stamp, {}, []
        for file in files:
            try:
                key = read_key(file)
            except KeyFileError as error:
                self.problems.append(str(error))
                continue
            self._keys[key.public] = key


def make_token() -> str:
    """A new token of a job: 128 random bits."""
    # An agent makes none.
    import secrets

    return secrets.token_urlsafe(16)


def job_of(token: str) -> str:
    """What names a job in an engine: not the token, which is a secret."""
    return hashlib.sha256(token.encode()).hexdigest()[:12] if token else "default"


def client_keys(address: str, folder: Path | None, role: str) -> tuple[Key, bytes] | None:
    """Our key and the engine's; without a folder only an engine on this machine is spoken to."""
    if folder is None:
        if not is_loopback(address):
            raise UsageError(
                f"{address} is on another machine, and there are no keys",
                "give the folder made by 'ncclwatch keys make' with --keys",
            )
        return None
    return own_key(folder, role), read_key(folder / "engine.pub").public
