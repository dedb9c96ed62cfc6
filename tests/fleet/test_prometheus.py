"""A real NCCL job, watched by `ncclwatch attach`; its metrics scraped by Debian's Prometheus, its verdicts sent by OTLP.

Beside it a hearing worker of a fleet, without agents.

Every query of the Grafana dashboard is asked of that Prometheus, and the alert of a frozen rank arrives by Debian's Alertmanager.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fleet.prometheus import Alertmanager, Prometheus, Webhook, wait
from fleet.servers import running
from testbed.job import Job, available
from testbed.sidecar import Daemon, daemon, free_port
from unit.export.collector import Collector

DASHBOARD = Path(__file__).parents[2] / "packaging" / "grafana" / "ncclwatch.json"
HOOK = Path(__file__).parents[2] / "packaging" / "hooks" / "webhook.py"
RANKS, NCCL = 4, "2.27.5"

pytestmark = [
    pytest.mark.attach,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(not available(NCCL), reason=f"NCCL {NCCL} is not in the cache"),
]


@dataclass(frozen=True)
class Watched:
    """A job, who watches it, and where that ends up."""

    job: Job
    attach: Daemon
    prometheus: Prometheus
    webhook: Webhook
    collector: Collector
    instance: str
    """As Prometheus calls who watches it."""


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder, port, hearing = tmp_path_factory.mktemp("prometheus"), free_port(), free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "1000")
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", "ncclwatch.job=llama")
        with (
            Job(nccl=NCCL, ranks=RANKS, transport="socket", count=1 << 16, extra=["--pause-us", "20000"]) as job,
            Webhook() as hook,
        ):
            pids = [word for pid in job.pids for word in ("--pid", str(pid))]
            with (
                Collector() as collector,
                Alertmanager(folder / "alertmanager", hook) as alertmanager,
                daemon(
                    "attach",
                    "--json",
                    *pids,
                    "--metrics",
                    f":{port}",
                    "--otlp",
                    collector.url,
                    "--on-verdict",
                    f"{HOOK} --alertmanager {alertmanager.url}",
                ) as attach,
                running(folder / "nats") as nats,
                daemon("fleet", "hear", "--json", "--bus", nats.address, "--metrics", f":{hearing}"),
                Prometheus(
                    folder / "prometheus", {"ncclwatch": (f"127.0.0.1:{port}", f"127.0.0.1:{hearing}")}, alertmanager
                ) as prometheus,
            ):
                wait(lambda: set(prometheus.targets().values()) == {"up"}, "a scrape of both")
                wait(lambda: prometheus.query("ncclwatch_work_latency_seconds"), "the first window of work")
                job.freeze(2)
                wait(lambda: prometheus.query('ncclwatch_verdict{class="stopped"} == 1'), "a verdict")
                yield Watched(job, attach, prometheus, hook, collector, f"127.0.0.1:{port}")


def queries() -> list[tuple[str, str]]:
    """Every expression of the dashboard, with the panel's title."""
    dashboard = json.loads(DASHBOARD.read_text())
    found = [(one["name"], one["expr"]) for one in dashboard["annotations"]["list"]]
    found += [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel.get("targets", ())]
    return found


@pytest.mark.parametrize("values", [{"job": "ncclwatch", "instance": ".+"}, {"job": ".*", "instance": ".*"}], ids=["one", "all"])
def test_every_query_of_the_dashboard_gives_data(watched: Watched, values: dict[str, str]) -> None:
    asked = [(title, re.sub(r"\$(\w+)", lambda found: values[found[1]], expression)) for title, expression in queries()]
    assert len(asked) > 30
    for title, expression in asked:
        # Rates need two scrapes.
        wait(partial(watched.prometheus.query, expression), f"{title}: {expression}")


