"""``ncclwatch version``."""

from __future__ import annotations

from ncclwatch import __version__
from ncclwatch.cli.output import emit


def version() -> None:
    """Print the version."""
    emit(f"ncclwatch {__version__}")
