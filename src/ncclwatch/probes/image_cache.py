"""Compiled programs kept on disk: BCC takes most of a second, and its output depends on our sources and its release alone."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import platform
import stat
import sys
from pathlib import Path
from typing import Any

MAX_FILE = 4 << 20


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/ncclwatch/programs``, or the same under ``~/.cache``."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(configured) if configured.startswith("/") else Path.home() / ".cache"
    return base / "ncclwatch" / "programs"


def release(package: str) -> str:
    """The installed release of a package, by the name of the folder that describes it (``capstone-5.0.6.dist-info``).

    ``importlib.metadata`` would say the same, and load a parser of mail and archives to do so.
    """
    found = (path for entry in sys.path if entry for path in Path(entry).glob(f"{package}-*.*-info"))
    return next((path.name for path in found), "unknown")


def digest(source: Path, folder: Path) -> str:
    """What the output of a compilation depends on, as a name: the source, every header below ``folder``, BCC's release,
    and the machine, since a home folder may be shared.
    """
    hasher = hashlib.sha256(f"{release('bcc')} {platform.machine()} {mmap.PAGESIZE}".encode())
    for path in [source, *sorted(folder.rglob("*.h"))]:
        data = path.read_bytes()
        hasher.update(f"\0{path.name}\0{len(data)}\0".encode() + data)
    return hasher.hexdigest()


class ImageCache:
    """Images as JSON, by digest. Only files and a folder that belong to the user and that nobody else can write are trusted:
    what is in them is loaded into the kernel."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or cache_folder()

    def load(self, name: str) -> Any:
        """The JSON data kept under a digest; ``None`` when there is none that can be used."""
        try:
            fd = os.open(self.folder / f"{name}.json", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or not _is_private(status) or not _is_private(self.folder.stat()):
                return None
            try:
                return json.loads(file.read(MAX_FILE))
            except ValueError:
                return None

    def save(self, name: str, data: Any) -> None:
        """Keep JSON data; a cache that cannot be written is no error."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_private(self.folder.stat()):
                return
            import tempfile

            with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False, suffix=".part", encoding="ascii") as file:
                json.dump(data, file)
            Path(file.name).rename(self.folder / f"{name}.json")


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022
