"""``ncclwatch history jobs``, ``verdicts``, ``node``, ``gaps``: what happened, when, and where."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
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
from ncclwatch.text import Style, clean, columns, compressed, duration

if TYPE_CHECKING:
    from ncclwatch.history.questions import Blamed, Record

FRESH_S = 180.0
"""Unit: s. From: rates are written once a minute (``history.feed``): what has none for three is watched no longer."""
TABLES_OF_A_NODE = ("verdicts", "nics", "gpus", "flows")


def jobs(
    history: FolderOption, since: SinceOption = SINCE, as_json: JsonOption = False,
    memory: MemoryOption = MEMORY, timeout: TimeoutOption = TIMEOUT_S,
) -> None:  # fmt: skip
    """Every run of every job: when, how large, how fast, how often something was wrong."""
    from ncclwatch.history import questions

    begin = parse_since(since)
    with opened(history, begin, TABLES_OF_RUNS, memory, timeout) as asked:
        found = questions.jobs(asked, begin)
    if as_json:
        emit_json(json_of(found))
        return
    show(list(job_lines(found, Style())))


def job_lines(found: Sequence[Record], style: Style) -> Iterator[str]:
    """A line a run, the newest first."""
    rows = [
        (
            name(one["job"]), one["run"], when(one["first"]), duration((one["last"] - one["first"]).total_seconds()),
            _state(one, style), number(one["ranks"]), number(one["nodes"]), one["nccl"] or "",
            duration(one["iteration_s"]) if one["iteration_s"] is not None else "",
            number(one["verdicts"]) if one["verdicts"] else "",
            duration(one["stood_s"]) if one["stood_s"] else "", one["mostly"] or "",
        )
        for one in found
    ]  # fmt: skip
    header = (
        "JOB",
        "RUN",
        "FIRST SEEN (UTC)",
        "FOR",
        "NOW",
        "RANKS",
        "NODES",
        "NCCL",
        "ITERATION",
        "VERDICTS",
        "STOOD",
        "MOSTLY",
    )
    yield from columns(header, rows, right=(3, 5, 6, 8, 9, 10)) if rows else ["no run was seen in that time"]


def _state(one: Record, style: Style) -> str:
    if one["ended"] is not None:
        return "ended"
    fresh = datetime.now(UTC).replace(tzinfo=None) - one["last"] < timedelta(seconds=FRESH_S)
    if not fresh:
        return "not seen now"
    return style.bad("trouble") if one["standing"] else "running"


def verdicts(
    history: FolderOption, job: JobNameOption = "",
    node_name: Annotated[str, typer.Option("--node", metavar="NODE", help="That blame this node only.")] = "",
    since: SinceOption = SINCE, as_json: JsonOption = False,
    memory: MemoryOption = MEMORY, timeout: TimeoutOption = TIMEOUT_S,
) -> None:  # fmt: skip
    """Verdicts that accused somebody, the newest first: when, of which job, whom, for how long."""
    from ncclwatch.history import questions

    begin = parse_since(since)
    with opened(history, begin, ("verdicts",), memory, timeout) as asked:
        found = questions.verdicts(asked, begin, job, node_name)
    if as_json:
        emit_json(json_of(found))
        return
    show(list(verdict_lines(found)) or ["no verdict accused anybody in that time"])


def verdict_lines(found: Sequence[Record]) -> Iterator[str]:
    """A line a verdict."""
    rows = [
        (
            when(one["time"]), name(one["job"]), clean(one["class"] or "", 24), number(one["confidence"], ".0%"),
            name(", ".join(one["nodes"] or ())), compressed(one["ranks"] or ()), _ended(one), clean(one["summary"] or "", 200),
        )
        for one in found
    ]  # fmt: skip
    header = ("TOLD (UTC)", "JOB", "CLASS", "SURE", "NODES", "RANKS", "ENDED", "WHAT")
    yield from columns(header, rows, right=(3,)) if rows else ()


def _ended(one: Record) -> str:
    if one["ended_by"] is None:
        return "no"
    return f"{'recovered' if one['ended_by'] == 'recovery' else 'over'} after {duration(one['stood_s'] or 0.0)}"


def node(
    node_name: Annotated[str, typer.Argument(metavar="NAME", help="The node, as the scheduler or its host name has it.")],
    history: FolderOption, since: SinceOption = SINCE, as_json: JsonOption = False,
    memory: MemoryOption = MEMORY, timeout: TimeoutOption = TIMEOUT_S,
) -> None:  # fmt: skip
    """Has this node been blamed before? How often, when, for what; and what its NICs, GPUs and flows showed."""
    from ncclwatch.history import questions

    begin = parse_since(since)
    with opened(history, begin, TABLES_OF_A_NODE, memory, timeout) as asked:
        found = questions.blamed(asked, node_name, begin)
    if as_json:
        fields: dict[str, Any] = {field: getattr(found, field) for field in ("node", "incidents", "reasons", "health", "others")}
        emit_json(json_of(fields | {"times": len(found.incidents)}))
        return
    show(list(node_lines(found, f"{begin:%Y-%m-%d}", Style())))


def node_lines(found: Blamed, since: str, style: Style) -> Iterator[str]:
    """The answer first, then what it is made of."""
    told, who = found.incidents, clean(found.node, 80)
    if told:
        times = f"{len(told)} time{'s' if len(told) > 1 else ''}"
        jobs_named = len({one["job"] for one in told})
        yield (
            style.bad(f"{who} was blamed {times}")
            + f" since {since}, in {jobs_named} job{'s' if jobs_named > 1 else ''}: "
            + (", ".join(f"{clean(reason, 60)} ({count})" for reason, count in found.reasons.items()))
        )
        yield ""
        yield from verdict_lines(told)
    else:
        like = f"; blamed were {', '.join(clean(name, 60) for name in found.others)}" if found.others else ""
        yield f"{who} was not blamed since {since}{like}"
    if found.health:
        yield ""
        rows = [
            (clean(one["part"], 40), f"{one['times']}x", when(one["last"]), clean(one["what"] or "", 160)) for one in found.health
        ]
        yield from columns(("PART", "TIMES", "LAST (UTC)", "WHAT"), rows, right=(1,))


def gaps(
    history: FolderOption, since: SinceOption = SINCE, as_json: JsonOption = False,
    memory: MemoryOption = MEMORY, timeout: TimeoutOption = TIMEOUT_S,
) -> None:  # fmt: skip
    """What is missing: writers that were killed, looks that were dropped, times in which nobody kept a history."""
    from ncclwatch.history import questions

    begin = parse_since(since)
    with opened(history, begin, ("gaps", "lives"), memory, timeout) as asked:
        found = questions.gaps(asked, begin)
    if as_json:
        emit_json(json_of(found))
        return
    rows = [
        (
            clean(one["kind"] or "", 20), when(one["since"]), when(one["until"]),
            duration((one["until"] - one["since"]).total_seconds()) if one["since"] and one["until"] else "",
            number(one["dropped"]) if one["dropped"] else "", clean(one["detail"] or "", 160),
        )
        for one in found
    ]  # fmt: skip
    header = ("GAP", "SINCE (UTC)", "UNTIL (UTC)", "FOR", "LOOKS LOST", "WHY")
    show(columns(header, rows, right=(3, 4)) if rows else ["nothing is missing in that time"])
