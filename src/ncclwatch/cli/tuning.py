"""``ncclwatch tuning``: do the algorithm, the protocol and the connections that NCCL chose fill the links, and what would?"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ncclwatch.cli import options
from ncclwatch.cli.options import AllOption, JsonOption, PidOption
from ncclwatch.cli.output import emit, emit_json, note
from ncclwatch.errors import UsageError
from ncclwatch.model.network import nic_label
from ncclwatch.model.tuning import Advice, CapacityFrom, Exposure, LinkAdvice, TuningLook
from ncclwatch.text import Style, clean, ranks, share, size

SCHEMA_NAME = "ncclwatch.tuning/1"
LOOK_S = 12.0
"""How long is looked at: counters of another network namespace are read every ten seconds."""

_RATE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgtKMGT]?)([Bb]it|b|B)(?:/s|ps)?")
_POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}

_WAITS = {
    Exposure.BOUND: "operations move nearly all the time: the job goes as fast as they do",
    Exposure.EXPOSED: "the job waits for its operations",
    Exposure.HIDDEN: "operations are hidden behind computation",
    Exposure.UNKNOWN: "whether computation goes on meanwhile cannot be told",
}


def tuning(
    words: Annotated[list[str] | None, typer.Argument(metavar="[PID]...", help="More pids.")] = None,
    pid: PidOption = None,
    every: AllOption = False,
    as_json: JsonOption = False,
    duration: Annotated[float, typer.Option("--duration", "-d", min=1.0, max=3600.0, help="Seconds to watch.")] = LOOK_S,
    link: Annotated[
        str | None,
        typer.Option("--link", metavar="RATE", help="What each link can carry one way: 25gbit, 3.1GB."),
    ] = None,
) -> None:
    """Say where NCCL's algorithm, protocol or number of connections under-fills a link, and what another choice would gain.

    Advice only: nothing is applied. Nothing is advised for a link that is full, or behind computation.
    """
    told = link_rate(link) if link is not None else None
    named = options.only_pids(pid, words, "tuning is of running processes")
    look, problems = _look(options.choose_pids(named, every), duration, told)
    from ncclwatch.knowledge.tuning import advise

    found = advise(look)
    if as_json:
        emit_json(_json(look, found))
    else:
        for line in lines(look, found, Style()):
            emit(line)
    for problem in problems:
        note(problem)


def link_rate(text: str) -> float:
    """Bytes a second of ``25gbit`` or ``3.1GB``. Raises UsageError."""
    found = _RATE.fullmatch(text.strip()) if len(text) <= 40 else None
    value = float(found[1]) * _POWERS[found[2].lower()] / (1 if found[3] == "B" else 8) if found else 0.0
    if value <= 0:
        raise UsageError(f"--link '{clean(text, 40)}' is no rate", "give one way of a link, as 25gbit or 3.1GB")
    return value


def _look(pids: Sequence[int], duration_s: float, told: float | None) -> tuple[TuningLook, list[str]]:
    from ncclwatch.cli.sampling import Watch
    from ncclwatch.collect.tuning import TuningLooks
    from ncclwatch.target.session import TargetProcess

    with Watch() as watch:
        watch.open(pids)
        watch.round()
        watch.require_one()
        targets = [one.target for one in watch.watched if isinstance(one.target, TargetProcess)]
        with TuningLooks(targets, socket.gethostname()) as looks:
            looks.watch(duration_s)
            return looks.result(told), [problem.line for problem in watch.problems]


def lines(look: TuningLook, found: Sequence[LinkAdvice], style: Style) -> Iterator[str]:
    """For people: a paragraph a link."""
    if not found:
        yield "no connection over a network was seen to send anything: there is nothing to tune here"
        return
    yield f"looked for {look.seconds:.0f} s; {_WAITS[found[0].exposure]}"
    for one in found:
        yield from _link(one, look, style)


def _link(one: LinkAdvice, look: TuningLook, style: Style) -> Iterator[str]:
    link = one.link
    label = clean(nic_label(link.name, link.namespace), 80)
    carried = f"{size(link.rate_moving)}/s" if link.rate_moving is not None else "an unknown rate"
    of = f" of {size(link.capacity)}/s" if link.capacity else ""
    by = {CapacityFrom.TOLD: " (as told)", CapacityFrom.DRIVER: " (its driver)", None: ""}[link.capacity_from]
    filled = f", {share(one.fill)}" if one.fill is not None else ""
    yield ""
    when = f"while operations move ({share(link.moving)} of the time)"
    yield f"{style.bold(label)}  carries {carried}{of}{by}{filled}, {when}: {one.says}"
    for advice in one.advice:
        yield from _advice(advice, look)


def _advice(advice: Advice, look: TuningLook) -> Iterator[str]:
    user = next(one for one in look.communicators if one.comm_hash == advice.communicator)
    low, high = advice.faster
    faster = f"{high:.1f}" if high - low < 0.1 else f"{low:.1f} to {high:.1f}"
    gain = f"operations {faster} times as fast"
    if advice.saved is not None:
        gain += f", the job at most {share(advice.saved)} shorter"
    yield f"  communicator {advice.communicator:x} ({user.nranks} ranks; {ranks(user.ranks)} here)"
    yield f"    seen   {clean(advice.seen, 300)}"
    yield f"    try    {clean(advice.change, 300)}"
    yield f"    gains  {gain}" + (f", {advice.provided}" if advice.provided else "")


def _json(look: TuningLook, found: Sequence[LinkAdvice]) -> dict[str, Any]:
    return {
        "schema": SCHEMA_NAME,
        "looked_s": round(look.seconds, 3),
        "exposure": str(found[0].exposure) if found else None,
        "links": [
            {
                "host": one.link.host,
                "nic": one.link.name,
                "namespace": one.link.namespace,
                "capacity": one.link.capacity,
                "capacity_from": one.link.capacity_from,
                "rate_moving": one.link.rate_moving,
                "moving": one.link.moving,
                "fill": one.fill,
                "says": one.says,
                "flows": [asdict(flow) for flow in one.link.flows],
                "advice": [asdict(advice) | {"communicator": f"{advice.communicator:x}"} for advice in one.advice],
            }
            for one in found
        ],
        "communicators": [
            {
                "communicator": f"{one.comm_hash:x}",
                "nranks": one.nranks,
                "nnodes": one.nnodes,
                "moving": one.moving,
                "operations": one.operations,
                "kinds": [asdict(kind) | {"share": part} for kind, part in one.kinds.items()],
            }
            for one in look.communicators
        ],
    }
