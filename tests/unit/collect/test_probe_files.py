"""Files of probes: told at first, when they change, and now and then; what cannot be read is said once."""

from __future__ import annotations

import json
import os
from pathlib import Path

from ncclwatch.collect.probe_files import AGAIN_S, ProbeFiles

PROBE = {
    "host": "a", "source": "10.7.0.2", "destination": "10.7.1.2", "protocol": "tcp", "wall_s": 1.0, "wrong": 0.1,
    "paths": [{"port": 1, "source_port": 2, "hops": ["10.8.0.1"], "arrived": True}],
}  # fmt: skip


def write(file: Path, **more: object) -> None:
    file.write_text(json.dumps({"schema": "ncclwatch.pathprobe/1", "probes": [PROBE | more]}))
    os.utime(file, ns=(0, int(str(more.get("wall_s", 1)).replace(".", "")) * 10**9))


def test_they_are_told_when_they_change_and_now_and_then(tmp_path: Path) -> None:
    file = tmp_path / "a.probe"
    write(file)
    files = ProbeFiles([file])
    assert [one.wall_s for one in files.news(0.0)] == [1.0] and files.news(1.0) == ()
    write(file, wall_s=2.0)
    assert [one.wall_s for one in files.news(2.0)] == [2.0] and files.news(3.0) == ()
    assert len(files.news(2.0 + AGAIN_S)) == 1 and files.notes() == ()


def test_a_file_that_is_none_is_said_once_and_takes_nothing_from_others(tmp_path: Path) -> None:
    good, bad = tmp_path / "good", tmp_path / "bad"
    write(good)
    bad.write_text("{")
    files = ProbeFiles([bad, good, tmp_path / "missing"])
    assert len(files.news(0.0)) == 1
    (first, second) = files.notes()
    assert "bad" in first and "missing" in second
    assert len(files.news(AGAIN_S)) == 1 and files.notes() == ()
    assert ProbeFiles().news(0.0) == ()
