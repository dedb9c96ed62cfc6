"""``ncclwatch paths what-if``: SIMULATED, on a fabric that a file describes: what a change would gain before anybody makes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ncclwatch.cli.options import JsonOption
from ncclwatch.cli.output import emit, emit_json, note
from ncclwatch.errors import UsageError
from ncclwatch.text import Style, clean, columns

if TYPE_CHECKING:
    from ncclwatch.paths.fabric import Fabric
    from ncclwatch.paths.traffic import Ring, Traffic
    from ncclwatch.paths.what_if import Change, WhatIf

SCHEMA_NAME = "ncclwatch.whatif/1"
SIMULATED = "SIMULATED: rates of a fluid model; no packet was sent, and how the switches hash is drawn, as it is not known"
ADAPTIVE = (
    "  NCCL_IB_ADAPTIVE_ROUTING=1 (since NCCL 2.16; left alone it is on for InfiniBand, off for RoCE) helps where NICs and",
    "  switches route adaptively: flows then have no fixed path, and ports are irrelevant. It does not switch that on; where",
    "  packets are hashed it changes no path. Not modelled, nothing is advised",
)
"""``net_ib``: more than ``NCCL_IB_AR_THRESHOLD`` (8 KiB) is a write that may be overtaken, with one of no bytes behind it."""
MAX_JOBS = 64

SlurmOption = Annotated[Path | None, typer.Option("--slurm", metavar="FILE", help="Write the advice as a TaskProlog for Slurm.")]
KubernetesOption = Annotated[
    Path | None, typer.Option("--kubernetes", metavar="FILE", help="Write the advice as ConfigMaps for Kubernetes.")
]


def what_if(
    fabric_file: Annotated[Path, typer.Argument(metavar="FABRIC", help="TOML file of the fabric (docs/paths.md shows one).")],
    job: Annotated[
        list[str] | None,
        typer.Option(
            "--job", metavar="NAME=HOSTS", help="A job and its hosts in ring order: a=0-7, or a=host3,host5. Repeat it."
        ),
    ] = None,
    flows: Annotated[
        list[Path] | None,
        typer.Option("--flows", metavar="FILE", help="In place of --job: output of 'paths --json', of each host."),
    ] = None,
    channels: Annotated[int, typer.Option("--channels", min=1, max=64, help="Rings through each NIC.")] = 1,
    queue_pairs: Annotated[
        int, typer.Option("--queue-pairs", min=1, max=128, help="NCCL_IB_QPS_PER_CONNECTION as it is now.")
    ] = 1,
    bond: Annotated[
        str, typer.Option("--bond", metavar="HOW", help="Port of a bond: hash (layer 3+4) or turns (mlx5's queue affinity).")
    ] = "hash",
    seeds: Annotated[int, typer.Option("--seeds", min=3, max=1000, help="Draws of the hash.")] = 20,
    wrong: Annotated[
        float,
        typer.Option("--wrong", metavar="PERCENT", min=0.0, max=100.0, help="Paths of a plan that are not what was predicted."),
    ] = 0.0,
    floor: Annotated[
        float, typer.Option("--floor", metavar="PERCENT", min=0.0, max=1000.0, help="Advise nothing that gains less.")
    ] = 5.0,
    slurm: SlurmOption = None,
    kubernetes: KubernetesOption = None,
    as_json: JsonOption = False,
) -> None:
    """SIMULATED: what more queue pairs, or source ports by a plan, would gain on a fabric that a file describes."""
    from ncclwatch.paths import known
    from ncclwatch.paths import what_if as model
    from ncclwatch.paths.ecmp import Bond

    if bond not in tuple(Bond):
        raise UsageError(f"there is no bond '{clean(bond, 20)}'", "choose hash or turns")
    said = known.read(fabric_file)
    fabric, alone = said.fabric, said.fields is known.Fields.ADDRESSES
    if flows and job:
        raise UsageError("--flows and --job exclude each other", "give one or the other")
    traffic = seen_on(fabric, flows) if flows else traffic_of(fabric, job or [], channels, queue_pairs)
    found = model.what_if(
        fabric, traffic, seeds=seeds, wrong=wrong / 100, floor=floor / 100, bond=Bond(bond), addresses_alone=alone
    )
    advise(found, queue_pairs, slurm, kubernetes)
    if as_json:
        emit_json(to_json(found, queue_pairs))
        return
    for line in screen(found, queue_pairs, Style()):
        emit(line)


def seen_on(fabric: Fabric, files: Sequence[Path]) -> Traffic:
    """Flows of flow maps, by host and NIC, as this fabric names them. Raises :class:`UsageError`."""
    from ncclwatch.cli.paths_files import elephants
    from ncclwatch.paths.traffic import of_flows

    found = elephants(files)
    if not found:
        raise UsageError("these files hold no flow", "give output of 'ncclwatch paths --json'")
    if loose := sum(one.adaptive for one in found):
        note(f"{loose} of {len(found)} flows have NCCL_IB_ADAPTIVE_ROUTING on: every figure is as if their packets were hashed")
    return of_flows(fabric, found)


def traffic_of(fabric: Fabric, jobs: Sequence[str], channels: int, queue_pairs: int) -> Traffic:
    """Flows of the jobs that ``--job`` names; all hosts as one job where none is named. Raises :class:`UsageError`."""
    from ncclwatch.paths.traffic import rings
    from ncclwatch.paths.what_if import hosts_of

    hosts = hosts_of(fabric)
    per_host = len(fabric.nics) // len(hosts)
    if any(host != hosts[number // per_host] for number, (host, _) in enumerate(fabric.nics)):
        raise UsageError(
            "hosts of this fabric have unlike numbers of NICs, or not in order", "list NICs of one host one after the other"
        )
    if len(jobs) > MAX_JOBS:
        raise UsageError(f"there are {len(jobs)} jobs", f"give at most {MAX_JOBS}")
    wanted = [_ring(text, hosts, channels, queue_pairs) for text in jobs or [f"all=0-{len(hosts) - 1}"]]
    if len({one.job for one in wanted}) < len(wanted):
        raise UsageError("two jobs have one name", "name each by itself")
    return rings(fabric, wanted, per_host, 0)


def _ring(text: str, hosts: Sequence[str], channels: int, queue_pairs: int) -> Ring:
    from ncclwatch.paths.traffic import Ring

    name, equals, words = text.partition("=")
    found: list[int] = []
    for word in words.split(","):
        first, dash, last = word.partition("-")
        if word in hosts:
            found.append(hosts.index(word))
        elif first.isdecimal() and first.isascii() and (not dash or (last.isdecimal() and last.isascii())):
            found += range(int(first[:9]), min(int((last or first)[:9]), len(hosts)) + 1)
        else:
            raise UsageError(
                f"'{clean(word, 40)}' of the job {clean(name, 40)} is no host of this fabric", "write a=0-7 or a=host3,host5"
            )
    if not equals or not name or len(found) < 2 or len(set(found)) < len(found) or max(found) >= len(hosts):
        raise UsageError(
            f"'{clean(text, 60)}' is no job of two hosts or more",
            f"write a=0-7 or a=host3,host5; hosts are 0 to {len(hosts) - 1}",
        )
    return Ring(name[:64], found, channels=channels, queue_pairs=queue_pairs)


def screen(found: WhatIf, queue_pairs: int, style: Style) -> Iterator[str]:
    """Lines for people; the table says that it is SIMULATED."""
    from ncclwatch.paths.what_if import Change, in_words

    yield style.warn(SIMULATED)
    rows = []
    for number, job in enumerate(found.jobs):
        low, middle, high = found.today[number]
        rows.append((clean(job, 24), in_words(Change(1, False), queue_pairs), f"{middle:.0f} ({low:.0f} to {high:.0f})", ""))
        for one in found.outcomes:
            if one.job == job:
                low, middle, high = one.gbps
                gain = f"{one.gain[1]:+.0%} ({one.gain[0]:+.0%} to {one.gain[2]:+.0%})"
                rows.append(("", in_words(one.change, queue_pairs), f"{middle:.0f} ({low:.0f} to {high:.0f})", gain))
    lines = columns(("JOB", "CHANGE", "Gb/s A NIC, SIMULATED", "GAIN, SIMULATED"), rows, right=(2, 3))
    yield style.dim(lines[0])
    yield from lines[1:]
    yield "median (10th to 90th percentile of the draws); the first row of a job is as it is now"
    yield from advice(found, queue_pairs)


def advice(found: WhatIf, queue_pairs: int) -> Iterator[str]:
    """What to set, in words."""
    from ncclwatch.paths.what_if import in_words, settings

    if found.best is None:
        yield "ADVICE  none: no change gains as much as the floor"
        return
    total = next(gain for change, gain in found.totals if change == found.best)
    yield f"ADVICE  {in_words(found.best, queue_pairs)}: {total[1]:+.0%} of all jobs together, SIMULATED"
    for name, value in settings(found.best, queue_pairs).items():
        yield f"  {name}={value}"
    if found.best.planned:
        yield "  UDP source ports by a plan: NCCL has no variable for them"
        yield "  (jobs that preload path_pins/ take them: sockets by their ports, RoCE by flow labels)"
    yield "  NCCL_IB_TC and NCCL_IB_SL choose a switch's queue and no path: not modelled, nothing is advised"
    yield from ADAPTIVE


def advise(found: WhatIf, queue_pairs: int, slurm: Path | None, kubernetes: Path | None) -> None:
    """Write the variables of the best change as files, where there is one that variables make."""
    from ncclwatch.cli import paths_advice
    from ncclwatch.cli.paths_probe import write
    from ncclwatch.paths.what_if import in_words, settings

    if slurm is None and kubernetes is None:
        return
    best = best_of_variables(found)
    if best is None:
        raise UsageError(
            "no change that variables make gains as much as the floor", "look at the table without --slurm and --kubernetes"
        )
    gain = next(each for change, each in found.totals if change == best)
    heading = f"{in_words(best, queue_pairs)}: {gain[1]:+.0%} ({gain[0]:+.0%} to {gain[2]:+.0%}), SIMULATED by ncclwatch"
    variables = settings(best, queue_pairs)
    if slurm is not None:
        write(slurm, paths_advice.slurm(variables, "", heading).encode())
    if kubernetes is not None:
        write(kubernetes, paths_advice.kubernetes(variables, "", heading).encode())


def best_of_variables(found: WhatIf) -> Change | None:
    """The best change that variables of NCCL make by themselves; None where none gains as much as the floor."""
    gains = {change: gain[1] for change, gain in found.totals if not change.planned}
    best = max(gains, key=lambda one: (round(gains[one], 2), -one.factor), default=None)
    return best if best is not None and gains[best] >= found.floor else None


def to_json(found: WhatIf, queue_pairs: int) -> dict[str, Any]:
    """``ncclwatch.whatif/1`` (docs/paths.md)."""
    from ncclwatch.paths.what_if import settings

    def change_json(one: Change) -> dict[str, Any]:
        return {"queue_pairs": queue_pairs * one.factor, "planned": one.planned, "settings": settings(one, queue_pairs)}

    return {
        "schema": SCHEMA_NAME,
        "simulated": SIMULATED,
        "today": [{"job": job, "gbps_a_nic": list(found.today[number])} for number, job in enumerate(found.jobs)],
        "changes": [
            change_json(change)
            | {
                "gain": list(gain),
                "jobs": [
                    {"job": one.job, "gbps_a_nic": list(one.gbps), "gain": list(one.gain)}
                    for one in found.outcomes
                    if one.change == change
                ],
            }
            for change, gain in found.totals
        ],
        "best": None if found.best is None else change_json(found.best),
    }
