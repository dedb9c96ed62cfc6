"""Reports of recordings: the page is self-contained and escaped, the trace nests, the JSON says what was judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from perfetto.protos.perfetto.trace.perfetto_trace_pb2 import Trace, TrackEvent

from ncclwatch.cli import main
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.model.work import Counting, FlowWindow, Scope, WorkWindow
from ncclwatch.store.recorder import Recorder
from unit.batches import node_batches, ring_looks
from unit.synthetic import SECOND
from unit.traces import ReadTrace

FIXTURES = Path(__file__).parent.parent.parent / "fixtures"
EVIL = "<script>alert(1)</script>\"'><img src=http://x/y onerror=z>&\x1b[2J\u202e"


@pytest.fixture
def stuck(tmp_path: Path) -> Path:
    """A recording in which rank 2 is stopped for the last 12 of 20 looks."""
    return written(tmp_path / "stuck", stuck_from=8)


def written(path: Path, *, stuck_from: int | None, world: int = 4, evil: bool = False) -> Path:
    recorder = Recorder(path, about={"command": EVIL if evil else "record"})
    for batch in node_batches(list(ring_looks(20, world=world, stuck_from=stuck_from))):
        if evil:
            batch.samples = tuple(
                replace(s, process=replace(s.process, host=EVIL, name=EVIL, command=(EVIL,), library=EVIL)) for s in batch.samples
            )
            batch.windows = [replace(w, process=replace(w.process, host=EVIL, name=EVIL), problem=EVIL) for w in batch.windows]
            batch.notes = (EVIL,)
        recorder.put(batch)
    recorder.close(EVIL if evil else "ended")
    return path


class Page(HTMLParser):
    """What a page is made of."""

    VOID = frozenset({"meta", "link", "br", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(text)
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in self.VOID and tag not in ("li", "p", "dt", "dd"):
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("li", "p", "dt", "dd"):
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main.run(["report", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def harmless(text: str) -> Page:
    page = Page(text)
    assert not {"script", "iframe", "object", "img", "form", "base"} & set(page.tags)
    for tag, name, value in page.attributes:
        assert not name.startswith("on")
        if name in ("href", "src", "action", "data", "xlink:href"):
            assert (tag, value) == ("link", "data:,")
    return page


def test_the_page_tells_the_verdict_and_asks_nobody_anything(stuck: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = harmless(run(capsys, stuck))
    for word in ("STOPPED", "rank 2", "Next:", "Evidence", "Around the event", "The way to the culprit", "Progress of steps",
                 "Who waited for whom", "Every rank", "Not observed", "Environment", "What happened"):  # fmt: skip
        assert word in page.words
    assert page.tags.count("svg") == 5
    # Closed, but in the page: what is printed or searched holds it.
    assert page.tags.count("details") == 1
    assert "stands by rule halted" in page.words


def test_a_healthy_job_has_a_report_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = harmless(run(capsys, written(tmp_path / "fine", stuck_from=None)))
    assert "RUNNING" in page.words
    assert "culprit" not in page.words.replace("culprits", "")


def test_text_of_a_target_is_only_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, written(tmp_path / "evil", stuck_from=8, evil=True))
    page = harmless(text)
    assert "<script>alert(1)" in page.words
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_the_json_names_culprit_waits_and_what_was_not_seen(stuck: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = json.loads(run(capsys, stuck, "--json"))
    [incident] = data["incidents"]
    assert [c["rank"] for c in incident["verdict"]["culprits"]] == [2]
    assert data["focus"] == incident["verdict"]["id"] == data["verdicts"][0]["id"]
    assert {(w["rank"], w["waits_for"]) for w in data["waits"]} >= {(3, 2), (1, 2)}
    assert {rank["rank"]: rank["state"] for rank in data["ranks"]}[2] == "X"
    assert data["planes"][1]["reason"] == "switched off"


def test_what_the_network_carried_is_in_page_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Windows of work go through a recording: those of a burst long before the end are there, and each rank's own."""
    burst = WorkWindow(
        Counting.BURSTS, 100 * SECOND, 107 * SECOND, 0.007, posted=7, posted_bytes=7 << 20, in_flight=3, throughput=2e9,
        latency_p50_ns=24_000.0, latency_p99_ns=95_000.0, uncertainty=0.03,
    )  # fmt: skip
    path = tmp_path / "work"
    recorder = Recorder(path, about={"command": "record"})
    for number, batch in enumerate(node_batches(list(ring_looks(20, stuck_from=None)))):
        if number == 7:
            batch.work = [FlowWindow(1000 + rank, Scope.PORT, burst, rank, "mlx5_0", 1, host="node0") for rank in (0, 1)]
        if number >= 7:
            batch.windows = [replace(w, work=burst) if w.rank == 0 else w for w in batch.windows]
        recorder.put(batch)
    recorder.close("ended")
    page = harmless(run(capsys, path))
    assert "What the network carried" in page.words
    assert "latency 24 µs (p99 95 µs); seen 0.1% of 7.0s, in bursts of probes" in page.words
    data = json.loads(run(capsys, path, "--json"))
    assert [(window["global_rank"], window["work"]["posted"], window["scope"]) for window in data["work"]] == [
        (0, 7, "port"),
        (1, 7, "port"),
    ]
    ranks = {rank["rank"]: rank["work"] for rank in data["ranks"]}
    assert ranks[0]["coverage"] == 0.001 and ranks[0]["bytes_per_s"] == pytest.approx((7 << 20) / 0.007, rel=1e-6)
    assert ranks[1] is None
    assert "What the network carried" not in harmless(run(capsys, written(tmp_path / "none", stuck_from=None))).words


