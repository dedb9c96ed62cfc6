"""Metrics: the text format, addresses, a real scrape; alert rules by promtool where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from ncclwatch.cli.metrics import MetricsServer, parse_address
from ncclwatch.errors import UsageError
from ncclwatch.fleet.hearing import HearingCounts, WorkerState
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.model.work import Counting, FlowWindow, Scope, WorkWindow
from ncclwatch.report.hearing_metrics import hearing_metrics
from ncclwatch.report.metrics import Counts, Watched, metrics
from ncclwatch.view.frame import View
from testbed.sidecar import free_port
from unit.dashboard.test_goldens import with_network
from unit.views import verdict_of, view

ROOT = Path(__file__).parent.parent.parent.parent
RULES = ROOT / "packaging" / "prometheus"
LABELS = r"\{(?:[a-z_]+=\"(?:[^\"\\\n]|\\.)*\",?)*\}"
HEARING = "ncclwatch_hear_"
SAMPLE = re.compile(rf"([a-z_]+)({LABELS})? (-?[0-9.e+-]+|NaN)")


def documented() -> set[str]:
    """Names in docs/metrics.md."""
    return set(re.findall(r"`(ncclwatch_[a-z_]+)`", (ROOT / "docs" / "metrics.md").read_text()))


def page_of(shown: View | None, counts: Counts, *jobs: str) -> str:
    """What a scrape gets of jobs that all look like this; without a name of one session alone."""
    one = Watched()
    one.view, one.counts = shown, counts
    return metrics([(job, one) for job in jobs or ("",)])


def parse(text: str) -> dict[str, list[tuple[str, float]]]:
    """Samples by name; fails on anything that is not in the format, on a metric told twice, or one without its type."""
    found: dict[str, list[tuple[str, float]]] = {}
    typed = set()
    for line in text.splitlines():
        if line.startswith("# "):
            _, word, name, _ = line.split(" ", 3)
            if word == "TYPE":
                assert name not in typed
                typed.add(name)
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert match[1] in typed
        found.setdefault(match[1], []).append((match[2] or "", float(match[3])))
    for name, samples in found.items():
        assert len({labels for labels, _ in samples}) == len(samples), name
    return found


def test_a_standing_verdict_and_its_culprit_are_told() -> None:
    counts = Counts()
    counts.told([verdict_of(VerdictClass.STOPPED, 2, 8)])
    found = parse(page_of(with_network(view(8, VerdictClass.STOPPED, lost=3)), counts))
    [(labels, value)] = found["ncclwatch_verdict"]
    assert value == 1
    assert 'class="stopped"' in labels
    assert "rank 2" in labels
    assert [labels for labels, value in found["ncclwatch_rank_culprit"] if value] == [
        '{rank="2",host="node000",pid="1002",gpu="2"}'
    ]
    assert ('{state="waiting"}', 7.0) in found["ncclwatch_ranks"]
    assert found["ncclwatch_lost_records_total"] == [("", 3.0)]
    assert ('{class="stopped"}', 1.0) in found["ncclwatch_verdicts_total"]
    assert ('{host="node000",nic="mlx5_2:1",used="true"}', 0.0) in found["ncclwatch_nic_up"]


def test_several_jobs_are_told_apart_by_a_label() -> None:
    found = parse(page_of(view(8, VerdictClass.STOPPED), Counts(), "llama", 'a "b"'))
    assert len(found["ncclwatch_build_info"]) == 1
    assert ('{nccl_job="llama",state="waiting"}', 7.0) in found["ncclwatch_ranks"]
    assert [labels.split(",")[0] for labels, _ in found["ncclwatch_verdict"]] == ['{nccl_job="llama"', r'{nccl_job="a \"b\""']


def test_what_is_not_known_is_absent() -> None:
    calm = view(8, VerdictClass.IDLE, calls=False)
    found = parse(page_of(calm, Counts()))
    for name in (
        "ncclwatch_verdict",
        "ncclwatch_rank_operation_age_seconds",
        "ncclwatch_probe_hits_per_second",
        "ncclwatch_nic_up",
    ):
        assert name not in found
    assert ('{plane="calls"}', 0.0) in found["ncclwatch_plane_up"]
    assert set(parse(page_of(None, Counts()))) == {
        "ncclwatch_build_info",
        "ncclwatch_samples_total",
        "ncclwatch_verdicts_total",
        "ncclwatch_recoveries_total",
    }


def test_hostile_text_stays_in_its_label() -> None:
    evil = 'a"b\\c\nncclwatch_verdict 1\x1b[2J'
    base = view(2, VerdictClass.STOPPED)
    windows = [replace(w, process=replace(w.process, host=evil)) for w in base.frame.windows]
    verdict = replace(base.frame.verdicts[0], summary=evil, next_steps=(evil,))
    parse(page_of(View(replace(base.frame, windows=windows, verdicts=(verdict,))), Counts()))


def test_every_metric_is_documented() -> None:
    jobs = {name for name in documented() if not name.startswith(HEARING)}
    assert set(parse(page_of(with_work(with_network(view(8, VerdictClass.STOPPED))), Counts()))) == jobs


def with_work(base: View) -> View:
    """A view with the windows of two ports, of one of which little is known."""
    burst = WorkWindow(
        Counting.BURSTS, 0, 7_000_000_000, 0.007, posted_bytes=7_000, received_bytes=70, in_flight=3, latency_p50_ns=24_000.0,
        latency_p99_ns=95_000.0, throughput=2e9, uncertainty=0.03,
    )  # fmt: skip
    ports = [
        FlowWindow(1000 + i, Scope.PORT, work, i, "mlx5_0", 1, host="node000")
        for i, work in enumerate((burst, WorkWindow(Counting.BURSTS, 0, 7, 0.0)))
    ]
    return View(replace(base.frame, work=ports, cost=replace(base.frame.cost, wire_share=0.0007, wire_budget=0.001)))


def test_what_ports_carried_is_told_as_far_as_it_is_known() -> None:
    found = parse(page_of(with_work(view(8)), Counts()))
    label = '{rank="0",host="node000",pid="1000",nic="mlx5_0:1",counting="bursts"}'
    assert found["ncclwatch_work_sent_bytes_per_second"] == [(label, 1e6)]
    tail = label.replace("}", ',quantile="0.99"}')
    assert (tail, 95e-6) in found["ncclwatch_work_latency_seconds"]
    assert found["ncclwatch_work_in_flight"] == [(label, 3.0)]
    assert [value for _, value in found["ncclwatch_work_coverage_ratio"]] == [0.001, 0.0]
    assert found["ncclwatch_wire_budget_ratio"] == [("", 0.001)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (":9464", ("127.0.0.1", 9464)),
        ("localhost:1", ("127.0.0.1", 1)),
        ("10.0.0.1:80", ("10.0.0.1", 80)),
        ("[::1]:9464", ("::1", 9464)),
    ],
)
def test_addresses(text: str, expected: tuple[str, int]) -> None:
    assert parse_address(text) == expected


@pytest.mark.parametrize("text", ["", "9464", ":0", ":99999", "host:80", "1.2.3:80", ":", "[::g]:1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is no address"):
        parse_address(text)


def test_a_scrape_answers_on_the_loopback_interface_only(capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with MetricsServer(f":{port}") as server:
        server._jobs.of("").view = view(8, VerdictClass.STOPPED)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=120) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
            assert "ncclwatch_verdict" in parse(answer.read().decode())
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/etc/passwd", timeout=120)
        assert error.value.code == 404
        with pytest.raises(UsageError, match="choose another port"):
            MetricsServer(f":{port}")
    assert capsys.readouterr().err == ""


def test_a_hearing_worker_tells_how_far_it_is_behind_and_what_it_refused() -> None:
    counts = HearingCounts(batches=7, windows=56, bad=2, duplicates=3, flooded=5, refused_nodes=1, missed=4)
    state = WorkerState(at_s=1.75e9, connected=False, parts=17, nodes=3, jobs=2, waiting=9, lag_s=2.5, unsent=1, counts=counts)
    found = parse(hearing_metrics(state))
    assert found["ncclwatch_hear_lag_seconds"] == [("", 2.5)] and found["ncclwatch_hear_connected"] == [("", 0.0)]
    assert found["ncclwatch_hear_windows_total"] == [("", 56.0)] and found["ncclwatch_hear_missed_batches_total"] == [("", 4.0)]
    assert dict(found["ncclwatch_hear_refused_batches_total"]) == {
        '{reason="bad"}': 2.0, '{reason="repeated"}': 3.0, '{reason="flood"}': 5.0, '{reason="node"}': 1.0,
    }  # fmt: skip
    assert {name for name in found if name.startswith(HEARING)} == {name for name in documented() if name.startswith(HEARING)}


def test_another_interface_has_to_be_named_and_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    with MetricsServer(f"0.0.0.0:{free_port()}"):
        pass
    assert "can be read by everybody" in capsys.readouterr().err


def test_the_alert_rules() -> None:
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("promtool is not installed (Debian package prometheus): alert rules are not checked")
    rules = subprocess.run(
        [program, "check", "rules", str(RULES / "ncclwatch-alerts.yml")], capture_output=True, text=True, check=False
    )
    assert rules.returncode == 0, rules.stdout + rules.stderr
    cases = [program, "test", "rules", "ncclwatch-alerts.test.yml"]
    tested = subprocess.run(cases, capture_output=True, text=True, check=False, cwd=RULES)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_alert_rules_only_use_metrics_that_exist() -> None:
    rules = (RULES / "ncclwatch-alerts.yml").read_text()
    used = set(re.findall(r"\b(ncclwatch_[a-z_]+)\b", rules))
    assert used <= documented()
    assert used
