"""The scoreboard as text and as Markdown."""

from __future__ import annotations

from collections.abc import Sequence

from ncclwatch.simulate.scenario import ScoreClass
from score.diagnosers import Diagnoser
from score.scoring import Line

HEAD = (
    "class",
    "cases",
    "detected",
    "class ok",
    "rank ok",
    "stage ok",
    "link ok",
    "cause ok",
    "false alarms",
    "detect s",
    "locate s",
    "prec.",
    "recall",
    "F1",
)
SIMULATED = "records: SIMULATED (discrete-event model)"
REAL = "records: REAL NCCL, CUDA stand-in"


def _cells(line: Line) -> list[str]:
    def part(pair: tuple[int, int]) -> str:
        return f"{pair[0]}/{pair[1]}" if pair[1] else "-"

    def number(value: float | None, digits: int = 2) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    clean = line.score_class == ScoreClass.CLEAN
    quiet = clean or line.score_class == ScoreClass.UNSEEN
    name = line.score_class + (" (no engine yet)" if line.not_yet else "")
    return [
        name,
        str(line.cases),
        "-" if clean else str(line.detected),
        "-" if quiet else str(line.right_class),
        part(line.right_rank),
        part(line.right_stage),
        part(line.right_link),
        part(line.right_cause),
        str(line.false_alarms),
        number(line.detection_s, 1),
        number(line.location_s, 1),
        number(line.precision),
        number(line.recall),
        number(line.f1),
    ]


def _short(line: Line) -> str:
    return f"{line.detected} / {line.right_class} / {line.right}" if line.detected else "-"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(r) + " |" for r in (head, ["---"] * len(head), *rows)]


def _aligned(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(r[i]) for r in (head, *rows)) for i in range(len(head))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in (head, *rows)]


def grid(head: Sequence[str], rows: Sequence[Sequence[str]], *, markdown: bool) -> list[str]:
    """A table as lines of text or of Markdown."""
    return (_markdown if markdown else _aligned)(head, rows)


def render(
    diagnosers: Sequence[Diagnoser], lines: dict[str, list[Line]], *, source: str = SIMULATED, markdown: bool = False
) -> str:
    """Ours in full, then one line a class for everybody: cases right in class and place."""
    lay = _markdown if markdown else _aligned
    title = "### " if markdown else ""
    out: list[str] = []
    first = diagnosers[0]
    out += [f"{title}{first.name}: {first.note}; {source}", ""]
    out += lay(HEAD, [_cells(line) for line in lines[first.name]])
    out += ["unseen: a fault on a node nobody looks at; detected counts those said to be unknown, anything more is a false alarm"]
    what = "detected / right class / right class and place, of each; cases with a false alarm in the last row"
    out += ["", f"{title}{what}; {source}", ""]
    names = [d.name for d in diagnosers]
    rows = []
    for at, line in enumerate(lines[first.name]):
        if line.score_class in (ScoreClass.CLEAN, ScoreClass.UNSEEN):
            continue
        rows.append([line.score_class, str(line.cases), *(_short(lines[n][at]) for n in names)])
    rows.append(["F1 of all", "", *("-" if (f := lines[n][-1].f1) is None else f"{f:.2f}" for n in names)])
    rows.append(["false alarms", "", *(str(lines[n][-1].false_alarms) for n in names)])
    out += lay(("class", "cases", *names), rows)
    out.append("")
    out += [("- " if markdown else "  ") + f"{d.name}: {d.note}" for d in diagnosers]
    return "\n".join(out) + "\n"