def traced(*files: object, folder: Path) -> ReadTrace:
    """A trace of them that Perfetto's own messages read back, and in which everything nests and has a name."""
    path = folder / "job.pftrace"
    assert main.run(["report", *map(str, files), "--perfetto", "-o", str(path)]) == 0
    trace = ReadTrace(path.read_bytes())
    assert trace.problems == []
    return trace


def test_the_trace_nests_and_flags_the_culprit(stuck: Path, tmp_path: Path) -> None:
    trace = traced(stuck, folder=tmp_path)
    ranks = {line.name: line for host in trace.under("Hosts") for line in trace.under(host.name)}
    assert sorted(ranks) == ["rank 0", "rank 1", "rank 2 ◀ culprit", "rank 3"]
    assert [line.order for _, line in sorted(ranks.items())] == [0, 1, 2, 3]
    for name, line in ranks.items():
        accused = "culprit" in name
        assert any(span.category == "culprit" for span in line.spans) == accused
        assert [span.category for span in line.instants] == ["culprit"] * accused
        assert {span.depth for span in line.spans} == {0, 1}
        assert {span.category for span in line.spans if span.depth == 1} == {"operation"}
        # The states of a rank follow each other without a gap.
        states = [span for span in line.spans if span.depth == 0]
        assert [a.end for a in states[:-1]] == [b.begin for b in states[1:]]
    [verdict] = [span for line in trace.under("Verdicts") for span in line.spans]
    assert verdict.end - verdict.begin > 10e9
    assert verdict.values["evidence"]
    groups = [span for line in trace.under("Communicators") for span in line.spans]
    assert len({span.name for span in groups}) >= 8
    rates = [line for name in ranks for line in trace.under(name)]
    assert {line.unit for line in rates} <= {"bytes/s"}
    assert abs(trace.realtime_ns / 1e9 - json.loads(trace_json(stuck, tmp_path))["begin"]) < 1e-3


def trace_json(recording: Path, folder: Path) -> str:
    path = folder / "report.json"
    assert main.run(["report", str(recording), "--json", "-o", str(path)]) == 0
    return path.read_text()


def test_names_of_a_trace_are_only_text(tmp_path: Path) -> None:
    trace = traced(written(tmp_path / "evil", stuck_from=8, evil=True), folder=tmp_path)
    told = [line.name for line in trace.lines.values()] + [s.name for line in trace.lines.values() for s in line.spans]
    assert not any(character in text for text in told for character in "\x1b\u202e\n")


def test_reading_a_trace_back_finds_what_is_wrong(stuck: Path, tmp_path: Path) -> None:
    traced(stuck, folder=tmp_path)
    whole = Trace.FromString((tmp_path / "job.pftrace").read_bytes())
    last = max(i for i, packet in enumerate(whole.packet) if packet.track_event.type == TrackEvent.TYPE_SLICE_END)

    def problems(change: Callable[[Any], None]) -> list[str]:
        trace = Trace.FromString(whole.SerializeToString())
        change(trace.packet)
        return ReadTrace(trace.SerializeToString()).problems

    def backwards(packets: Any) -> None:
        packets[last].timestamp = 0

    assert any("never ended" in text for text in problems(lambda packets: packets.pop(last)))
    assert any("comes after a later event" in text for text in problems(backwards))
    assert any("is not there" in text for text in problems(lambda packets: packets.pop(1)))
    rank = next(i for i, packet in enumerate(whole.packet) if packet.track_descriptor.name == "rank 0")
    assert any("not described" in text for text in problems(lambda packets: packets.pop(rank)))


