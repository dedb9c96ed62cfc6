"""``ncclwatch paths plan``: which source port each connection of the next communicator should leave by, on measured paths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ncclwatch.cli.options import JsonOption
from ncclwatch.cli.output import emit, emit_json, note
from ncclwatch.cli.paths import crowd_json
from ncclwatch.cli.paths_what_if import KubernetesOption, SlurmOption
from ncclwatch.errors import ExitStatus, UsageError
from ncclwatch.model.paths import Protocol
from ncclwatch.paths.words import crowd_text
from ncclwatch.text import Style, clean, columns

if TYPE_CHECKING:
    from ncclwatch.model.paths import Probe
    from ncclwatch.paths.measured import MeasuredFlow
    from ncclwatch.paths.measured_plan import JobGain, MeasuredPlan
    from ncclwatch.paths.suspects import Told

SCHEMA_NAME = "ncclwatch.pathplan/1"
MAX_ROWS = 64
PREDICTED = "PREDICTED for an iteration that is all communication over links that are alike; one that computes beside gains less"

FloorOption = Annotated[
    float, typer.Option("--floor", metavar="PERCENT", min=0.0, max=1000.0, help="Refuse a plan that would gain less.")
]


def plan(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...",
            help="Flow maps ('paths --json'), probes ('paths probe -o'), verdicts ('diagnose --json'), recordings.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the ports for path_pins/. Nothing is applied.")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="Draw the paths as they are and as planned, a page (HTML).")
    ] = None,
    floor: FloorOption = 5.0,
    known: Annotated[
        Path | None,
        typer.Option("--known", metavar="FILE", help="TOML file of the fabric: which links are slow or dead."),
    ] = None,
    slurm: SlurmOption = None,
    kubernetes: KubernetesOption = None,
    as_json: JsonOption = False,
) -> ExitStatus:
    """Say which flows crowd, assign source ports so that they do not, and predict what that gains. Nothing is applied."""
    from ncclwatch.cli.paths_inputs import inputs_of
    from ncclwatch.paths import measured_plan

    given = inputs_of(files)
    probes, flows = given.probes, _of_one_protocol(given.flows, given.probes)
    told = given.told + (_known(known, probes) if known is not None else [])
    found = measured_plan.plan(flows, probes, floor=floor / 100, told=told)
    if (slurm is not None or kubernetes is not None) and output is None:
        raise UsageError("advice for Slurm or Kubernetes is about a plan that is written", "give --output FILE as well")
    if output is not None and not found.refused:
        _write(found, output, slurm, kubernetes)
    if picture is not None:
        _draw(flows, probes, found, picture)
    if as_json:
        emit_json(to_json(found))
    else:
        for line in screen(found, Style()):
            emit(line)
        if output is not None and not found.refused:
            emit(
                f"wrote {output}, for jobs that preload libncclwatch_pins.so with NCCLWATCH_PATH_PINS={output}; "
                "nothing is applied"
            )
    for line in (*given.notes, *found.notes):
        note(line)
    return ExitStatus.OK


def _of_one_protocol(flows: Sequence[MeasuredFlow], probes: Sequence[Probe]) -> list[MeasuredFlow]:
    """The flows that the probes are about. Raises :class:`UsageError` where there is nothing to plan, or for two protocols."""
    from ncclwatch.paths.ports import ROCE_PORT

    protocols = {one.protocol for one in probes}
    if len(protocols) > 1:
        raise UsageError("these probes are of TCP and of UDP", "plan for one of them at a time")
    roce = Protocol.UDP in protocols
    found = [flow for flow in flows if (flow.port == ROCE_PORT) == roce]
    if not found or not probes:
        raise UsageError(
            f"there is no {'flow with a known five-tuple' if not found else 'probe'} in these files",
            "give output of 'ncclwatch paths --json' and of 'ncclwatch paths probe -o FILE', of each host",
        )
    return found


def _known(file: Path, probes: Sequence[Probe]) -> list[Told]:
    """What a file says of the links that a plan can choose among."""
    from ncclwatch.paths.known import read, told_by_file
    from ncclwatch.paths.measured import open_links

    return told_by_file(read(file), set().union(*open_links(probes).values()))


def _write(found: MeasuredPlan, output: Path, slurm: Path | None, kubernetes: Path | None) -> None:
    from ncclwatch.cli import paths_advice
    from ncclwatch.cli.paths_files import pins_of
    from ncclwatch.cli.paths_probe import write

    text = pins_of(found.demands, found.chosen)
    write(output, text.encode())
    best = max(found.gains, key=lambda gain: gain.gain)
    heading = f"a plan of ports by ncclwatch: {best.gain:+.0%}, confidence {best.confidence:.0%}, {PREDICTED}"
    if slurm is not None:
        write(slurm, paths_advice.slurm({}, str(output.resolve()), heading).encode())
    if kubernetes is not None:
        write(kubernetes, paths_advice.kubernetes({}, text, heading).encode())


def _draw(flows: Sequence[MeasuredFlow], probes: Sequence[Probe], found: MeasuredPlan, file: Path) -> None:
    from ncclwatch.cli.paths_probe import write
    from ncclwatch.paths.measured_plan import as_planned
    from ncclwatch.report.html import plain_page
    from ncclwatch.report.paths_svg import paths as drawing
    from ncclwatch.report.svg import text
    from ncclwatch.view.paths import picture

    now = picture(flows, probes)
    parts = ["<h1>Paths of flows</h1>"]
    parts += [f"<div class=verdict>{text(crowd_text(one), 500)}</div><br>" for one in now.crowded[:16]]
    parts += ["<h2>As they are</h2>", drawing(now), "<h2>As planned (PREDICTED; nothing is applied)</h2>"]
    parts += [f"<p class=next>{text(gain_text(gain), 500)}</p>" for gain in found.gains[:16]]
    parts.append(
        f"<p>refused: {text(found.refused)}</p>" if found.refused else drawing(picture(as_planned(flows, found), probes))
    )
    write(file, plain_page("paths of flows", "".join(parts)).encode())


def screen(found: MeasuredPlan, style: Style) -> Iterator[str]:
    """Lines for people."""
    for each in found.crowded:
        yield f"{style.bad('CROWDED')}  {crowd_text(each)}"
    if not found.crowded:
        yield f"{style.good('NO CROWD')}  no link carries two of the running flows whose paths are known while another is empty"
    for suspect in found.avoided:
        yield f"{style.warn('AVOIDED')}  {suspect.text}"
    for gain in found.gains:
        yield f"{style.dim('GAIN')}  {gain_text(gain)}"
    yield style.dim(f"  {PREDICTED}")
    if found.refused:
        yield f"{style.warn('REFUSED')}  {found.refused}"
        return
    yield from _table(found, style)


def _table(found: MeasuredPlan, style: Style) -> Iterator[str]:
    """One row a connection; ports of bonds where there are some."""
    bonded = any(found.bond_ports)
    rows = []
    for demand, one, port in zip(found.demands[:MAX_ROWS], found.chosen, found.bond_ports, strict=False):
        path = "stays as it is" if one is None else " → ".join(hop or "?" for hop in one.hops) or one.links[0][1]
        rows.append(
            (
                str(demand.rank),
                str(demand.peer),
                f"{demand.destination}:{demand.port}",
                str(one.source_port) if one else "-",
                *((f"{port} of {demand.bond}" if port else "-",) if bonded else ()),
                path,
            )
        )
    lines = columns(
        ("RANK", "PEER", "CONNECTS TO", "SOURCE PORT", *(("BOND PORT",) if bonded else ()), "PATH"), rows, right=(0, 1, 3)
    )
    yield style.dim(lines[0])
    yield from lines[1:]
    if len(found.demands) > MAX_ROWS:
        yield f"… and {len(found.demands) - MAX_ROWS} more connections (all of them with --json)"


def gain_text(gain: JobGain) -> str:
    """One job's line."""
    before = f"{gain.before:.3g}" + ("" if gain.before_known else " (as hashing would have it: running flows were not followed)")
    return (
        f"job {clean(gain.job, 16)}: flows on its fullest link {before} → {gain.after:.3g}; "
        f"+{gain.gain:.0%} ({gain.gain_low:+.0%} to {gain.gain_high:+.0%}), confidence {gain.confidence:.0%}"
    ).replace("+-", "-")


