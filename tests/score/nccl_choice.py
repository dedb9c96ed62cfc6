"""The quick scenarios with NCCL's own choice of algorithm and protocol, over NVLink inside nodes and sockets between them.

    python -m score.nccl_choice --save FOLDER          # root: plays them, a minute each, and judges each recording once
    python -m score.nccl_choice --save FOLDER --again  # judges what lies there as the engine judges now
    python -m score.nccl_choice --save FOLDER --seed 2602 --jobs 12   # jobs nobody has seen: a seed of seeds.toml

Releases and message sizes take turns; with a seed they, the rank with the fault, its group and the order are drawn. Groups of two
see rings alone, so a seed also puts all four ranks into one group: NCCL joins these by trees between nodes, and uses LL128 inside
one. What can be seen of each fault was written down before (:mod:`score.observable`); whether a slow job is
slower at all, its own iterations say (:mod:`score.visible`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from ncclwatch.errors import NcclwatchError
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.simulate.layout import groups, node_of
from ncclwatch.simulate.scenario import Fault, FaultKind, Scenario, ScoreClass, load_all
from ncclwatch.simulate.testbed import plan
from ncclwatch.store.replay import Recordings
from score.observable import GPU, why_hidden
from score.real import Attach, Outcome, OwnLines, Recording, Roster, Run, Saved, Transport, as_played, obstacle, record
from score.scoring import Tally
from score.stalls import where_it_stalled
from score.table import REAL, grid
from score.visible import SLOW_CLASSES, visibility
from testbed.choices import RUN
from testbed.job import JobError, build

RELEASES = ("2.21.5", "2.25.1", "2.27.5", "2.29.2", "2.32.3")
"""Two of them (2.25.1, 2.29.2) are outside the tests' list. 2.19.3 writes no log of its choices."""
PLAYED = (
    "quick-clean", "quick-stop", "quick-kill", "quick-crash", "quick-init", "quick-never-enters", "quick-never-enters-pipeline",
    "quick-skip", "quick-other-operation", "quick-gpu-stall", "quick-proxy-stall", "quick-slow-loader", "quick-slow-gpu",
)  # fmt: skip
NODES = (4, 2)
"""Ranks of a node: one node of four, two of two."""
SIZES = ((8, 8), (1 << 16, 4 << 20), (1 << 20, 16 << 20))
"""Bytes of activations and of gradients."""
DRAWN_SIZES = (8, 256, 1 << 12, 1 << 16, 1 << 20, 1 << 24, 1 << 26)
"""Bytes that are drawn: of gradients any of them, of activations at most ``LARGEST_ACTIVATIONS``, which two cores can move."""
LARGEST_ACTIVATIONS = 1 << 20
TENSOR_SIZES = (8, 256, 1 << 15, 1 << 20, 1 << 22)
"""Bytes of activations where four ranks share a layer: for each choice that NCCL makes of AllReduce there is one
(tests/testbed/README.md).
"""
WIDE = {"tp": {"tp": 4, "dp": 1}, "dp": {"tp": 1, "dp": 4}}
"""Layouts with all ranks in one group, by its role: tensor groups call AllReduce, data groups AllGather and ReduceScatter."""
IN = "+"
"""Between the name of a scenario and the role of the group that all ranks are in."""
AT = "@"
"""Between that and by what the rank with the fault was moved."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One collector's recording of one job, judged. ``hidden``: why the fault cannot be seen, empty where it can."""

    scenario: str
    nccl: str
    ranks_per_node: int
    nbytes: tuple[int, int]
    attach: str
    chosen: tuple[str, ...]
    score_class: str
    hidden: str
    right: bool
    said: str
    named: tuple[int, ...]
    innocents: tuple[int, ...]
    last: str
    summary: str
    note: str = ""

    @property
    def as_expected(self) -> bool:
        """Right where the fault shows; elsewhere nobody innocent, and of a job that stands ``unknown``."""
        if not self.hidden:
            return self.right
        hangs = not self.score_class.startswith("S")
        return not self.innocents and (self.right or not hangs or self.last == VerdictClass.UNKNOWN)


def cast(scenario: Scenario, ranks_per_node: int, nbytes: tuple[int, int], nccl: str) -> Scenario:
    """The scenario on such nodes with messages of these sizes, as the testbed plays it."""
    small, large = nbytes
    played = as_played(replace(scenario, layout=replace(scenario.layout, ranks_per_node=ranks_per_node)), nccl, Transport.P2P)
    work = replace(played.workload, tp_bytes=small, pp_bytes=small, cp_bytes=small, ep_bytes=small, dp_bytes=large)
    also = set(played.expect.also).union(*(_beside(fault, played) for fault in played.faults)) - set(played.expect.ranks)
    name = f"{scenario.name}-{ranks_per_node}-a-node-{small}-{large}"
    return replace(played, name=name, workload=work, expect=replace(played.expect, also=tuple(sorted(also))))


