"""CPU limits of control groups: what the kernel's files say, and what it adds to a verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ncclwatch.engine.case import Known
from ncclwatch.engine.diagnose import diagnose
from ncclwatch.engine.patience import Patience
from ncclwatch.engine.slow.blame import find
from ncclwatch.engine.slow.contention import held_back_alone, lacks_cpu
from ncclwatch.engine.slow.findings import Context, Kind
from ncclwatch.engine.slow.looks import Activity, CpuTimes, Hold, LinkPlace, Look, Part
from ncclwatch.engine.slow.profile import add_up
from ncclwatch.model.identity import ProcessKey
from ncclwatch.model.state import CpuLimit, ProcessSample
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.target.cgroup import cpu_limit
from unit.fake_proc import FakeProcess, write_proc
from unit.synthetic import absent_from_ring, frozen_ring, looks, silent_link

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


def limited(samples: list[list[ProcessSample]], ranks: dict[int, tuple[int, int]]) -> list[list[ProcessSample]]:
    """The second sample of these ranks says (periods, throttled) more than the first."""
    done = []
    for rank, own in enumerate(samples):
        more = ranks.get(rank, (0, 0))
        base = CpuLimit(100, 10) if rank in ranks else CpuLimit(0, 0)
        later = CpuLimit(base.periods + more[0], base.throttled + more[1])
        done.append([replace(own[0], cpu_limit=base), *(replace(one, cpu_limit=later) for one in own[1:])])
    return done


def test_who_is_named_for_standing_still_and_is_held_back_is_shown_so() -> None:
    samples = limited(looks(frozen_ring(2)), {2: (50, 49)})
    verdict = diagnose(samples)
    assert [culprit.rank for culprit in verdict.culprits] == [2]
    assert "a CPU limit holds it back in 98% of the limit's periods" in verdict.evidence[0]
    assert verdict.summary.endswith("a CPU limit holds it back in 98% of its periods")
    assert verdict.next_steps[0].startswith("on node2: raise the CPU limit of process 1002")


def test_limits_of_others_or_that_hold_nobody_back_are_not_told() -> None:
    for ranks in ({1: (50, 50)}, {2: (50, 2)}, {}):
        verdict = diagnose(limited(looks(frozen_ring(2)), ranks))
        assert not any("CPU limit" in line for line in (*verdict.evidence, *verdict.next_steps))


def test_who_is_held_back_alone_is_given_longer_before_that_is_a_hang() -> None:
    """A rank with a fiftieth of a CPU needs ten seconds for what takes others a fifth of one; for good it is not excused."""

    def said(limits: dict[int, tuple[int, int]], seconds: int) -> Verdict:
        return diagnose(limited(looks(absent_from_ring(), count=seconds), limits), Known(patience=Patience(5)))

    throttled = {2: (50, 49)}
    early = said(throttled, 7)
    assert early.verdict_class is VerdictClass.UNKNOWN and early.culprits == ()
    assert early.summary.endswith("a CPU limit holds rank 2 back in 98% of its periods")
    assert early.next_steps[0].startswith("on node2: raise the CPU limit")
    for limits, seconds in ((throttled, 33), ({}, 7), ({1: (50, 49)}, 7), ({2: (50, 5)}, 7)):
        assert [culprit.rank for culprit in said(limits, seconds).culprits] == [2], (limits, seconds)
    # Where a limit holds everybody back it tells nothing of one of them.
    assert [culprit.rank for culprit in said(dict.fromkeys(range(4), (50, 49)), 7).culprits] == [2]


def test_a_link_with_an_end_that_is_held_back_is_given_longer_too() -> None:
    def said(limits: dict[int, tuple[int, int]], seconds: int, before: CpuLimit | None = None) -> Verdict:
        samples = limited(looks(silent_link(), count=seconds), limits)
        if before is not None:
            samples[2] = [replace(one, cpu_limit=before) for one in samples[2]]
        return diagnose(samples, Known(patience=Patience(5)))

    assert [culprit.rank for culprit in said({}, 7).culprits] == [1, 2]
    for limits, before in (({1: (50, 49)}, None), ({2: (50, 49)}, None), ({}, CpuLimit(139, 125, 7))):
        verdict = said(limits, 7, before)
        assert verdict.verdict_class is VerdictClass.UNKNOWN, (limits, before)
        assert f"a CPU limit holds rank {next(iter(limits), 2)} back in 9" in verdict.summary
    assert [culprit.rank for culprit in said({2: (50, 49)}, 33).culprits] == [1, 2], "for good it is not excused"
    assert said({0: (50, 49)}, 7).culprits and said({}, 7, CpuLimit(139, 12, 7)).culprits, "of others, or hardly at all"


# --- in a job that is slow -----------------------------------------------------------------------------------------------

RANKS = 4
KEYS = [ProcessKey("boot", 100 + rank, 1, "build") for rank in range(RANKS)]


def slow_looks(held_back: float, begin: float = 0.0, *, slow: bool = True) -> list[Look]:
    """Thirty looks a second apart; rank 1 computes a little more than the others and its links are a little slower."""
    found = []
    for second in range(30):
        at = begin + second
        limits = [CpuLimit(int(10 * at), int(10 * at * held_back), 77) if rank == 1 else CpuLimit(0, 0) for rank in range(RANKS)]
        times = {key: CpuTimes(at, at * 3.0, at * 0.4, limits[rank]) for rank, key in enumerate(KEYS)}
        link = LinkPlace(7, 7, RANKS, 1, 2, KEYS[1], KEYS[2])
        holds: tuple[Hold, ...] = ()
        if slow and second % 10 == 0:
            holds = (Hold(Part.GPU, 0.3, KEYS[1], None, "AllReduce", 7),)
        elif slow and second % 10 == 5:
            holds = (Hold(Part.LINK, 0.5, None, link, "AllReduce", 7),)
        activities = dict.fromkeys(KEYS, Activity.WAITS if second % 2 else Activity.COMPUTES)
        found.append(Look(at, RANKS, holds, activities, times))
    return found


def slow_context() -> Context:
    return Context(
        np.zeros(RANKS, np.int64), np.arange(RANKS), np.full(RANKS, np.nan), lost=0.25, stretch=1.33,
        before=add_up(slow_looks(0.0, begin=1.0, slow=False), KEYS), noise=0.05,
    )  # fmt: skip


def test_a_rank_that_a_limit_holds_back_is_blamed_for_its_links_as_well() -> None:
    found = find(add_up(slow_looks(0.9, begin=100.0), KEYS), slow_context())
    assert [(one.kind, one.members) for one in found] == [(Kind.HOST, (1,))]
    profile = add_up(slow_looks(0.9, begin=100.0), KEYS)
    assert "CPU throttling" in lacks_cpu(profile, slow_context(), [1]) and "90%" in lacks_cpu(profile, slow_context(), [1])


def test_the_same_without_a_limit_is_not_its_cpu() -> None:
    profile = add_up(slow_looks(0.05, begin=100.0), KEYS)
    assert not held_back_alone(profile, slow_context()).any()
    assert (Kind.HOST, (1,)) not in [(one.kind, one.members) for one in find(profile, slow_context())]


def test_a_limit_that_held_back_before_as_well_explains_nothing_new() -> None:
    profile = add_up(slow_looks(0.9, begin=100.0), KEYS)
    known = replace(slow_context(), before=add_up(slow_looks(0.8, begin=1.0, slow=False), KEYS))
    assert not held_back_alone(profile, known).any()


def test_from_the_start_a_limit_needs_no_past() -> None:
    start = replace(slow_context(), lost=None, before=None, stretch=1.0, noise=1.0)
    found = find(add_up(slow_looks(0.9, begin=100.0), KEYS), start)
    assert [(one.kind, one.members) for one in found] == [(Kind.HOST, (1,))]
    assert not find(add_up(slow_looks(0.0, begin=100.0), KEYS), start)


def test_ranks_under_one_limit_are_blamed_together() -> None:
    """Ranks 1 and 2 are in one container; only rank 1 is seen to hold the others up."""

    def shared(looks: list[Look]) -> list[Look]:
        done = []
        for look in looks:
            times = {k: replace(t, limit=look.cpu_times[KEYS[1]].limit) if k == KEYS[2] else t for k, t in look.cpu_times.items()}
            done.append(replace(look, cpu_times=times))
        return done

    profile = add_up(shared(slow_looks(0.9, begin=100.0)), KEYS)
    context = replace(slow_context(), equal=np.array([0, 0, 0, 0]))
    assert held_back_alone(profile, context).tolist() == [False, True, True, False]
    assert [(one.kind, one.members) for one in find(profile, context)] == [(Kind.HOST, (1, 2))]


def test_who_a_limit_alone_has_begun_to_hold_back_need_only_be_waited_for_most_often() -> None:
    """Where few waits can be followed, what looks see it hold up is next to nothing; the kernel says the rest."""

    def rarely(held_back: float, *, other: int = 0) -> list[Look]:
        looks = [
            replace(one, holds=one.holds if one.holds and one.holds[0].link is None else ())
            for one in slow_looks(held_back, 100.0)
        ]
        beside = (Hold(Part.GPU, 0.25, KEYS[2], None, "AllReduce", 7),)
        return [replace(one, holds=beside) if at % 5 == 2 and at < 5 * other else one for at, one in enumerate(looks)]

    context = replace(slow_context(), lost=0.6, stretch=2.5)
    assert add_up(rarely(0.9), KEYS).own()[1] < 0.035
    assert [(one.kind, one.members) for one in find(add_up(rarely(0.9), KEYS), context)] == [(Kind.HOST, (1,))]
    assert not find(add_up(rarely(0.05), KEYS), context), "nothing holds it back"
    assert (1,) not in [one.members for one in find(add_up(rarely(0.9, other=4), KEYS), context)], (
        "another is waited for more often"
    )
