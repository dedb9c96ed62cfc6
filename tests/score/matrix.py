"""The real runs of many scenarios: which, in how many settings and tries, several at a time, and the tables of their results."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from ncclwatch.simulate.scenario import Scenario, ScoreClass
from score import bounds
from score.baselines import all_baselines
from score.diagnosers import Diagnoser
from score.real import Attach, Outcome, Run, Transport, obstacle, play, score_saved
from score.scoring import Line, Result, summarise, to_json
from score.table import REAL, grid, render
from testbed.job import available, build

NotPlayed = dict[str, str]
"""Scenario (and setting, where it matters) to the reason why it is not played."""


def choose(
    scenarios: Iterable[Scenario],
    *,
    versions: Sequence[str],
    transports: Sequence[Transport],
    attaches: Sequence[Attach],
    tries: int,
    seed: int,
    after_s: float,
    save_to: str = "",
    first_try: int = 0,
    in_turn: bool = False,
    judged: bool = True,
) -> tuple[list[Run], NotPlayed]:
    """All runs of the matrix. Without versions or transports each scenario is played in its own; with ``in_turn`` each in
    one of the versions, and the next that can be played in the next.
    """
    runs: list[Run] = []
    left_out: NotPlayed = {}
    turns = itertools.cycle(versions or ("",))
    turn = next(turns)
    for scenario in scenarios:
        own = Transport.SHM if scenario.network.intra_node == "shm" else Transport.SOCKET
        before = len(runs)
        for nccl in ((turn,) if in_turn and turn else versions) or (scenario.network.nccl,):
            for transport in transports or (own,):
                reason = obstacle(scenario, nccl, transport)
                if not available(nccl):
                    reason = f"NCCL {nccl} was not downloaded (make setup)"
                if reason:
                    left_out[f"{scenario.name} ({nccl}, {transport})"] = reason
                    continue
                made = [
                    Run(scenario, nccl, transport, tuple(attaches), seed, number, after_s, save_to, judged)
                    for number in range(first_try, first_try + tries)
                ]
                runs += made
        if len(runs) > before:
            turn = next(turns)
    return runs, left_out


def _one(run: Run, with_baselines: bool) -> Outcome:
    return play(run, all_baselines() if with_baselines else ())


def run_all(
    runs: Sequence[Run], *, jobs: int = 1, with_baselines: bool = True, tell: Callable[[Outcome], None] = lambda _: None
) -> list[Outcome]:
    """Play the runs, ``jobs`` at a time, each in a process of its own; outcomes in the order of the runs."""
    for nccl in sorted({run.nccl for run in runs}):
        build(nccl)
    outcomes: dict[int, Outcome] = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        waiting = {pool.submit(_one, run, with_baselines): at for at, run in enumerate(runs)}
        for done in as_completed(waiting):
            outcomes[waiting[done]] = done.result()
            tell(done.result())
    return [outcomes[at] for at in range(len(runs))]


def score_again(
    folder: Path, scenarios: Iterable[Scenario], *, jobs: int = 1, with_baselines: bool = True,
    tell: Callable[[Outcome], None] = lambda _: None,
) -> list[Outcome]:  # fmt: skip
    """Score the recordings in a folder, which ``Run.save_to`` filled, as the engine judges them now."""
    known = {scenario.name: scenario for scenario in scenarios}
    paths = [p for p in sorted(folder.glob("*.ncclwatch")) if json.loads(p.with_suffix(".json").read_text())["scenario"] in known]
    outcomes: list[Outcome] = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        baselines = all_baselines() if with_baselines else []
        for outcome in pool.map(score_saved, paths, [known] * len(paths), [baselines] * len(paths)):
            outcomes.append(outcome)
            tell(outcome)
    return outcomes


def tell_progress(outcome: Outcome) -> None:
    """One line for a run, on standard error, as soon as it is over."""
    parts = []
    for result in outcome.results:
        if result.diagnoser == "ncclwatch":
            when = "" if result.detection_s is None else f" after {result.detection_s:.1f} s"
            said = f"{result.said} {result.named}{when}" if result.said else "silent"
            hidden = " (the fault does not show)" if result.visible is False else ""
            others = f"; innocents named: {list(result.innocents)}" if result.innocents else ""
            parts.append(f"{'right' if result.right else 'WRONG'} ({said}){hidden}{others}")
    run = outcome.run
    what = "; ".join([*parts, *filter(None, (outcome.pace, outcome.note))])
    setting = f"{run.nccl} {run.transport} try {run.number}"
    print(f"{run.scenario.name} [{setting}] {outcome.wall_s:.0f} s: {what}", file=sys.stderr, flush=True)


def settings_table(results: Sequence[Result], *, markdown: bool) -> str:
    """Ours by release, transport and attachment: how many were right, and false alarms."""
    rows: dict[str, list[Result]] = {}
    for result in results:
        if result.diagnoser == "ncclwatch":
            rows.setdefault(" ".join(result.setting.split()[:3]), []).append(result)
    cells = []
    for setting, part in sorted(rows.items()):
        hangs = [r for r in part if not ScoreClass(r.score_class).quiet]
        right = sum(r.right for r in hangs)
        detected = sum(r.detected for r in hangs)
        silent, alarms = sum(not r.detected for r in hangs), sum(r.false_alarm for r in part)
        clean = len(part) - len(hangs)
        wrong = len(hangs) - right - silent
        cells.append(
            [*setting.split(), str(len(hangs)), str(detected), str(right), str(wrong), str(silent), str(clean), str(alarms)]
        )
    head = (
        "NCCL",
        "transport",
        "attached",
        "faults",
        "detected",
        "right class and place",
        "wrong",
        "silent",
        "clean",
        "false alarms",
    )
    return "\n".join(grid(head, cells, markdown=markdown)) + "\n"


def tries_table(results: Sequence[Result], *, markdown: bool) -> str:
    """Ours by scenario, over its tries."""
    rows: dict[str, list[Result]] = {}
    for result in results:
        if result.diagnoser == "ncclwatch":
            rows.setdefault(result.case, []).append(result)
    cells = []
    for case, part in sorted(rows.items()):
        times = [r.location_s for r in part if r.location_s is not None]
        cells.append(
            [
                case,
                str(len(part)),
                *(
                    str(sum(map(bool, column)))
                    for column in zip(*((r.detected, r.right_class, r.right_rank) for r in part), strict=True)
                ),
                str(sum(r.right for r in part)),
                str(sum(r.false_alarm for r in part)),
                f"{float(np.median(times)):.1f}" if times else "-",
            ]
        )
    head = ("scenario", "tries", "detected", "class ok", "rank ok", "right", "false alarms", "located after (s, median)")
    return "\n".join(grid(head, cells, markdown=markdown)) + "\n"


def report(outcomes: Sequence[Outcome], left_out: NotPlayed, diagnosers: Sequence[Diagnoser], *, markdown: bool = False) -> str:
    """The tables, what was not right, and what was not played."""
    results = [r for o in outcomes for r in o.results]
    lines: dict[str, list[Line]] = {d.name: summarise(results, d) for d in diagnosers}
    title, item = ("### ", "- ") if markdown else ("", "  ")
    out = [render(diagnosers, lines, source=REAL, markdown=markdown)]
    out += [f"{title}ncclwatch by setting; {REAL}", "", settings_table(results, markdown=markdown)]
    out += [f"{title}ncclwatch with exact bounds; {REAL}", "", bounds.table(results, markdown=markdown)]
    if len(outcomes) > len({o.run.scenario.name for o in outcomes}):
        out += [f"{title}ncclwatch by scenario; {REAL}", "", tries_table(results, markdown=markdown)]
    wrong = [r for r in results if r.diagnoser == "ncclwatch" and not r.right]
    if wrong:
        out += [f"{title}Not right", ""]
        out += [f"{item}{r.case} [{r.setting}]: said {r.said or 'nothing'} {r.named or ''} {r.summary}".rstrip() for r in wrong]
        out.append("")
    notes = [
        f"{item}{o.run.scenario.name} [{o.run.nccl} {o.run.transport} try {o.run.number}]: {o.note}" for o in outcomes if o.note
    ]
    if notes:
        out += [f"{title}Notes on runs", "", *notes, ""]
    if left_out:
        out += [f"{title}Not played", "", *(f"{item}{name}: {reason}" for name, reason in left_out.items()), ""]
    return "\n".join(out)


def as_json(outcomes: Sequence[Outcome], left_out: NotPlayed, diagnosers: Sequence[Diagnoser]) -> dict[str, Any]:
    """Everything as plain data."""
    results = [r for o in outcomes for r in o.results]
    data = to_json(results, {d.name: summarise(results, d) for d in diagnosers}, "real NCCL on the CPU testbed")
    data["runs"] = [
        {
            "scenario": o.run.scenario.name,
            "nccl": o.run.nccl,
            "transport": str(o.run.transport),
            "seed": o.run.seed,
            "try": o.run.number,
            "note": o.note,
            "wall_s": round(o.wall_s, 1),
            "results": len(o.results),
        }
        for o in outcomes
    ]
    data["not_played"] = left_out
    data["bounds"] = bounds.as_json(results)
    return data
