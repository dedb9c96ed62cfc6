"""``paths``: rows that fit, reasons in words, a stable JSON; of recordings the newest flows of each host."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from ncclwatch.cli import main, paths, paths_text
from ncclwatch.collect.batch import NodeBatch
from ncclwatch.model.network import FlowRecord, NetworkLook, SocketFacts
from ncclwatch.model.paths import NodeView
from ncclwatch.paths.flow_map import flow_map
from ncclwatch.paths.probed import SCHEMA, ProbeFile
from ncclwatch.store.recorder import Recorder
from ncclwatch.text import Style, width
from unit.paths.test_flow_map import ETH0, MLX5, RECV, ROCE, ROCE_RECV, SEND
from unit.paths.test_measured import LIVE, OWN, probe

MAPPED = flow_map(
    [NodeView("a", [SEND, replace(ROCE, channel=1)], [ETH0, MLX5]), NodeView("b", [RECV, replace(ROCE_RECV, channel=1)])]
)


@pytest.mark.parametrize("cells", [40, 80, 120, 160])
def test_no_line_is_wider_than_the_terminal(cells: int) -> None:
    hostile = replace(SEND, device="é" * 200 + "\x1b[2J", socket=None)
    for line in paths_text.screen(flow_map([NodeView("h" * 99, [hostile])]) + MAPPED, width=cells, style=Style(enabled=False)):
        assert width(line) <= cells or " " not in line.strip()
        assert "\x1b" not in line


def test_a_row_a_flow_and_how_it_is_known() -> None:
    text = list(paths_text.screen(MAPPED, width=200, style=Style(enabled=False)))
    assert "tcp 10.0.0.1:50000 → 10.0.0.2:40000" in text[1] and " seen " in text[1]
    assert "udp 10.0.0.1:49458 → 10.0.0.2:4791" in text[2] and " predicted " in text[2]
    assert any("predicted by the rule both-queue-pairs" in line for line in text)


def test_what_is_missing_is_said_once() -> None:
    alone = flow_map([NodeView("a", [ROCE, replace(ROCE, channel=1)], [MLX5])])
    text = list(paths_text.screen(alone, width=200, style=Style(enabled=False)))
    assert sum("the other end was not looked at" in line for line in text) == 1
    assert "not known of 2 flows" in "\n".join(text)


def test_the_json_is_what_the_document_says() -> None:
    data = paths.to_json(MAPPED, ["n"])
    first, second = data["flows"]
    assert (data["schema"], data["notes"]) == ("ncclwatch.paths/1", ["n"])
    assert first["five_tuple"] == {
        "protocol": "tcp", "source": "10.0.0.1", "source_port": 50000, "destination": "10.0.0.2", "destination_port": 40000
    }  # fmt: skip
    assert (first["origin"], first["rule"], second["origin"], second["rule"]) == ("seen", None, "predicted", "both-queue-pairs")
    assert second["queue_pair"] == 17 and second["source"]["rate_gbps"] == 400.0 and second["source"]["bond_port"] is None
    document = (Path(__file__).parents[3] / "docs/flow-map.md").read_text("utf-8")
    assert all(f"`{name}`" in document or f".{name}`" in document for name in first)


def record(file: Path, host: str, *looks: NetworkLook, every: tuple[FlowRecord, ...] = ()) -> None:
    recorder = Recorder(file, about={"host": host})
    for number, look in enumerate(looks):
        batch = NodeBatch(host=host, boot_id=host, sequence=number, time_ns=number, wall_ns=number * 10**9, network=look)
        batch.all_flows = every if number == 0 else ()
        recorder.put(batch)
    recorder.close("done")


def test_recordings_of_two_nodes_are_joined(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = replace(ROCE, ends=None)
    record(tmp_path / "a", "a", NetworkLook((MLX5,), flows=(old,)), NetworkLook((MLX5,), flows=(ROCE,)), NetworkLook((MLX5,)))
    record(tmp_path / "b", "b", NetworkLook(flows=(ROCE_RECV,)))
    assert main.run(["paths", "--json", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    (one,) = json.loads(capsys.readouterr().out)["flows"]
    assert (one["five_tuple"]["source_port"], one["source"]["host"], one["destination"]["host"]) == (0xC132, "a", "b")


def test_of_many_flows_a_recording_tells_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A look holds some of them; those that were told all together are the map."""
    every = tuple(replace(SEND, channel=n) for n in range(600))
    record(tmp_path / "a", "a", NetworkLook((ETH0,), flows=every[:256]), NetworkLook((ETH0,), flows=every[:256]), every=every)
    assert main.run(["paths", "--json", str(tmp_path / "a")]) == 0
    assert len(json.loads(capsys.readouterr().out)["flows"]) == 600


def test_who_crowds_is_said_with_the_map(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flows = [replace(SEND, channel=n, socket=SocketFacts(1, f"10.0.0.1:{500 + n}", f"10.0.1.1:{40000 + n}")) for n in (0, 1)]
    record(tmp_path / "a", "a", NetworkLook((ETH0,), flows=tuple(flows)))
    (tmp_path / "probe").write_bytes(msgspec.json.encode(ProbeFile(SCHEMA, (probe(*OWN, *LIVE),))))
    words = ["paths", str(tmp_path / "a"), "--paths", str(tmp_path / "probe")]
    assert main.run(words) == 0
    assert "CROWDED  2 flows cross 10.0.0.254 → 10.8.0.2" in capsys.readouterr().out
    assert main.run([*words, "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)["crowded"]
    assert one["link"] == ["10.0.0.254", "10.8.0.2"] and [each["channel"] for each in one["flows"]] == [0, 1]


def test_a_recording_without_flows_is_no_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record(tmp_path / "a", "a", NetworkLook((MLX5,)))
    assert main.run(["paths", str(tmp_path / "a")]) == 3
    assert main.run(["paths", "--all", str(tmp_path / "a")]) == 2
    (tmp_path / "b").write_text("no recording")
    assert main.run(["paths", str(tmp_path / "b")]) == 2
    assert capsys.readouterr().err.count("\n") == 3


def test_records_of_older_agents_are_read() -> None:
    """A field that the other side does not know is left out: the record stands without it."""
    data = msgspec.to_builtins(ROCE)
    del data["ends"]
    assert msgspec.convert(data, FlowRecord).ends is None