def _beside(fault: Fault, played: Scenario) -> set[int]:
    """Who may be named together with the rank that a fault strikes.

    Which of those that NVLink joins does not get on lies in GPU memory (as in score.drawn). A proxy that stalls looks like a dead
    link to the other end, which may be any rank of its group on another node.
    """
    layout = played.layout
    if fault.kind in GPU:
        return {rank for rank in range(layout.world) if node_of(layout, rank) == node_of(layout, fault.rank)}
    if fault.kind is FaultKind.PROXY_STALL:
        members = next(set(group) for group in groups(layout, fault.role).tolist() if fault.rank in group)
        return {rank for rank in members if node_of(layout, rank) != node_of(layout, fault.rank)}
    return set()


def choose(scenarios: Sequence[Scenario], releases: Sequence[str]) -> Iterator[tuple[Scenario, str, int, tuple[int, int]]]:
    """What is played: each scenario on each kind of node that can play it, releases and sizes by turns."""
    turns = zip(itertools.cycle(SIZES), itertools.cycle(releases), strict=False)
    for scenario, ranks_per_node in itertools.product(scenarios, NODES):
        on_nodes = replace(scenario, layout=replace(scenario.layout, ranks_per_node=ranks_per_node))
        if not obstacle(on_nodes, releases[0], Transport.P2P):
            nbytes, nccl = next(turns)
            yield scenario, nccl, ranks_per_node, nbytes


def draw(scenarios: Sequence[Scenario], releases: Sequence[str], seed: int) -> list[tuple[Scenario, str, int, tuple[int, int]]]:
    """What is played of a seed, in its order: as :func:`choose` with release, sizes and the rank with the fault drawn. Each is
    played in a tensor group of four, and once more in one of gradients or in its own groups.
    """
    chance = random.Random(f"nccl-choice/{seed}")
    found = []
    for scenario, _, ranks_per_node, _ in choose(scenarios, releases):
        widths = ("",) if scenario.layout.pp > 1 else ("tp", chance.choice(("", "dp")))
        for role in widths:
            played = widened(scenario, role)
            by = chance.choice([by for by in range(played.layout.world) if _can_move(played, by)])
            found.append((moved(played, by), chance.choice(releases), ranks_per_node, _sizes(chance, role)))
    chance.shuffle(found)
    return found


def _sizes(chance: random.Random, role: str) -> tuple[int, int]:
    """Bytes of activations and of gradients; a tensor group of all ranks leaves no gradients to reduce."""
    if role == "tp":
        small = chance.choice(TENSOR_SIZES)
        return small, small
    small = chance.choice([size for size in DRAWN_SIZES if size <= LARGEST_ACTIVATIONS])
    return small, chance.choice([size for size in DRAWN_SIZES if size >= small])


def widened(scenario: Scenario, role: str) -> Scenario:
    """The scenario with all ranks in one group of this role, which the fault strikes; ``role`` empty: as it is.

    With four in a group it is plain which of them called another operation.
    """
    if not role:
        return scenario
    faults = tuple(replace(fault, role=role, occurrence=0) if fault.role else fault for fault in scenario.faults)
    expect = scenario.expect if scenario.expect.score_class is not ScoreClass.H2 else replace(scenario.expect, also=())
    layout = replace(scenario.layout, **WIDE[role])
    return replace(scenario, name=f"{scenario.name}{IN}{role}", layout=layout, faults=faults, expect=expect)


def moved(scenario: Scenario, by: int) -> Scenario:
    """The scenario with another rank in the place of that with the fault: each number in binary, with the bits of ``by`` turned
    over. Groups of two stay groups.
    """
    expect = scenario.expect
    ranks, also = (tuple(sorted(rank ^ by for rank in those)) for those in (expect.ranks, expect.also))
    faults = tuple(replace(fault, rank=fault.rank ^ by) for fault in scenario.faults)
    return replace(scenario, name=f"{scenario.name}{AT}{by}", faults=faults, expect=replace(expect, ranks=ranks, also=also))


def _can_move(scenario: Scenario, by: int) -> bool:
    """Whether that leaves the fault in its stage, and rank 0, which makes the id, in its place where a rank never comes."""
    stage = scenario.layout.world // scenario.layout.pp
    kept = scenario.expect.score_class is ScoreClass.INIT_HANG
    return all(
        (fault.rank ^ by) // stage == fault.rank // stage and not (kept and fault.rank ^ by == 0) for fault in scenario.faults
    )


