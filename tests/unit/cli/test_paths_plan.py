"""``paths probe``, ``plan`` and ``follow``: files in, lines and JSON out, errors in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ncclwatch.cli import main, paths, paths_files, paths_probe
from ncclwatch.cli.output import plain
from ncclwatch.errors import UsageError
from ncclwatch.model.network import NicRecord, QueuePairEnds, SocketFacts
from ncclwatch.model.paths import NodeView, Probe
from ncclwatch.paths.flow_map import flow_map
from ncclwatch.paths.measured_plan import plan
from ncclwatch.paths.ports import ROCE_PORT
from ncclwatch.paths.probed import SCHEMA, ProbeFile
from unit.paths.test_flow_map import ETH0, MLX5, RECV, ROCE, ROCE_RECV, SEND
from unit.paths.test_measured import FLOWS, LIVE, OWN, A, B, probe, seen

FIRST = replace(SEND, socket=SocketFacts(1, "10.0.0.1:500", "10.0.1.1:40000"))
SECOND = replace(SEND, channel=1, socket=SocketFacts(1, "10.0.0.1:501", "10.0.1.1:40001", rtt_us=9, min_rtt_us=8))
LAST = replace(RECV, socket=SocketFacts(1, "10.0.1.1:40000", "10.0.0.1:500"))
DOCUMENT = (Path(__file__).parents[3] / "docs/flow-map.md").read_text("utf-8")


def written(folder: Path, *probes: Probe) -> tuple[str, str]:
    (folder / "map").write_text(
        json.dumps(plain(paths.to_json(flow_map([NodeView("a", [FIRST, SECOND], [ETH0]), NodeView("b", [LAST])]), [])))
    )
    (folder / "probe").write_bytes(msgspec.json.encode(ProbeFile(SCHEMA, probes)))
    return str(folder / "map"), str(folder / "probe")


def test_a_plan_in_words_in_json_and_as_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = written(tmp_path, probe(*OWN, *LIVE))
    assert main.run(["paths", "plan", *files, "-o", str(tmp_path / "pins")]) == 0
    text = capsys.readouterr().out
    assert (
        "CROWDED  2 flows cross 10.0.0.254 → 10.8.0.2 (rank 8 → 9, channels 0-1) while 10.0.0.254 → 10.8.1.2 carries none" in text
    )
    assert "+100%" in text and "PREDICTED" in text and "nothing is applied" in text
    pins = (tmp_path / "pins").read_text().splitlines()
    assert pins[0] == "ncclwatch-path-pins 1" and pins[1] == "listen 9 10.0.1.1 26000 26001"
    assert [line.split()[:4] for line in pins[2:]] == [
        ["connect", "8", "10.0.1.1", "26000"],
        ["connect", "8", "10.0.1.1", "26001"],
    ]
    assert main.run(["paths", "plan", *files, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "ncclwatch.pathplan/1" and len(data["connections"]) == 2
    for name in (*data, *data["crowded"][0], *data["gains"][0], *data["connections"][0]):
        assert f"`{name}`" in DOCUMENT, name


def test_a_plan_that_gains_too_little_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = written(tmp_path, probe(*OWN, LIVE[0], replace(seen(501, 1, 40001), live=True)))
    assert main.run(["paths", "plan", *files, "-o", str(tmp_path / "pins")]) == 0
    assert "REFUSED" in capsys.readouterr().out and not (tmp_path / "pins").exists()


def test_the_file_of_one_host_holds_what_is_its_own() -> None:
    """Who connects from an address of the host, and who listens on one."""
    found = plan(FLOWS, [probe(*OWN, *LIVE)], floor=0.0)
    sends, receives = (paths_files.pins_of(found.demands, found.chosen, {own}).splitlines()[1:] for own in (A, B))
    assert [line.split()[0] for line in sends] == ["connect", "connect"] and receives == [f"listen 1 {B} 26000 26001"]
    assert paths_files.pins_of(found.demands, found.chosen).splitlines()[1:] == [*receives, *sends]


BOND = replace(MLX5, netdev="bond0", bond=("eth0", "eth1"))
PAIRS = [
    (replace(ROCE, ends=QueuePairEnds(17, n, "10.0.1.1")), replace(ROCE_RECV, ends=QueuePairEnds(18 + 40 * n, n, "10.0.0.1")))
    for n in range(2)
]


def over_roce(folder: Path, nic: NicRecord, *, adaptive: bool = False) -> list[str]:
    """Files of two queue pairs from such a NIC, and paths that their next ones may take."""
    views = [
        NodeView("a", [replace(one, adaptive=adaptive) for one, _ in PAIRS], [nic]),
        NodeView("b", [other for _, other in PAIRS]),
    ]
    (folder / "map").write_text(json.dumps(plain(paths.to_json(flow_map(views), []))))
    made = probe(*(seen(51000 + n, n % 2, ROCE_PORT) for n in range(4)))
    (folder / "probe").write_bytes(msgspec.json.encode(ProbeFile(SCHEMA, (made,))))
    return [str(folder / "map"), str(folder / "probe"), "--floor", "0"]


def test_ports_of_a_bond_are_in_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["paths", "plan", *over_roce(tmp_path, BOND), "-o", str(tmp_path / "pins")]) == 0
    said = capsys.readouterr()
    assert "BOND PORT" in said.out and "1 of 2" in said.out and "2 of 2" in said.out and "look at the paths again" in said.err
    assert (tmp_path / "pins").read_text().splitlines()[1:] == ["roce 8 10.0.1.1 51000 51001", "bond 8 10.0.1.1 1 2"]
    assert main.run(["paths", "plan", *over_roce(tmp_path, BOND), "--json"]) == 0
    assert [one["bond_port"] for one in json.loads(capsys.readouterr().out)["connections"]] == [1, 2]
    for nic in (MLX5, replace(BOND, bond_active="eth1")):
        assert main.run(["paths", "plan", *over_roce(tmp_path, nic), "-o", str(tmp_path / "pins")]) == 0
        assert "BOND PORT" not in capsys.readouterr().out and "bond" not in (tmp_path / "pins").read_text()


def test_a_job_set_up_for_adaptive_routing_is_refused_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = over_roce(tmp_path, MLX5, adaptive=True)
    assert main.run(["paths", "plan", *files, "-o", str(tmp_path / "pins")]) == 0
    said = capsys.readouterr().out
    assert "REFUSED  2 flows of job 0000000000000abc have NCCL_IB_ADAPTIVE_ROUTING on" in said and "GAIN" not in said
    assert not (tmp_path / "pins").exists()


def test_wrong_files_are_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = written(tmp_path, probe(*OWN))
    for number, data in enumerate(
        (b"", b"\xff", b"[]", b'{"schema": 1}', b'{"schema": "x"}', b'{"schema": "ncclwatch.paths/1"}')
    ):
        (tmp_path / f"{number}").write_bytes(data)
        assert main.run(["paths", "plan", files[1], str(tmp_path / f"{number}")]) == 2, data
    assert main.run(["paths", "plan", files[0]]) == 2 and main.run(["paths", "plan", files[1]]) == 2
    assert main.run(["paths", "plan", str(tmp_path / "none")]) == 2
    assert main.run(["paths", "probe", "nohost"]) == 2
    assert main.run(["paths", "follow", *files, "-o", str(tmp_path / "x")]) == 2
    assert capsys.readouterr().err.count("\n") == 11


def test_shares_of_some_flows_only_weigh_nothing(tmp_path: Path) -> None:
    data = plain(paths.to_json(flow_map([NodeView("a", [FIRST, SECOND], [ETH0])]), []))
    data["flows"][0]["share"] = None
    (tmp_path / "map").write_text(json.dumps(data))
    assert [one.weight for one in paths_files.flows_of([tmp_path / "map"])] == [1.0, 1.0]
    data["flows"][0]["share"] = data["flows"][1]["share"] * 3
    (tmp_path / "map").write_text(json.dumps(data))
    assert [one.weight for one in paths_files.flows_of([tmp_path / "map"])] == [1.5, 0.5]


@pytest.mark.parametrize("text", ["", "x", "0", "70000", "5-", "-5", "1-70000", "1²"])
def test_what_is_no_ports(text: str) -> None:
    with pytest.raises(UsageError):
        paths_probe.numbers(text, "--ports")


def test_ports_and_words_of_a_probe() -> None:
    assert paths_probe.numbers("26000, 26002-26004,26003", "--ports") == [26000, 26002, 26003, 26004]
    lines = list(paths_probe.describe(probe(*OWN, *LIVE, wrong=0.1)))
    assert "8 of 8 source ports told, 2 paths; a path is another one with probability 10% at most" in lines[0]
    assert "10.0.0.254 → 10.8.0.2 → 10.7.0.1" in lines[1] and sum("running flow" in line for line in lines) == 2


def test_a_probe_of_this_host_says_that_nobody_is_between(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main.run(["paths", "probe", "127.0.0.1", "--looks", "1", "-o", str(tmp_path / "p")]) == 3
    said = capsys.readouterr()
    assert "0 of 32 source ports told" in said.out and "--queues" in said.err
    stored: dict[str, Any] = json.loads((tmp_path / "p").read_text())
    assert stored["probes"][0]["source"] == "127.0.0.1"
