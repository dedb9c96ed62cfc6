"""`make fleet` as somebody runs it: real NCCL on three hosts, real servers, the page in a real browser, and Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from playwright.sync_api import expect

from fleet.browser import WAIT_MS, browser, tab
from testbed.job import available, die_with_parent
from testbed.sidecar import free_port

SCRIPT = Path(__file__).parents[2] / "scripts" / "show_fleet.py"
NCCL = "2.27.5"

# The page of a fleet has a shorter test (test_serve_fleet.py), and so have agents of real jobs on three hosts.
pytestmark = [
    pytest.mark.attach,
    pytest.mark.long,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(not available(NCCL), reason=f"NCCL {NCCL} is not in the cache"),
]


@pytest.mark.timeout(600)
def test_the_page_names_the_frozen_rank() -> None:
    command = [sys.executable, str(SCRIPT), "--nccl", NCCL, "--port", str(free_port())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent) as running:  # noqa: PLW1509
        said = []
        for line in running.stdout or ():
            said.append(line)
            if "Ctrl-C" in line:
                break
        named = re.search(r"the page names rank (\d+) .*?(http://\S+)", "".join(said))
        assert named, "".join(said)
        with browser() as chromium, tab(chromium) as (page, wrong):
            expect.set_options(timeout=WAIT_MS)
            page.goto(named[2])
            expect(page.locator("#verdicts")).to_contain_text(f"rank {named[1]} ")
            assert wrong == []
        running.send_signal(signal.SIGINT)
        assert running.wait(120) == 0
