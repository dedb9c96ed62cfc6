"""The secret that both ends of a probe share."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from ncclwatch.errors import UsageError
from ncclwatch.text import clean

TOKEN_VARIABLE = "NCCLWATCH_PROBE_TOKEN"  # noqa: S105 - its name, not the token
MAX_TOKEN = 4096


def read_token(file: Path | None) -> bytes:
    """The shared secret; raises :class:`UsageError` for a file that others may read."""
    if file is None:
        return os.environb.get(TOKEN_VARIABLE.encode(), b"").strip()
    try:
        with file.open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            data = stream.read(MAX_TOKEN).strip()
    except OSError as error:
        raise UsageError(f"cannot read the token in {clean(str(file))}: {error.strerror}", "name a file") from None
    if stat.S_ISREG(mode) and mode & 0o077:
        raise UsageError(f"others may read the token in {clean(str(file))}", f"chmod 600 {clean(str(file))}")
    if not data:
        raise UsageError(f"there is no token in {clean(str(file))}", "make one: openssl rand -hex 16")
    return data
