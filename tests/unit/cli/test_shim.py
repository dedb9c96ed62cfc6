"""``ncclwatch shim`` and what doctor says of a process that has it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ncclwatch.cli.main import run
from ncclwatch.collect import shim
from ncclwatch.collect.device import decode, summary
from unit.shim_harness import CAN_BUILD, FakeNccl, build_shim

pytestmark = pytest.mark.skipif(not CAN_BUILD, reason="needs gcc and make")


@pytest.mark.parametrize(
    ("version", "names"),
    [
        ((2, 18, 3), ["LD_PRELOAD", "CUDA_INJECTION64_PATH"]),
        ((2, 22, 3), ["LD_PRELOAD", "CUDA_INJECTION64_PATH"]),
        ((2, 23, 4), ["NCCL_PROFILER_PLUGIN"]),
        ((2, 32, 3), ["NCCL_PROFILER_PLUGIN"]),
        (None, ["NCCL_PROFILER_PLUGIN", "LD_PRELOAD"]),
    ],
)
def test_what_each_nccl_needs(version: tuple[int, int, int] | None, names: list[str]) -> None:
    assert [setting.name for setting in shim.settings(Path("/x.so"), version)] == names


def test_printed_lines_are_shell(capsys: pytest.CaptureFixture[str]) -> None:
    build_shim()
    assert run(["shim", "--print-env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("# ") and all(line.startswith("export ") for line in lines[1:])
    assert any(line.startswith("export LD_PRELOAD=") and "${LD_PRELOAD:+:$LD_PRELOAD}" in line for line in lines)


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ([], 2, "--print-env"),
        (["--frame", "/etc/passwd"], 3, "no probing frame"),
        (["--frame", "/nonexistent"], 3, "cannot read"),
        (["--print-env", "--libnccl", "/etc/passwd"], 3, "libnccl.so.2"),
        (["--pid", "1", "--frame", "x"], 2, "one of them"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    build_shim()
    assert run(["shim", *arguments]) == status
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and says in errors[0]


def test_a_process_with_it_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with FakeNccl() as nccl:
        nccl.do("c = plugin.init(0xabc, rank=3)")
        nccl.do("plugin.whole(c, 0)")
        nccl.do("plugin.whole(c, 1, finish=False)")
        assert run(["shim", "--pid", str(nccl.pid)]) == 0
        text = capsys.readouterr().out
        assert "interface v4" in text and "rank 3 of 4: 2 collectives" in text
        assert "AllReduce #0: GPU finished, 2 of 2 channels done, 1.000 ms" in text
        assert "AllReduce #1: GPU running, 0 of 2 channels done" in text
        assert "unfinished: channel 0 from rank 1, 0 of 4 steps done; step 0: nothing has arrived" in text
        assert run(["shim", "--pid", str(nccl.pid), "--json"]) == 0
        (process,) = json.loads(capsys.readouterr().out)["processes"]
        assert process["device"]["communicators"][0]["hash"] == f"{0xABC:016x}"
        assert "interface v4): kernels seen" in summary(decode(nccl.frame.read()))


def test_built_from_its_sources_alone(tmp_path: Path) -> None:
    assert shim.build(tmp_path / "out").stat().st_size > 10_000
