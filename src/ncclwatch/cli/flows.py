"""``ncclwatch flows``: one line for every connection of NCCL over a network, and what carries it."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ncclwatch.cli import options
from ncclwatch.cli.options import AllOption, BudgetOption, JsonOption, LookOption, PidOption
from ncclwatch.cli.output import emit, emit_json, note
from ncclwatch.model.network import FlowRecord
from ncclwatch.stopping import Stop
from ncclwatch.text import Style, clean

if TYPE_CHECKING:
    from ncclwatch.collect.flows import FlowCollector
    from ncclwatch.collect.watched import Problem
    from ncclwatch.wire.session import WireSession

SCHEMA_NAME = "ncclwatch.flows/1"

LOOK_S = 2.0
"""How long is looked at least: some windows of throughput."""
LONGEST_WAIT_S = 15.0
"""A first burst that the budget allows later than this is not waited for."""
AFTER_BURST_S = 0.2
REST_S = 0.005
CPU_SHARE = 0.1
"""Of a core, for looking at memory again and again."""


def flows(
    words: Annotated[list[str] | None, typer.Argument(metavar="[PID]...", help="More pids.")] = None,
    pid: PidOption = None,
    every: AllOption = False,
    as_json: JsonOption = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Count every RDMA request, at whatever it costs the job (told first).")
    ] = False,
    budget: BudgetOption = 0.1,
    duration: LookOption = None,
) -> None:
    """Show every connection over a network: channel, peer, NIC, rates, latency, retries, and what is wrong with it."""
    named = options.only_pids(pid, words, "flows are of running processes")
    chosen = options.choose_pids(named, every)
    looked = look_at(chosen, exact=exact, budget=budget, duration_s=duration)
    if as_json:
        emit_json(_json(looked))
    else:
        from ncclwatch.cli.flows_text import screen

        width = shutil.get_terminal_size((100, 24)).columns if sys.stdout.isatty() else 160
        for line in screen(looked.records, looked.collector, looked.wire, looked.report, width=width, style=Style()):
            emit(line)
    for problem in looked.problems:
        note(problem.line)
    for text in looked.collector.notes:
        note(clean(text, 300))


@dataclass(frozen=True, slots=True)
class Looked:
    """What was seen of the connections in ``looked_s`` seconds; collector and wire session are closed, and tell how it went."""

    collector: FlowCollector
    wire: WireSession
    records: list[FlowRecord]
    looked_s: float
    price: str
    """What exact counting costs, where that was asked for."""
    report: str
    problems: list[Problem]


def look_at(pids: Sequence[int], *, exact: bool, budget: float, duration_s: float | None) -> Looked:
    """Look at the connections of processes for some seconds. Raises :class:`TargetError` where none of them can be read."""
    from ncclwatch.cli.sampling import Watch
    from ncclwatch.collect.flows import FlowCollector
    from ncclwatch.target.session import TargetProcess
    from ncclwatch.wire.governor import Mode
    from ncclwatch.wire.session import WireSession

    with Watch() as watch:
        watch.open(pids)
        watch.round()
        watch.require_one()
        targets = [one.target for one in watch.watched if isinstance(one.target, TargetProcess)]
        mode = Mode.EXACT if exact else Mode.BURSTS if budget > 0 else Mode.STATE
        wire = WireSession(mode, max(budget, 1e-6) / 100)
        collector = FlowCollector(targets, wire)
        try:
            collector.step()
            wire.start(collector.users())
            collector.refresh()
            price = _price(wire) if exact else ""
            looked_s = look(collector, wire, duration_s)
            return Looked(collector, wire, collector.flows(), looked_s, price, wire.report(), [*watch.problems])
        finally:
            collector.close()
            wire.close()


def look(collector: FlowCollector, wire: WireSession, duration_s: float | None, stop: Stop | None = None) -> float:
    """Look again and again until there is enough to say; returns for how many seconds.

    Without ``duration_s`` that is until the budget has allowed one burst of probes, where there is anything to probe.
    """
    stop = stop or Stop()
    began = time.monotonic()
    first = wire.first_burst_s()
    wanted = duration_s if duration_s is not None else LOOK_S
    if duration_s is None and 0 < first <= LONGEST_WAIT_S:
        wanted = max(wanted, first + AFTER_BURST_S)
        if first > LOOK_S:
            note(f"looking for {wanted:.0f} s: the budget allows the first burst of probes in {first:.0f} s")
    elif first and first > wanted:
        note(f"no burst of probes fits: the budget allows one in {first:.0f} s (a longer --duration or a larger --budget helps)")
    while collector.alive and not stop.is_set():
        before = time.process_time()
        collector.step()
        if time.monotonic() - began >= wanted:
            break
        cost = time.process_time() - before
        stop.wait(min(max(REST_S, cost * (1 / CPU_SHARE - 1)), max(wanted - (time.monotonic() - began), 0.0)))
    return time.monotonic() - began


def _price(wire: WireSession) -> str:
    """Tell what exact counting costs, and only then begin."""
    if not wire.running:
        return ""
    price = wire.trial()
    note(f"exact counting: {price}")
    wire.begin_exact()
    return price


def _json(looked: Looked) -> dict[str, Any]:
    from ncclwatch.cli.dump import problem_json
    from ncclwatch.cli.flows_text import flow_json

    wire, collector = looked.wire, looked.collector
    worst = wire.worst()
    return {
        "schema": SCHEMA_NAME,
        "looked_s": round(looked.looked_s, 3),
        "planes": {
            "state": {"running": True, "reason": ""},
            "wire": {"running": wire.running, "mode": str(wire.mode), "reason": wire.reason},
        },
        "cost": {
            "budget": wire.budget,
            "told_first": looked.price,
            "report": looked.report,
            "worst_thread": None
            if worst is None
            else {"pid": worst.pid, "tid": worst.tid, "hits": worst.hits, "cost_ns": round(worst.cost_ns)},
        },
        "processes": [
            {"pid": pid, "networks": list(names), "wire_unavailable": wire.reasons.get(pid, "") or wire.reason}
            for pid, names in collector.networks().items()
        ],
        "flows": [flow_json(record) for record in looked.records],
        "errors": [problem_json(problem) for problem in looked.problems],
        "notes": list(collector.notes),
    }
