"""``paths what-if`` and the files of advice: what they say is what they hold, and a shell and a YAML reader take them."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from ncclwatch.cli import main, paths, paths_advice
from ncclwatch.cli.output import plain
from ncclwatch.model.paths import NodeView
from ncclwatch.paths.flow_map import flow_map
from unit.cli.test_paths_plan import written
from unit.paths.test_flow_map import ETH0, RECV, SEND
from unit.paths.test_measured import LIVE, OWN, probe

FABRIC = """
[regular]
hosts = 4
nics = 1
ports = {ports}
port_gbps = 100
leaves = 4
spines = 4
links = 1
uplink_gbps = 100
rails = false
"""


def fabric(folder: Path, ports: int = 2) -> str:
    (folder / "fabric").write_text(FABRIC.format(ports=ports))
    return str(folder / "fabric")


def exported(script: Path, **environment: str) -> dict[str, str]:
    """What a task gets: lines of ``export NAME=value`` that the prolog prints."""
    said = subprocess.run(
        ["sh", str(script)],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": os.environ["PATH"], "SLURM_PROCID": "5", **environment},
    ).stdout
    lines = [line.removeprefix("export ").partition("=") for line in said.splitlines()]
    assert all(line.startswith("export ") for line in said.splitlines()), said
    return {name: value for name, _, value in lines}


def test_what_is_simulated_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["paths", "what-if", fabric(tmp_path), "--job", "a=0,2", "--seeds", "5"]
    assert main.run(words) == 0
    text = capsys.readouterr().out
    assert text.count("SIMULATED") >= 3 and "NCCL_IB_QPS_PER_CONNECTION=2" in text and "ADVICE  2 queue pairs, planned" in text
    assert main.run([*words, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["schema"] == "ncclwatch.whatif/1" and "SIMULATED" in data["simulated"] and data["best"]["queue_pairs"] == 2
    document = (Path(__file__).parents[3] / "docs/paths.md").read_text("utf-8")
    for name in (*data, *data["changes"][0], *data["today"][0]):
        assert f"`{name}`" in document, name


def test_flows_of_a_map_stand_for_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "f").write_text(
        "".join(f'[[uplink]]\nleaf = "l{leaf}"\nspine = "s{spine}"\ngbps = 100\n' for leaf in (0, 1) for spine in (0, 1))
        + "".join(
            f'[[nic]]\nhost = "{host}"\nname = "eth0"\naddress = "10.0.0.{n + 1}"\nleaves = ["l{n}"]\ngbps = 200\n'
            for n, host in enumerate("ab")
        )
    )
    second = replace(SEND, channel=1, socket=replace(SEND.socket, local="10.0.0.1:50001"))  # type: ignore[type-var]
    other = replace(RECV, channel=1, socket=replace(RECV.socket, remote="10.0.0.1:50001"))  # type: ignore[type-var]
    views = [NodeView("a", [SEND, second], [ETH0]), NodeView("b", [RECV, other], [replace(ETH0, host="b")])]
    (tmp_path / "m").write_text(json.dumps(plain(paths.to_json(flow_map(views), []))))
    assert main.run(["paths", "what-if", str(tmp_path / "f"), "--flows", str(tmp_path / "m"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    planned = next(one for one in data["changes"] if one["planned"] and one["queue_pairs"] == 1)
    assert planned["jobs"][0]["gbps_a_nic"] == [200.0, 200.0, 200.0] and data["today"][0]["gbps_a_nic"][0] == 100.0
    loose = [replace(view, flows=[replace(one, adaptive=True) for one in view.flows]) for view in views]
    (tmp_path / "loose").write_text(json.dumps(plain(paths.to_json(flow_map(loose), []))))
    assert main.run(["paths", "what-if", str(tmp_path / "f"), "--flows", str(tmp_path / "loose")]) == 0
    said = capsys.readouterr()
    assert "2 of 2 flows have NCCL_IB_ADAPTIVE_ROUTING on" in said.err and "NCCL_IB_ADAPTIVE_ROUTING=1 (since" in said.out
    assert main.run(["paths", "what-if", fabric(tmp_path), "--flows", str(tmp_path / "m")]) == 2
    assert "has no NIC eth0 of host a" in capsys.readouterr().err


def test_wrong_jobs_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = fabric(tmp_path)
    for word in ("a", "a=", "=0-1", "a=0", "a=0,0", "a=0-9x", "a=7,8", "a=nohost,host0", "a=²-3"):
        assert main.run(["paths", "what-if", file, "--job", word]) == 2, word
    assert main.run(["paths", "what-if", file, "--job", "a=0,1", "--job", "a=2,3"]) == 2
    assert (
        main.run(["paths", "what-if", file, "--bond", "x"]) == 2 and main.run(["paths", "what-if", str(tmp_path / "none")]) == 2
    )
    assert main.run(["paths", "what-if", fabric(tmp_path, 1), "--slurm", str(tmp_path / "s"), "--floor", "1000"]) == 2
    assert capsys.readouterr().err.count("\n") == 13


def test_advice_of_variables_is_taken_by_a_shell_and_by_yaml(tmp_path: Path) -> None:
    script, config = tmp_path / "s", tmp_path / "k"
    words = [
        "paths",
        "what-if",
        fabric(tmp_path, 1),
        "--slurm",
        str(script),
        "--kubernetes",
        str(config),
        "--floor",
        "0",
        "--seeds",
        "5",
    ]
    assert main.run(words) == 0
    wanted = exported(script)
    assert (
        set(wanted) == {"NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_SPLIT_DATA_ON_QPS"}
        and int(wanted["NCCL_IB_QPS_PER_CONNECTION"]) > 1
    )
    assert set(exported(script, NCCL_IB_QPS_PER_CONNECTION="1")) == {"NCCL_IB_SPLIT_DATA_ON_QPS"}
    (found,) = yaml.safe_load_all(config.read_text())
    assert found["kind"] == "ConfigMap" and found["data"] == wanted and "SIMULATED" in config.read_text()


def test_advice_of_ports_is_taken_by_a_shell_and_by_yaml(tmp_path: Path) -> None:
    files = written(tmp_path, probe(*OWN, *LIVE))
    script, config, plan = tmp_path / "s", tmp_path / "k", tmp_path / "p p.pins"
    words = ["paths", "plan", *files, "-o", str(plan), "--slurm", str(script), "--kubernetes", str(config)]
    assert main.run(words) == 0
    assert exported(script) == {}, "without the library there is nothing to load"
    library = tmp_path / "lib.so"
    library.touch()
    found = exported(script, NCCLWATCH_PINS_LIBRARY=str(library), LD_PRELOAD="/x.so")
    assert found == {"LD_PRELOAD": f"{library}:/x.so", "NCCLWATCH_PATH_PINS": str(plan), "RANK": "5"}
    assert "RANK" not in exported(script, NCCLWATCH_PINS_LIBRARY=str(library), RANK="3")
    variables, ports = yaml.safe_load_all(config.read_text())
    assert (
        ports["data"]["plan.pins"] == plan.read_text() and variables["data"]["NCCLWATCH_PATH_PINS"] == "/etc/ncclwatch/plan.pins"
    )
    assert main.run(["paths", "plan", *files, "--slurm", str(script)]) == 2


def test_values_and_names_are_quoted() -> None:
    made = paths_advice.slurm({"A_B": "x; rm -rf $HOME"}, "", "h")
    assert "'x; rm -rf $HOME'" in made
    with pytest.raises(ValueError, match="name"):
        paths_advice.slurm({"A;B": "1"}, "", "h")