def to_json(found: MeasuredPlan) -> dict[str, Any]:
    """``ncclwatch.pathplan/1`` (docs/flow-map.md)."""
    return {
        "schema": SCHEMA_NAME,
        "predicted": PREDICTED,
        "crowded": [crowd_json(one) for one in found.crowded],
        "gains": [
            {
                "job": gain.job,
                "before": gain.before,
                "before_known": gain.before_known,
                "after": gain.after,
                "gain": gain.gain,
                "gain_10": gain.gain_low,
                "gain_90": gain.gain_high,
                "confidence": gain.confidence,
            }
            for gain in found.gains
        ],
        "avoided": [
            {"link": list(one.link), "left": one.left, "confidence": one.confidence, "text": one.text} for one in found.avoided
        ],
        "refused": found.refused or None,
        "connections": [
            {
                "job": demand.job,
                "rank": demand.rank,
                "peer": demand.peer,
                "source": demand.source,
                "destination": demand.destination,
                "port": demand.port,
                "source_port": None if one is None else one.source_port,
                "bond_port": port or None,
                "hops": None if one is None else list(one.hops),
                "wrong": None if one is None else one.wrong,
            }
            for demand, one, port in zip(found.demands, found.chosen, found.bond_ports, strict=True)
        ],
        "links": [{"link": list(link), "load": load} for link, load in sorted(found.loads.items())],
        "notes": list(found.notes),
    }