def test_a_trace_needs_a_file(stuck: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["report", str(stuck), "--perfetto"]) == 2
    assert "a trace is binary: name the file" in capsys.readouterr().err


@pytest.mark.parametrize("fixture", sorted(path.name for path in FIXTURES.glob("hung-*")))
def test_snapshots_of_real_jobs_have_reports(fixture: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = harmless(run(capsys, FIXTURES / fixture))
    assert "Every rank" in page.words
    assert traced(FIXTURES / fixture, folder=tmp_path).lines


def test_large_jobs_are_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, written(tmp_path / "big", stuck_from=8, world=128))
    harmless(text)
    assert len(text) < 3 << 20


Line = Callable[..., str]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["report"], "nothing to look at"),
        (["report", "--json", "--perfetto", "x"], "exclude each other"),
        (["report", "nowhere"], "no such file"),
        (["replay", "nowhere"], "no such file"),
        (["record", "-o", "x", "--pid", "1", "--max-size", "12Q"], "is not a size"),
    ],
)
def test_mistakes_are_a_line(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(arguments) == 2
    assert said in capsys.readouterr().err


def test_replay_in_lines_and_diagnose_say_what_happened(stuck: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["replay", "--plain", str(stuck)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "recording of 19s" in lines[0]
    assert sum("STOPPED" in line for line in lines) == 1
    assert "verdict stands: rank 2" in lines[-1]
    assert main.run(["diagnose", "--exit-code", str(stuck)]) == 10
    assert VerdictClass.STOPPED.value.upper() in capsys.readouterr().out


def test_diagnose_tells_what_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    looks = list(ring_looks(14, stuck_from=5))
    after = list(ring_looks(30))[20:]
    recorder = Recorder(tmp_path / "a")
    for batch in node_batches([*looks, *after]):
        recorder.put(batch)
    recorder.close()
    assert main.run(["diagnose", "--exit-code", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("RUNNING")
    assert "earlier in this recording" in out
    assert "STOPPED  rank 2" in out


def test_a_recording_is_drawn_as_a_picture(stuck: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["replay", str(stuck), "--seek", "-1", "--screenshot", str(tmp_path / "a.svg"), "--columns", "100"]) == 0
    picture = (tmp_path / "a.svg").read_text()
    assert picture.startswith("<svg")
    assert "STOPPED" in picture
    assert "http" not in picture.replace("http://www.w3.org/2000/svg", "")


def test_flows_are_drawn_on_what_probes_told_and_crowds_stand_beside_the_verdict(stuck: Path, tmp_path: Path) -> None:
    from ncclwatch.model.network import NetworkLook, SocketFacts
    from ncclwatch.paths.probed import SCHEMA, ProbeFile
    from unit.paths.test_flow_map import ETH0, SEND
    from unit.paths.test_measured import LIVE, OWN, probe

    flows = [replace(SEND, channel=n, socket=SocketFacts(1, f"10.0.0.1:{500 + n}", f"10.0.1.1:{40000 + n}")) for n in (0, 1)]
    recorder = Recorder(tmp_path / "flows", about={"command": "record"})
    for batch in node_batches(list(ring_looks(20, world=4, stuck_from=8))):
        batch.network = NetworkLook((ETH0,), flows=tuple(flows))
        recorder.put(batch)
    recorder.close("ended")
    (tmp_path / "probe").write_bytes(msgspec.json.encode(ProbeFile(SCHEMA, (probe(*OWN, *LIVE),))))
    pages = []
    for words in (["--paths", str(tmp_path / "probe")], []):
        assert main.run(["report", str(tmp_path / "flows"), "-o", str(tmp_path / "page"), *words]) == 0
        pages.append((tmp_path / "page").read_text())
    told, untold = pages
    assert "by probes of paths:" in told and told.count("2 flows cross 10.0.0.254 → 10.8.0.2") == 2 and "#c01c28" in told
    assert "Paths of flows" in untold and "2 flows cross" not in untold and "was not asked" in untold
    Page(told)
    assert main.run(["report", str(stuck), "-o", str(tmp_path / "page"), "--paths", str(stuck)]) == 2
