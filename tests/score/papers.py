"""Mycroft's Fig. 8 and CCL-D's Table 1 with our figures on SIMULATED records beside theirs, which are quoted (real GPUs).

PYTHONPATH=tests python -m score --set ci --json score.json
PYTHONPATH=tests python -m score.papers score.json
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ncclwatch.simulate.scenario import Scenario, load_all
from score.table import SIMULATED

SCENARIOS = Path(__file__).resolve().parent.parent / "scenarios"
MYCROFT = "Mycroft 7.1"
INJECTIONS = (
    "NIC shutdown", "NIC bandwidth limit", "PCIe downgrading", "GPU power limit", "background computation", "background traffic",
    "NCCL delay",
)  # fmt: skip
MYCROFT_QUOTED = "no more than 13 s for any of the seven (7.1, Efficiency)"
CLASSES = (("H1", "Not-entered hang"), ("H2", "Inconsistent hang"), ("H3", "Hardware fault"), ("S1", "Comp. slow"),
           ("S2", "Comm. slow"), ("S3", "Mixed slow"))  # fmt: skip
CCLD_QUOTED = (
    ("Bisection", "no", "no", "yes", "?", "network", "?", "> 30 min", "> 1 h", "4 min", "4 min"),
    ("Stack", "yes", "yes", "yes", "no", "no", "no", "> 30 min", "-", "5 min", "-"),
    ("RAS", "yes", "no", "no", "no", "no", "no", "> 30 min", "-", "10 ms", "-"),
    ("Greyhound", "no", "no", "no", "GPU clocks only", "?", "no", "-", "1 min", "-", "1.43 s"),
    ("C4D", "?", "?", "?", "no", "yes", "no", "5 min", "1 min", "104 ms", "138 ms"),
    ("CCL-D", "yes", "yes", "yes", "yes", "yes", "yes", "5 min", "1 min", "108 ms", "146 ms"),
)
"""Times: its Table 1. What each covers: its 6.2.1, which says so in words (the marks of the table are not in the text we have);
``?`` where the words do not say."""


def mycroft(results: list[dict[str, Any]], scenarios: dict[str, Scenario]) -> str:
    """Seconds from the effect of each injection to the first accusation and to the first that names the right place."""
    lines = [
        f"### Mycroft's seven injections; ncclwatch on {SIMULATED}",
        "",
        f"Quoted: {MYCROFT_QUOTED}. Ours is shown records at 1, 2, 4, 6, 8, 10, 12, 15 and 18 s after a slow-down begins.",
        "",
        "| injection | case | class and place right | detected (s) | located (s) |",
        "| --- | --- | --- | --- | --- |",
    ]
    for result in results:
        source = scenarios[result["case"]].source if result["case"] in scenarios else ""
        if not source.startswith(MYCROFT):
            continue
        number = int(source[len(MYCROFT) :].strip(" ()")) - 1
        right = "yes" if result["right"] else "no"
        lines.append(
            f"| {number + 1} {INJECTIONS[number]} | {result['case']} | {right} | {_seconds(result['detection_s'])} | "
            f"{_seconds(result['location_s'])} |"
        )
    return "\n".join([*lines[:6], *sorted(lines[6:])]) + "\n"


def ccld(results: list[dict[str, Any]]) -> str:
    """Accuracy by CCL-D's classes, and latencies beside those of its Table 1."""
    parts = {key: [r for r in results if r["score_class"] == key] for key, _ in CLASSES}
    kinds = [[result for key in keys for result in parts[key]] for keys in (("H1", "H2", "H3"), ("S1", "S2", "S3"))]
    detected = [f"{_median([r['detection_s'] for r in kind if r['detection_s'] is not None])} s" for kind in kinds]
    located = [f"{_median([r['analysis_s'] * 1000 for r in kind if r.get('analysis_s') is not None])} ms" for kind in kinds]
    accuracy = [f"{sum(r['right'] for r in parts[key])} of {len(parts[key])}" for key, _ in CLASSES]
    head = ["method", *(name for _, name in CLASSES), "hang detected", "slow detected", "hang located", "slow located"]
    ours = ["ncclwatch (simulated)", *accuracy, *detected, *located]
    quoted = [[f"{name} (quoted)", *cells] for name, *cells in CCLD_QUOTED]
    rows = [head, ["---"] * len(head), ours, *quoted]
    title = f"### CCL-D's Table 1; ncclwatch on {SIMULATED}; theirs quoted, on 16 GPUs"
    notes = (
        "Medians. *Located* is the analysis alone: ours the judgement that first named the right place, with the taking in of",
        "the records that were new. What theirs covers is quoted from its 6.2.1 in words; `?` where the words do not say.",
    )
    return "\n".join([title, "", *notes, "", *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f}"


def _median(values: list[float]) -> str:
    return f"{sorted(values)[len(values) // 2]:.0f}" if values else "-"


def main(arguments: list[str] | None = None) -> int:
    """Print both tables; exit status 1 for a file that is no score."""
    parser = argparse.ArgumentParser(prog="score.papers", description="Tables of two papers, ours beside theirs.")
    parser.add_argument("score", type=Path, help="what `python -m score --json` wrote")
    options = parser.parse_args(arguments)
    try:
        score = json.loads(options.score.read_text("utf-8"))
        results = [result for result in score["results"] if result["diagnoser"] == "ncclwatch"]
    except (OSError, ValueError, KeyError) as error:
        print(f"{options.score} cannot be read as a score: {error}", file=sys.stderr)
        return 1
    print(mycroft(results, {scenario.name: scenario for scenario in load_all(SCENARIOS)}))
    print(ccld(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
