"""CPU limits of control groups, as the kernel's files say them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclwatch.model.state import CpuLimit
from ncclwatch.target.cgroup import cpu_limit
from unit.fake_proc import FakeProcess, write_proc

STAT_2 = "usage_usec 900\nuser_usec 500\nsystem_usec 400\nnr_periods {}\nnr_throttled {}\nthrottled_usec 12345\n"


STAT_1 = "nr_periods {}\nnr_throttled {}\nthrottled_time 12345\n"


def tree(tmp_path: Path, groups: str, mounts: str, stats: dict[str, str]) -> Path:
    """A /proc with one process in these groups, and the control groups' files."""
    for path, text in stats.items():
        (tmp_path / "cg" / path).mkdir(parents=True, exist_ok=True)
        (tmp_path / "cg" / path / "cpu.stat").write_text(text)
    proc = write_proc(tmp_path / "proc", [FakeProcess(7, cgroup=groups)])
    (proc / "self").mkdir()
    (proc / "self" / "mountinfo").write_text(mounts.replace("CG", str(tmp_path / "cg")))
    return proc


UNIFIED = "30 1 0:26 / CG rw,nosuid - cgroup2 cgroup2 rw\n"


def test_the_limit_of_the_pod_above_the_container_counts(tmp_path: Path) -> None:
    stats = {"": "usage_usec 5\n", "pod": STAT_2.format(50, 40), "pod/ctr": STAT_2.format(0, 0)}
    found = cpu_limit(7, tree(tmp_path, "0::/pod/ctr\n", UNIFIED, stats))
    assert found == CpuLimit(50, 40, (tmp_path / "cg" / "pod").stat().st_ino)


def test_the_older_interface_is_read_where_it_holds_the_controller(tmp_path: Path) -> None:
    mounts = (
        "31 1 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "32 1 0:28 /docker CG rw - cgroup cgroup rw,cpu,cpuacct\n"
        "33 1 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    )
    stats = {"abc": STAT_1.format(9, 3)}
    proc = tree(tmp_path, "5:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n0::/elsewhere\n", mounts, stats)
    found = cpu_limit(7, proc)
    assert found is not None and (found.periods, found.throttled) == (9, 3), "the mount shows the hierarchy from /docker on"


def test_without_a_limit_nothing_was_held_back(tmp_path: Path) -> None:
    assert cpu_limit(7, tree(tmp_path, "0::/\n", UNIFIED, {"": "usage_usec 5\n"})) == CpuLimit(0, 0)


@pytest.mark.parametrize(
    ("groups", "mounts"),
    [
        ("0::/../../other\n", UNIFIED),  # outside of what this control group namespace shows
        ("0::/pod\n", ""),
        ("0::/pod\n", "30 1 0:26 / /nowhere rw - cgroup2 cgroup2 rw\n"),
        ("0::/pod\n", "no words - and\nmore - cgroup2\n"),
        ("", UNIFIED),
        ("not:a line\n::\n", UNIFIED),
        ("0::/pod\n", "30 1 0:26 /only/this CG rw - cgroup2 cgroup2 rw\n"),
    ],
)
def test_what_cannot_be_read_is_not_known(tmp_path: Path, groups: str, mounts: str) -> None:
    assert cpu_limit(7, tree(tmp_path, groups, mounts, {})) is None


def test_a_process_that_is_gone_or_files_that_are_damaged_are_not_known(tmp_path: Path) -> None:
    proc = tree(tmp_path, "0::/pod\n", UNIFIED, {"pod": "\0\0 nr_periods nr_periods 5 6\n"})
    assert cpu_limit(7, proc) is None
    assert cpu_limit(8, proc) is None
