"""Whether confidence means what it says: of the verdicts that were said with so much confidence, how many were right.

``python -m score.reliability FILE...`` takes what ``score --json`` wrote, of real and of simulated jobs, and prints the table as
Markdown; ``--by-rule`` adds one line for each rule that led to a verdict, from which the confidence of that rule is taken.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from score.exact import Share, share
from score.table import grid

EDGES = (0.0, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Bins of the stated confidence; the last holds 1 as well."""
FEWEST = 60
"""Judgements of a bin at least: with fewer, the exact interval is wider than the bins, and the test could not fail."""


@dataclass(frozen=True, slots=True)
class Said:
    """One verdict that was said: its confidence, the rules that led to it, and whether class and place were right."""

    confidence: float
    right: bool
    rules: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Bin:
    """Verdicts whose stated confidence lies between two edges."""

    low: float
    high: float
    said: tuple[Said, ...]

    @property
    def stated(self) -> float:
        """The mean of what was stated."""
        return sum(one.confidence for one in self.said) / len(self.said) if self.said else 0.0

    @property
    def right(self) -> Share:
        """How many were right, with the exact interval."""
        return share(sum(one.right for one in self.said), len(self.said))

    @property
    def honest(self) -> bool:
        """Whether what was stated lies within what was found."""
        return self.right.low <= self.stated <= self.right.high

    def joined(self, other: Bin) -> Bin:
        """Both in one."""
        return Bin(min(self.low, other.low), max(self.high, other.high), self.said + other.said)


def bins(said: Iterable[Said], fewest: int = FEWEST) -> list[Bin]:
    """The bins, those with too few judgements merged with the smaller of their neighbours; empty ones are left out."""
    all_said = list(said)
    pairs = pairwise(EDGES)
    made = [
        Bin(low, high, tuple(s for s in all_said if low <= s.confidence < high or s.confidence == high == EDGES[-1]))
        for low, high in pairs
    ]
    made = [one for one in made if one.said]
    while len(made) > 1 and min(len(one.said) for one in made) < fewest:
        at = min(range(len(made)), key=lambda n: len(made[n].said))
        beside = [n for n in (at - 1, at + 1) if 0 <= n < len(made)]
        other = min(beside, key=lambda n: len(made[n].said))
        first = min(at, other)
        made[first : first + 2] = [made[first].joined(made[first + 1])]
    return made


def said_in(paths: Iterable[Path], diagnoser: str = "ncclwatch") -> list[Said]:
    """What was said in the results of score: verdicts that accuse, of healthy jobs as well (those are never right)."""
    found = []
    for path in paths:
        found += [
            Said(float(entry["confidence"]), bool(entry["right"]), tuple(entry.get("rules", ())))
            for entry in json.loads(path.read_text("utf-8"))["results"]
            if entry["diagnoser"] == diagnoser and entry["said"] and entry.get("confidence") is not None
        ]
    return found


def table(said: Sequence[Said]) -> str:
    """The reliability table as Markdown."""
    rows = []
    for one in bins(said):
        right = one.right
        rows.append([
            f"{one.low:.0%} to {one.high:.0%}", str(right.of), f"{one.stated:.1%}", str(right.count),
            f"{right.count / right.of:.1%}", f"{right.low:.1%} to {right.high:.1%}",
            "yes" if one.honest else "NO", "" if right.of >= FEWEST else f"fewer than {FEWEST}",
        ])  # fmt: skip
    head = ("stated", "judgements", "mean stated", "right", "share", "exact 95 % interval", "stated lies within", "")
    return "\n".join(grid(head, rows, markdown=True)) + "\n"


def by_rule(said: Iterable[Said]) -> str:
    """For each rule the verdicts that it led to: the share that was right is its confidence."""
    parts: dict[str, list[Said]] = defaultdict(list)
    for one in said:
        for rule in one.rules or ("(none named)",):
            parts[rule].append(one)
    rows = []
    for rule, part in sorted(parts.items()):
        right = share(sum(one.right for one in part), len(part))
        stated = sum(one.confidence for one in part) / len(part)
        rows.append(
            [rule, str(right.of), f"{stated:.1%}", f"{right.count / right.of:.1%}", f"{right.low:.1%} to {right.high:.1%}"]
        )
    head = ("rule", "verdicts", "mean stated", "right", "exact 95 % interval")
    return "\n".join(grid(head, rows, markdown=True)) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0 when every bin states what was found, 1 when one does not, 2 when nothing was said at all."""
    parser = argparse.ArgumentParser(prog="score.reliability", description="Compare stated confidence with what was right.")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE")
    parser.add_argument("--by-rule", action="store_true")
    options = parser.parse_args(arguments)
    said = said_in(options.files)
    if not said:
        print("no verdict with a confidence in these files", file=sys.stderr)
        return 2
    print(table(said), end="")
    if options.by_rule:
        print("\n" + by_rule(said), end="")
    return 0 if all(one.honest for one in bins(said)) else 1


if __name__ == "__main__":
    sys.exit(main())
