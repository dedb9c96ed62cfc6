"""The dashboard as a picture (SVG), drawn without a terminal."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

from ncclwatch.dashboard.app import Dashboard
from ncclwatch.dashboard.source import StillSource
from ncclwatch.view.frame import View


def write_picture(views: Sequence[View], path: Path, size: tuple[int, int], keys: Sequence[str] = ()) -> None:
    """Draw the last of ``views`` in a terminal of ``size`` (columns, lines), after pressing ``keys``. Raises ``OSError``."""

    async def draw() -> str:
        app = Dashboard(StillSource(list(views), label="REPLAY"))
        async with app.run_test(size=size) as pilot:
            await pilot.pause()
            for key in keys:
                await pilot.press(key)
                await pilot.pause()
            return app.export_screenshot(title="ncclwatch")

    path.write_text(self_contained(asyncio.run(draw())), "utf-8")


def self_contained(svg: str) -> str:
    """Without the fonts that rich's template would have a browser fetch; the family falls back to the reader's own monospace."""
    return re.sub(r"<!--.*?-->", "", re.sub(r"@font-face\s*\{[^}]*\}", "", svg), flags=re.DOTALL)
