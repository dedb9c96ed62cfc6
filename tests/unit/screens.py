"""The dashboard without a terminal: what stands on its screen after some keys, as text, with a frozen clock."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from textual.pilot import Pilot

from ncclwatch.dashboard.app import Dashboard
from ncclwatch.dashboard.source import Source, StillSource
from ncclwatch.view.frame import View

GOLDENS = Path(__file__).parent / "goldens"
Act = Callable[[Pilot[Any], Dashboard], Awaitable[None]]


def text(app: Dashboard) -> str:
    """What is on the screen."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips) + "\n"


def play(source: Source | Sequence[View], size: tuple[int, int], act: Act) -> None:
    """Run the dashboard in a terminal of that size (columns, lines) and do something with it."""
    os.environ["TZ"] = "UTC"
    time.tzset()

    async def run() -> None:
        app = Dashboard(StillSource(list(source)) if isinstance(source, (list, tuple)) else source)  # type: ignore[arg-type]
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            await act(pilot, app)

    asyncio.run(run())


def screen(views: Sequence[View], size: tuple[int, int], *keys: str) -> str:
    """The screen after these keys."""
    shown: list[str] = []

    async def act(pilot: Pilot[Any], app: Dashboard) -> None:
        for key in keys:
            await pilot.press(key)
            await pilot.pause()
        shown.append(text(app))

    play(list(views), size, act)
    return shown[0]


def check_golden(name: str, found: str) -> None:
    """Compare with the golden of that name; NCCLWATCH_GOLDENS=write writes it instead."""
    path = GOLDENS / f"{name}.txt"
    if os.environ.get("NCCLWATCH_GOLDENS") == "write":
        path.parent.mkdir(exist_ok=True)
        path.write_text(found, "utf-8")
    assert found == path.read_text("utf-8"), f"{path.name} differs: look at it, then NCCLWATCH_GOLDENS=write pytest {path.name}"