def test_the_dashboard_shows_what_happens(watched: Watched) -> None:
    by_title: dict[str, list[Any]] = {}
    for title, expression in queries():
        by_title.setdefault(title, []).append(
            watched.prometheus.query(expression.replace("$job", ".*").replace("$instance", ".*"))
        )
    [[stands]] = by_title["What stands, and what to do"]
    assert stands["metric"]["class"] == "stopped" and f"kill -CONT {watched.job.pid(2)}" in stands["metric"]["next_step"]
    assert by_title["Hangs that stand"][0][0]["value"][1] == "1"
    assert [one["metric"]["rank"] for one in by_title["Named by a verdict"][0]] == ["2"]
    assert by_title["Ranks watched"][0][0]["value"][1] == str(RANKS)


def test_the_dashboard_is_whole() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    boxes = [panel["gridPos"] for panel in panels]
    cells = [(x, y) for box in boxes for x in range(box["x"], box["x"] + box["w"]) for y in range(box["y"], box["y"] + box["h"])]
    assert len(cells) == len(set(cells)) and max(x for x, _ in cells) < 24
    for panel in panels:
        assert panel["type"] == "row" or panel["targets"]
        for target in panel.get("targets", ()):
            assert target["datasource"]["uid"] == "${datasource}"
            assert '{job=~"$job",instance=~"$instance"' in target["expr"]


def test_a_hook_that_is_run_for_a_verdict_tells_a_real_alertmanager(watched: Watched) -> None:
    alert = wait(lambda: watched.webhook.named("NcclVerdict", "firing"), "the alert of the hook")[0]
    assert (alert["labels"]["class"], alert["labels"]["rank"]) == ("stopped", "2")
    assert f"kill -CONT {watched.job.pid(2)}" in alert["annotations"]["next"]


def test_the_alert_of_a_frozen_rank_arrives_and_is_taken_back(watched: Watched) -> None:
    alert = wait(lambda: watched.webhook.named("NcclJobHeldUp", "firing"), "the alert")[0]
    assert alert["labels"]["class"] == "stopped" and alert["labels"]["severity"] == "critical"
    assert f"pid {watched.job.pid(2)}" in alert["annotations"]["summary"]
    assert f"kill -CONT {watched.job.pid(2)}" in alert["annotations"]["description"]
    watched.job.thaw(2)
    resolved = wait(lambda: watched.webhook.named("NcclJobHeldUp", "resolved"), "the end of the alert")[0]
    assert resolved["labels"]["id"] == alert["labels"]["id"]
    quiet = ("NcclwatchBlind", "NcclNicDown", "NcclwatchWorkerBehind", "NcclwatchWorkerStuck", "NcclwatchBatchesRefused")
    assert not any(watched.webhook.named(name, "firing") for name in quiet)


def test_the_same_arrives_by_otlp(watched: Watched) -> None:
    collector, pid = watched.collector, watched.job.pid(2)
    collector.wait(lambda: [log for log in collector.logs if log.name == "ncclwatch.verdict"])
    log = next(log for log in collector.logs if log.name == "ncclwatch.verdict")
    told = next(line["verdict"] for line in watched.attach.objects("verdict") if line["verdict"]["id"] == log.body["id"])
    assert log.body == {**told, "job": "", "at_ns": log.at_ns} and log.severity == "ERROR"
    assert [culprit["pid"] for culprit in log.body["culprits"]] == [pid]
    assert log.resource["service.name"] == "ncclwatch" and log.resource["ncclwatch.job"] == "llama"
    collector.wait(lambda: any("ncclwatch_verdict" in found for found in collector.rounds))
    newest = next(found for found in collector.rounds if "ncclwatch_verdict" in found)
    scraped = {
        one["metric"]["__name__"]
        for one in watched.prometheus.query(f'{{__name__=~"ncclwatch_.*",instance="{watched.instance}"}}')
    }
    assert scraped <= set(newest) | {"ncclwatch_verdict", "ncclwatch_rank_operation_age_seconds"}
    culprits = {labels: point.value for labels, point in newest["ncclwatch_rank_culprit"].items()}
    assert [dict(labels)["pid"] for labels, value in culprits.items() if value] == [str(pid)]
    watched.job.thaw(2)
    collector.wait(lambda: [log for log in collector.logs if log.name == "ncclwatch.recovery"])
    assert watched.job.alive(2)
