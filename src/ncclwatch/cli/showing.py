"""How a live session is shown: the dashboard on a terminal, else lines, or JSON for scripts."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ncclwatch.cli.surfaces import Surface, watch

if TYPE_CHECKING:
    from ncclwatch.cli.live import Steps


def show(
    session: Steps,
    surface: Surface | None,
    duration: float | None,
    also: Sequence[Surface] = (),
    paths: Sequence[Path] = (),
) -> None:
    """Run a started session to its end, on ``surface``, or in the dashboard; ``also`` are told everything as well.

    ``paths`` are files of probes that the dashboard draws flows on.
    """
    if surface is not None:
        watch(session, surface, duration, also)
        return
    from ncclwatch.cli.live_dashboard import show_dashboard
    from ncclwatch.cli.paths_files import probes_of

    show_dashboard(session, duration, also, probes_of(paths))


def surface_of(*, as_json: bool, plain: bool, calls: bool = False) -> Surface | None:
    """JSON or lines; ``None`` for the dashboard, which a terminal gets unless ``plain`` lines were asked for."""
    if as_json:
        from ncclwatch.cli.live_json import JsonSurface

        return JsonSurface(calls=calls)
    if not plain and is_screen():
        return None
    from ncclwatch.cli.live_log import LogSurface

    return LogSurface()


def is_screen() -> bool:
    """Whether standard input and output are a terminal that the dashboard can draw on."""
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return sys.stdout.isatty() and sys.stdin.isatty() and os.environ.get("TERM", "dumb") != "dumb" and utf8