def play(scenario: Scenario, nccl: str, ranks_per_node: int, nbytes: tuple[int, int], save_to: str) -> list[Judged]:
    """Play one job, watched from the start and by who comes once it hangs; slow and healthy ones from the start alone."""
    played = cast(scenario, ranks_per_node, nbytes, nccl)
    hangs = not played.expect.score_class.quiet and not str(played.expect.score_class).startswith("S")
    attaches = (
        (Attach.LIVE, Attach.POST_HANG) if hangs and played.expect.score_class is not ScoreClass.INIT_HANG else (Attach.LIVE,)
    )
    run = Run(played, nccl, Transport.P2P, attaches, save_to=save_to)
    outcome = Outcome(run)
    made = replace(plan(played, links=True), as_nccl_likes=True)
    found = []
    for attach, recording, since in record(run, played, made, outcome):
        stalled = recording.own.stalled if recording.own else ""
        found.append(judge(where_it_stalled(played, stalled), recording, since, run, attach, nbytes, outcome.note))
    return found


def by_name(name: str, nccl: str, scenarios: Mapping[str, Scenario]) -> Scenario | None:
    """The scenario that :func:`cast` gave this name; ``None`` where it was another's."""
    parts = re.fullmatch(rf"(.+?)(?:{re.escape(IN)}(\w+))?(?:{AT}(\d+))?-(\d+)-a-node-(\d+)-(\d+)", name)
    base = scenarios.get(parts[1]) if parts else None
    if parts is None or base is None:
        return None
    _, role, by, ranks_per_node, small, large = parts.groups()
    played = widened(base, role or "")
    return cast(moved(played, int(by)) if by else played, int(ranks_per_node), (int(small), int(large)), nccl)


def again(folder: Path, scenarios: Mapping[str, Scenario]) -> Iterator[Judged]:
    """Judge the recordings of a folder anew."""
    for line in (folder / "results.jsonl").read_text("utf-8").splitlines():
        before = json.loads(line)
        small, large = before["nbytes"]
        played = by_name(before["scenario"], before["nccl"], scenarios)
        if played is None:
            raise NcclwatchError(f"{folder}: no scenario is called {before['scenario']}")
        attach = Attach(before["attach"])
        run = Run(played, before["nccl"], Transport.P2P, (attach,), save_to=str(folder))
        saved = Saved.load(run.path(attach))
        own = OwnLines(tuple(saved.iterations), saved.stalled, tuple(before["chosen"]))
        with Recordings([run.path(attach)]) as recordings:
            recording = Recording([batch for _, _, batch in recordings.batches()], own)
        scenario = where_it_stalled(played, saved.stalled)
        yield judge(scenario, recording, saved.since, run, attach, (small, large), before["note"])


def judge(
    scenario: Scenario, recording: Recording, since: float, run: Run, attach: Attach, nbytes: tuple[int, int], note: str
) -> Judged:
    """Judge a recording."""
    hidden = why_hidden(scenario, run.nccl, attach) or _holds_up_nobody(scenario, recording)
    hidden = hidden or _too_little(scenario, recording, since)
    tally, last = Tally(scenario, Roster(scenario, recording), "ncclwatch"), list[Verdict]()
    for moment, verdicts in recording.said():
        tally.hear(verdicts, moment - since)
        last = verdicts or last
    result = tally.result()
    return Judged(
        scenario=run.scenario.name, nccl=run.nccl, ranks_per_node=scenario.layout.ranks_per_node, nbytes=nbytes,
        attach=str(attach), chosen=recording.own.chosen if recording.own else (), score_class=str(result.score_class),
        hidden=hidden, right=result.right, said=result.said, named=tuple(result.named),
        innocents=result.innocents, last=str(last[0].verdict_class) if last else "",
        summary=result.summary or (last[0].summary if last else ""), note=note,
    )  # fmt: skip


def _holds_up_nobody(scenario: Scenario, recording: Recording) -> str:
    """Why a fault that is to make the job hang does not; empty where rank 0 has not done every iteration. The proxy of a rank
    that NVLink alone joins to its peers in a tree has nothing to do, so that nobody waits for it.
    """
    expected, done = scenario.expect.score_class, len(recording.own.iterations) if recording.own else 0
    hangs = not expected.quiet and expected not in SLOW_CLASSES
    return "the job has done all of its iterations: it held up nobody" if hangs and done >= scenario.workload.iterations else ""


