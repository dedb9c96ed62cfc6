"""What a plan is made of: flow maps, probes, verdicts and recordings, in any order."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ncclwatch.cli import main
from ncclwatch.cli.paths_inputs import inputs_of
from ncclwatch.collect.batch import NodeBatch
from ncclwatch.errors import UsageError
from ncclwatch.model.network import NetworkLook, SocketFacts
from ncclwatch.model.verdict import LinkRef, VerdictClass
from ncclwatch.paths.probed import SCHEMA, ProbeFile
from ncclwatch.store.recorder import Recorder
from unit.cli.test_paths_plan import DOCUMENT, FIRST, SECOND, written
from unit.paths.test_flow_map import ETH0
from unit.paths.test_known import FILE as KNOWN
from unit.paths.test_measured import LEAF, LIVE, OWN, probe
from unit.paths.test_suspects import verdict

LINE = f"{LEAF} → 10.8.0.2 is dead: none of 8 source ports takes it any more (rank 8 → 9, channel 0; confidence 97%)"


def test_a_plan_avoids_what_a_verdict_calls_dead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = written(tmp_path, probe(*OWN, *LIVE))
    (tmp_path / "v").write_text(json.dumps(verdict(VerdictClass.RUNNING, LINE)))
    assert main.run(["paths", "plan", *files, str(tmp_path / "v"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert [(one["link"], one["left"], one["confidence"]) for one in data["avoided"]] == [([LEAF, "10.8.0.2"], 0.0, 0.97)]
    assert {one["hops"][1] for one in data["connections"]} == {"10.8.1.2"}
    assert main.run(["paths", "plan", *files, str(tmp_path / "v")]) == 0
    assert f"AVOIDED  {LEAF} → 10.8.0.2 is dead (confidence 97%" in capsys.readouterr().out


def test_a_plan_takes_speeds_and_dead_links_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = written(tmp_path, probe(*OWN, *LIVE))
    far = 'leaf = "far"\nspine = "s0"\ngbps = '
    for gbps, says in ((0, "is dead"), (20, "is slow (20% of what it should carry)")):
        (tmp_path / "known").write_text(KNOWN.replace(f"{far}100", f"{far}{gbps}"))
        assert main.run(["paths", "plan", *files, "--known", str(tmp_path / "known"), "--json"]) == 0
        data = json.loads(capsys.readouterr().out)
        assert [one["link"] for one in data["avoided"]] == [["10.8.0.2", "10.7.0.1"]] and says in data["avoided"][0]["text"]
        assert {one["hops"][1] for one in data["connections"]} == {"10.8.1.2"}
    (tmp_path / "known").write_text(KNOWN)
    assert main.run(["paths", "plan", *files, "--known", str(tmp_path / "known"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["avoided"] == []


def lines(*said: dict[str, Any]) -> str:
    first = {"type": "attached", "schema": "ncclwatch.attach/1"}
    return "".join(json.dumps(one) + "\n" for one in (first, *said))


def test_of_what_attach_wrote_those_verdicts_count_that_stand(tmp_path: Path) -> None:
    stands, over = verdict(VerdictClass.RUNNING, LINE), verdict(VerdictClass.HARDWARE, link=LinkRef(4, 5, "net"))
    begun = [{"type": "verdict", "verdict": each} for each in (over, stands)]
    file = tmp_path / "attach"
    file.write_text(lines(*begun, {"type": "recovery", "id": over["id"], "verdict": over}) + '{"type": "verd')
    assert [one.link for one in inputs_of([file]).told] == [(LEAF, "10.8.0.2")]
    file.write_text(lines({"type": "note"}))
    with pytest.raises(UsageError):
        inputs_of([file])


def test_a_recording_has_flows_and_probes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(tmp_path / "a", about={"host": "a"})
    look = NetworkLook((ETH0,), flows=(FIRST, SECOND))
    batch = NodeBatch(host="a", boot_id="a", sequence=0, time_ns=1, wall_ns=10**9, network=look, paths=(probe(*OWN, *LIVE),))
    recorder.put(batch)
    recorder.close("done")
    found = inputs_of([tmp_path / "a"])
    assert len(found.flows) == 2 and [one.source for one in found.probes] == ["10.0.0.1"] and not found.told
    (tmp_path / "probe").write_bytes(msgspec.json.encode(ProbeFile(SCHEMA, (probe(*OWN, *LIVE),))))
    assert main.run(["paths", "plan", str(tmp_path / "a"), str(tmp_path / "probe")]) == 0
    assert "CROWDED  2 flows cross" in capsys.readouterr().out


@pytest.mark.parametrize("data", [b"", b"[]", b'{"type": 1}', b'{"schema": "ncclwatch.verdict/1"}', b'{"schema": 3}', b"\xff"])
def test_other_files_are_refused_in_one_line(tmp_path: Path, data: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x").write_bytes(data)
    assert main.run(["paths", "plan", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_topology_that_was_learned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = written(tmp_path, probe(*OWN, *LIVE, wrong=0.1))
    (tmp_path / "v").write_text(json.dumps(verdict(VerdictClass.RUNNING, LINE)))
    (tmp_path / "known").write_text(KNOWN)
    words = ["paths", "topology", *files, str(tmp_path / "v"), "--known", str(tmp_path / "known")]
    assert main.run([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    up = next(one for one in data["edges"] if one["link"] == [LEAF, "10.8.0.2"])
    assert up["confidence"] > 0.99 and up["state"]["confidence"] == 0.97 and len(up["flows"]) == 2 and up["ports"] == 6
    assert any("by the file it lives" in one["text"] for one in data["contradictions"])
    for name in (*data, *up, *data["contradictions"][0]):
        assert f"`{name}`" in DOCUMENT, name
    assert main.run(words) == 0
    text = capsys.readouterr().out
    assert "dead, 97%" in text and "CONTRADICTED  " in text and "CONFIDENCE" in text
    assert main.run(["paths", "topology", *files]) == 0 and "CONTRADICTED" not in capsys.readouterr().out


def test_rates_of_a_recording_that_drop_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two flows lose half of their rate at the same times, a third one at others."""
    recorder = Recorder(tmp_path / "a", about={"host": "a"})
    third = replace(SECOND, channel=2, socket=SocketFacts(1, "10.0.0.1:502", "10.0.1.1:40002"))
    for number in range(80):
        low, other = number * number % 7 < 2, number * number % 11 < 4
        rates = (1e6 if low else 2e6, 1e6 if low else 2e6, 1e6 if other else 2e6)
        flows = tuple(replace(one, bandwidth=rate) for one, rate in zip((FIRST, SECOND, third), rates, strict=True))
        time_ns = 3 * number * 10**9
        look = NetworkLook((ETH0,), flows=flows)
        recorder.put(NodeBatch(host="a", boot_id="a", sequence=number, time_ns=time_ns, wall_ns=time_ns, network=look))
    recorder.close("done")
    assert main.run(["paths", "topology", str(tmp_path / "a"), "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["shared"]
    assert [each["channel"] for each in one["flows"]] == [0, 1] and one["confidence"] > 0.9
    assert main.run(["paths", "topology", str(tmp_path / "a")]) == 0
    assert "HINT  2 flows seem to share a bottleneck" in capsys.readouterr().out
