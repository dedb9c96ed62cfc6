"""A report opened in a real browser: nothing on its console, no request to anywhere, drawn at two widths.

Chromium (80 MB to download, 300 MB installed) is not part of the set-up; where it is missing this is printed as skipped.
"""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from pathlib import Path

import pytest

from ncclwatch.cli import main
from unit.batches import node_batches, ring_looks

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = ["--disable-background-networking", "--disable-component-update", "--no-first-run", "--disable-sync", "--disable-gpu"]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed: reports are not opened in a browser")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from ncclwatch.store.recorder import Recorder

    folder = tmp_path_factory.mktemp("report")
    recorder = Recorder(folder / "a")
    for batch in node_batches(list(ring_looks(20, world=16, stuck_from=8))):
        recorder.put(batch)
    recorder.close()
    assert main.run(["report", str(folder / "a"), "-o", str(folder / "a.html")]) == 0
    return folder / "a.html"


def browse(page: Path, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    command = [str(CHROMIUM), "--headless", "--no-sandbox", f"--user-data-dir={folder / 'profile'}", *QUIET]
    command += ["--enable-logging=stderr", "--log-level=0", *more, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)


def test_the_console_is_silent_and_nobody_is_asked(page: Path, tmp_path: Path) -> None:
    log = tmp_path / "net.json"
    done = browse(page, tmp_path, f"--log-net-log={log}", "--dump-dom")
    assert "The way to the culprit" in done.stdout
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    text = log.read_text()
    events = json.loads(text if text.rstrip().endswith("}") else text.rstrip().rstrip(",") + "]}")["events"]
    urls = {str(event.get("params", {}).get("url", "")) for event in events}
    assert [url for url in urls if url.startswith(("http:", "https:", "ws:")) and "gvt1" not in url and "google" not in url] == []


@pytest.mark.parametrize("width", [1280, 600])
def test_it_is_drawn_at_two_widths(page: Path, tmp_path: Path, width: int) -> None:
    picture = tmp_path / "page.png"
    browse(page, tmp_path, f"--window-size={width},1600", "--hide-scrollbars", f"--screenshot={picture}")
    head = picture.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", head[16:24]) == (width, 1600)
    # A blank page of this size takes a few kilobytes.
    assert picture.stat().st_size > 30_000