def _too_little(scenario: Scenario, recording: Recording, since: float) -> str:
    """Why a fault that slows the job cannot be seen in how long its iterations take; empty where it can, and for other faults."""
    if scenario.expect.score_class not in SLOW_CLASSES or recording.own is None or not recording.batches:
        return ""
    shown = visibility(scenario, recording.own.iterations, since, recording.batches[-1].time_ns / 1e9)
    return "" if shown.visible else shown.text


def tables(judged: Sequence[Judged]) -> str:
    """By what NCCL chose and what joins the ranks: of faults that show how many were right, of others how many ``unknown``. A job
    counts in the row of each pair that it used.
    """
    rows: dict[tuple[str, str], list[Judged]] = defaultdict(list)
    for one in judged:
        for pair in {choice.split()[-1] for choice in one.chosen} or {"none yet"}:
            rows["one node, NVLink" if one.ranks_per_node == 4 else "two nodes, NVLink and sockets", pair].append(one)
    cells = [[joined, pairs, *_counts(part)] for (joined, pairs), part in sorted(rows.items())] + [["all", "", *_counts(judged)]]
    head = (
        "ranks on", "algorithm/protocol", "releases", "shows: right", "hidden: as it should be", "healthy: silent",
        "innocents named",
    )  # fmt: skip
    out = [f"NCCL's own choices; {REAL}", "", *grid(head, cells, markdown=True), ""]
    used = {pair for _, pair in rows}
    out += ["Never chosen: " + (", ".join(pair for pair in map("/".join, RUN) if pair not in used) or "none"), ""]
    for one in judged:
        if not one.as_expected or one.note:
            why = f"hidden ({one.hidden})" if one.hidden else "shows"
            said = f"said {one.said or one.last or 'nothing'} {list(one.named)}: {one.summary}"
            out.append(f"- {one.scenario} [{one.nccl} {one.attach}] {why}; {said} {one.note}".rstrip())
    return "\n".join(out) + "\n"


def _counts(part: Sequence[Judged]) -> list[str]:
    healthy = [one for one in part if one.score_class == ScoreClass.CLEAN]
    faults = [one for one in part if one not in healthy]
    shown, hidden = [one for one in faults if not one.hidden], [one for one in faults if one.hidden]
    releases = ", ".join(sorted({one.nccl for one in part}))
    return [releases, *map(_share, (shown, hidden, healthy)), str(sum(bool(one.innocents) for one in part))]


def _share(those: Sequence[Judged]) -> str:
    return f"{sum(one.as_expected for one in those)}/{len(those)}" if those else "-"


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 when every job was played."""
    parser = argparse.ArgumentParser(prog="score.nccl_choice", description="Score ncclwatch where NCCL chooses by itself.")
    parser.add_argument("--nccl", default=",".join(RELEASES), help="releases, by turns")
    parser.add_argument("--only", default="", help="only scenarios whose name contains this")
    parser.add_argument("--save", type=Path, required=True, help="folder for the recordings and results")
    parser.add_argument("--seed", type=int, help="draw what is played, from a seed of seeds.toml")
    parser.add_argument("--jobs", type=int, help="play only so many, the first")
    parser.add_argument("--again", action="store_true", help="play nothing: judge what lies there")
    options = parser.parse_args(arguments)
    scenarios = {scenario.name: scenario for scenario in load_all(Path(__file__).resolve().parent.parent / "scenarios", "")}
    if options.again:
        print(tables(list(again(options.save, scenarios))))
        return 0
    if os.geteuid() != 0:
        print("real runs need root: memory of other processes is read, and probes are attached", file=sys.stderr)
        return 1
    options.save.mkdir(parents=True, exist_ok=True)
    releases = options.nccl.split(",")
    for nccl in releases:
        build(nccl)
    judged, failed = list[Judged](), 0
    results = options.save / "results.jsonl"
    wanted = [scenarios[name] for name in PLAYED if options.only in name]
    cells = choose(wanted, releases) if options.seed is None else draw(wanted, releases, options.seed)
    for scenario, nccl, ranks_per_node, nbytes in itertools.islice(cells, options.jobs):
        what = f"{scenario.name} [{nccl}, {ranks_per_node} a node, {nbytes[0]} and {nbytes[1]} bytes]"
        try:
            found = play(scenario, nccl, ranks_per_node, nbytes, str(options.save.resolve()))
        except (JobError, NcclwatchError, OSError) as error:
            failed += 1
            print(f"{what}: not played: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            continue
        judged += found
        with results.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(one)) + "\n" for one in found)
        for one in found:
            word = "as it should be" if one.as_expected else "WRONG"
            print(f"{what} {one.attach}: {word}: {one.said or one.last} {list(one.named)}", file=sys.stderr, flush=True)
    print(tables(judged))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
