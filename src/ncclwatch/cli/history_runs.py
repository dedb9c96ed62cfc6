"""``ncclwatch history trend``, ``compare``, ``downtime``: how fast runs were, and what standing still has cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ncclwatch.cli.history_options import (
    MEMORY,
    SINCE,
    TABLES_OF_RUNS,
    TIMEOUT_S,
    FolderOption,
    JobNameOption,
    MemoryOption,
    SinceOption,
    TimeoutOption,
    json_of,
    name,
    number,
    opened,
    parse_since,
    show,
    when,
)
from ncclwatch.cli.options import JsonOption
from ncclwatch.cli.output import emit_json
from ncclwatch.errors import UsageError
from ncclwatch.text import Style, clean, columns, duration, size

if TYPE_CHECKING:
    from ncclwatch.history.downtime import Downtime, Outage
    from ncclwatch.history.questions import Record

BAR = 24
"""Cells of the longest bar."""
APART = 0.05
"""Unit: a share. From: chosen: by less two runs of one program differ without a reason."""
_PHASES = {
    "detection": "detection",
    "diagnosis": "diagnosis and isolation",
    "restart": "restart (re-initialization)",
    "lost_work": "lost work (post-checkpoint)",
}
"""Our phases, and the words of C4's Table III."""
_FIGURES: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("iteration_median_s", "iteration, median", lambda value: f"{value:.4g} s"),
    ("iteration_p99_s", "iteration, p99", lambda value: f"{value:.4g} s"),
    ("slowest_to_median", "slowest rank to median", lambda value: f"{value:.3f}"),
    ("operations_per_s", "operations a second", lambda value: f"{value:.4g}"),
    ("bytes_per_s", "bytes a rank", lambda value: f"{size(value)}/s"),
    ("sent_per_s", "sent over a network a rank", lambda value: f"{size(value)}/s"),
    ("latency_p50_us", "latency, median", lambda value: f"{value:.4g} µs"),
    ("latency_p99_us", "latency, p99", lambda value: f"{value:.4g} µs"),
    ("errors", "failed requests", lambda value: f"{value:.0f}"),
    ("flows_in_trouble", "flows in trouble", lambda value: f"{value:.0f}"),
    ("verdicts", "verdicts", lambda value: f"{value:.0f}"),
    ("iterations", "iterations seen", lambda value: f"{value:.0f}"),
    ("seconds", "seen for", duration),
    ("ranks", "ranks", lambda value: f"{value:.0f}"),
    ("nodes", "nodes", lambda value: f"{value:.0f}"),
    ("nccl", "NCCL", str),
)
_PACE = 9
"""So many of them, the first, tell how fast a run was."""


def trend(
    job: Annotated[str, typer.Argument(metavar="JOB", help="A job (all of its runs), a run, or JOB@RUN.")],
    history: FolderOption, since: SinceOption = SINCE,
    steps: Annotated[int, typer.Option("--steps", min=1, max=1000, help="Parts of the time.")] = 20,
    as_json: JsonOption = False, memory: MemoryOption = MEMORY, timeout: TimeoutOption = TIMEOUT_S,
) -> None:  # fmt: skip
    """How long an iteration of a job took, over time."""
    from ncclwatch.history import questions

    begin = parse_since(since)
    with opened(history, begin, TABLES_OF_RUNS, memory, timeout) as asked:
        named, run = questions.find_job(asked, job)
        found = questions.trend(asked, named, run, begin, steps)
    if as_json:
        emit_json(json_of(found))
        return
    show(list(trend_lines(found)))


def trend_lines(found: Sequence[Record]) -> Iterator[str]:
    """A line a part of the time, with a bar for its median; and how the last differs from the first."""
    if not found:
        yield "no iteration of it was seen: they are told from calls (ncclwatch doctor), where an iteration has more than one"
        return
    longest = max(one["median_s"] for one in found)
    rows = [
        (
            when(one["begin"]), one["run"], number(one["iterations"]), number(one["median_s"], ".4g", " s"),
            number(one["p99_s"], ".4g", " s"), number(one["longest_s"], ".4g", " s"), number(one["slowest_rank"]),
            "█" * max(1, round(BAR * one["median_s"] / longest)) if longest > 0 else "",
        )
        for one in found
    ]  # fmt: skip
    header = ("FROM (UTC)", "RUN", "ITERATIONS", "MEDIAN", "P99", "LONGEST", "SLOWEST RANK", "")
    yield from columns(header, rows, right=(2, 3, 4, 5, 6))
    first, last = found[0]["median_s"], found[-1]["median_s"]
    if len(found) > 1 and first > 0:
        yield ""
        change = last / first - 1
        yield f"from {first:.4g} s to {last:.4g} s: {_changed(change)}"


def _changed(change: float) -> str:
    return "as long as before" if abs(change) < APART else f"{abs(change):.0%} {'longer' if change > 0 else 'shorter'}"


def compare(
    first: Annotated[str, typer.Argument(metavar="RUN", help="A run, JOB@RUN, or a job (its newest run).")],
    second: Annotated[str, typer.Argument(metavar="RUN", help="The other.")],
    history: FolderOption, as_json: JsonOption = False,
    memory: MemoryOption = MEMORY, timeout: TimeoutOption = TIMEOUT_S,
) -> None:  # fmt: skip
    """Two runs side by side: iterations, rates, latencies, trouble."""
    from ncclwatch.history import questions

    with opened(history, None, (*TABLES_OF_RUNS, "flows"), memory, timeout) as asked:
        named = [questions.find_run(asked, one) for one in (first, second)]
        figures = [questions.about_run(asked, *one) for one in named]
    if as_json:
        emit_json([{"job": job, "run": run, **json_of(one)} for (job, run), one in zip(named, figures, strict=True)])
        return
    show(list(compare_lines(named, figures, Style())))


