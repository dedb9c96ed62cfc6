"""The page of a fleet, in a browser: jobs of simulated agents appear as a worker and a judge on a real nats-server find them."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request

from playwright.sync_api import expect

from fleet.browser import WAIT_MS, browser, tab
from fleet.servers import NatsServer
from fleet.simulated import Agents
from ncclwatch.cli.fleet import bus_connection
from testbed.sidecar import daemon, free_port

expect.set_options(timeout=WAIT_MS)


def top(*options: str) -> str:
    """What ``ncclwatch top`` writes."""
    ended = subprocess.run(
        [sys.executable, "-m", "ncclwatch", "top", *options], capture_output=True, text=True, timeout=120, check=True
    )
    return ended.stdout


def test_jobs_of_a_fleet_appear_on_the_page_and_a_stopped_rank_is_named(nats_server: NatsServer) -> None:
    bus, port, scraped = nats_server.address, free_port(), free_port()
    with (
        daemon("serve", "--fleet", bus, "--bind", f":{port}") as serve,
        daemon("fleet", "hear", "--bus", bus),
        daemon("fleet", "judge", "--bus", bus, "--metrics", f":{scraped}"),
        browser() as chromium,
        tab(chromium) as (page, wrong),
        bus_connection(bus, None) as connection,
    ):
        serve.wait_line("serving all jobs of the fleet")
        page.goto(f"http://127.0.0.1:{port}/")
        expect(page.locator("#connection")).to_have_text("connected")
        expect(page.locator("#job-list li")).to_have_count(0)
        agents = Agents(connection, world=4, jobs=2)
        agents.start()
        try:
            expect(page.locator("#job-list li")).to_have_count(2)
            agents.stuck[0] = 2
            stuck = page.locator("#job-list li", has_text=agents.name_of(0))
            expect(stuck).to_contain_text("rank 2 ")
            stuck.click()
            expect(page.locator("#job-title")).to_have_text(agents.name_of(0))
            expect(page.locator(".verdict .summary")).to_contain_text("rank 2 ")
            expect(page.locator("#job-list li", has_text=agents.name_of(1))).not_to_contain_text("rank 2 ")
            # The same from a terminal, and for Prometheus: all jobs.
            standing = {row["job"]: row["verdict"] for row in json.loads(top("--fleet", bus, "--json"))["jobs"]}
            assert [culprit["rank"] for culprit in standing[agents.name_of(0)]["culprits"]] == [2]
            assert set(standing) == {agents.name_of(0), agents.name_of(1)}
            shown = top("--fleet", bus, "--job", agents.name_of(0), "--plain", "--duration", "20")
            assert "rank 2 " in shown
            with urllib.request.urlopen(f"http://127.0.0.1:{scraped}/metrics", timeout=60) as answer:
                told = answer.read().decode()
            for job in (0, 1):
                assert f'ncclwatch_ranks{{nccl_job="{agents.name_of(job)}",state=' in told
        finally:
            agents.close()
        assert wrong == []