def compare_lines(named: Sequence[tuple[str, str]], figures: Sequence[Record], style: Style) -> Iterator[str]:
    """A line a figure; those of the pace that differ by more than runs of one program do are marked."""
    rows = []
    for place, (key, label, text) in enumerate(_FIGURES):
        values = [one[key] for one in figures]
        if all(value is None for value in values):
            continue
        rows.append(
            (label, *("" if value is None else clean(text(value), 40) for value in values), _differs(place, values, style))
        )
    yield from columns(("", *(f"{name(job)}@{run}" for job, run in named), "SECOND TO FIRST"), rows, right=(1, 2))


def _differs(place: int, values: Sequence[Any], style: Style) -> str:
    first, second = values
    if first is None or second is None or isinstance(first, str):
        return "" if first == second else "differs"
    if not first:
        return ""
    change = second / first - 1
    text = f"{change:+.1%}"
    return style.bold(text) if place < _PACE and abs(change) >= APART else text


def downtime(
    history: FolderOption, job: JobNameOption = "", since: SinceOption = SINCE,
    checkpoint: Annotated[
        str | None, typer.Option("--checkpoint-every", metavar="TIME", help="How often the job writes a checkpoint: 30m, 2h.")
    ] = None,
    as_json: JsonOption = False, memory: MemoryOption = MEMORY, timeout: TimeoutOption = TIMEOUT_S,
) -> None:  # fmt: skip
    """How long jobs were down, by phase: detection, diagnosis, restart, lost work. What is inferred is marked with ~."""
    from ncclwatch.history.downtime import downtime as ask

    begin, every = parse_since(since), parse_duration(checkpoint) if checkpoint else None
    with opened(history, begin, TABLES_OF_RUNS, memory, timeout) as asked:
        found = ask(asked, begin, job, every)
    if as_json:
        emit_json(json_of(downtime_json(found)))
        return
    show(list(downtime_lines(found)))


def parse_duration(text: str) -> float:
    """``30m`` in seconds. Raises ``UsageError``."""
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    digits, unit = text[:-1], text[-1:]
    if unit not in units or not digits.isascii() or not digits.isdigit() or len(digits) > 7 or int(digits) == 0:
        raise UsageError(f"'{clean(text, 40)}' is no length of time", "write it like 30m or 2h")
    return int(digits) * units[unit]


def downtime_json(found: Downtime) -> dict[str, Any]:
    """Totals by phase and by how they are known, and every outage."""
    from ncclwatch.history.downtime import How

    phases = {
        phase: {"seconds": found.total(phase), **{str(how): found.total(phase, how) for how in (How.MEASURED, How.INFERRED)}}
        for phase in _PHASES
    }
    outages = [{**asdict(one), "seconds": one.seconds} for one in found.outages]
    return {"watched_s": found.watched_s, "phases": phases, "outages": outages}


def downtime_lines(found: Downtime) -> Iterator[str]:
    """The table by phase, and a line an outage."""
    from ncclwatch.history.downtime import How

    if not found.outages:
        yield f"no job was down; runs were seen for {duration(found.watched_s)} in all"
        return
    rows = []
    for phase, words in _PHASES.items():
        total, inferred = found.total(phase), found.total(phase, How.INFERRED)
        unknown = sum(getattr(one, phase).how is How.UNKNOWN for one in found.outages)
        told = (f"~{duration(inferred)} of it inferred" if inferred else "", f"not known of {unknown}" if unknown else "")
        rows.append((words, duration(total), _share(total, found.watched_s), "; ".join(filter(None, told))))
    total, count = sum(one.seconds for one in found.outages), len(found.outages)
    rows.append(("all phases", duration(total), _share(total, found.watched_s), f"{count} outage{'s' if count > 1 else ''}"))
    yield from columns(("PHASE", "TIME", "OF TIME SEEN", ""), rows, right=(1, 2))
    yield ""
    header = ("BEGAN (UTC)", "JOB", "RUN", "CLASS", "NODES", "DETECTION", "DIAGNOSIS", "RESTART", "LOST WORK", "")
    yield from columns(header, [_outage_row(one) for one in found.outages], right=(5, 6, 7, 8))
    notes = sorted({phase.why for one in found.outages for key in _PHASES if (phase := getattr(one, key)).why})
    if notes:
        yield ""
        yield "~ inferred, ? not known:"
        yield from (f"  {why}" for why in notes)


def _outage_row(one: Outage) -> tuple[str, ...]:
    from ncclwatch.history.downtime import How

    marks = {How.MEASURED: "", How.INFERRED: "~"}
    phases = [getattr(one, phase) for phase in _PHASES]
    times = ["?" if phase.how is How.UNKNOWN else f"{marks[phase.how]}{duration(phase.seconds)}" for phase in phases]
    nodes = name(", ".join(one.nodes))
    return when(one.began), name(one.job), one.run, clean(one.verdict_class, 24), nodes, *times, "stands" if one.stands else ""


def _share(seconds: float, of: float) -> str:
    return f"{seconds / of:.2%}" if of > 0 else ""
