"""``python -m score.kept_causes``: whether the cause is right in kept recordings of drawn faults and healthy jobs (real NCCL)."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ncclwatch.knowledge.session import InformedSession
from ncclwatch.model.verdict import Verdict
from ncclwatch.simulate.scenario import FaultKind
from score.archive import JOBS, Kept, name_of, opened, recordings_in
from score.causes import right_cause, told
from score.table import grid

DRAWN = {
    "killed": FaultKind.KILL, "stopped": FaultKind.STOP, "two-stopped": FaultKind.STOP, "two-slow-gpus": FaultKind.SLOW_GPU,
    "slow-gpu-from-start": FaultKind.SLOW_GPU, "late-link": FaultKind.SLOW_LINK, "proxy-sleeps": FaultKind.PROXY_SLEEP,
    "a rank missing in the creation of a communicator": FaultKind.INIT_MISSING,
}  # fmt: skip
"""What kept recordings call a drawn fault, where that is not the fault's own name."""


class Judged(NamedTuple):
    """One kept recording: what was played (empty: nothing), the class of the last verdict that accuses, the row it tells."""

    name: str
    fault: str
    said: str
    row: str
    right: bool


def fault_of(kept: Kept) -> FaultKind | None:
    """What a seed drew for it; ``None`` for healthy jobs, and for those that somebody chose."""
    name = kept.about.removeprefix("drawn: ")
    if name in DRAWN:
        return DRAWN[name]
    return FaultKind(name) if kept.about.startswith("drawn: ") and name in {kind.value for kind in FaultKind} else None


def last_accusing(path: Path) -> Verdict | None:
    """The last verdict that accuses somebody while a recording is judged look by look."""
    session, last = InformedSession(), None
    with opened(path) as recordings:
        for _, _, batch in recordings.batches():
            session.feed(batch)
            if batch.looked:
                last = next((one for one in session.judge(batch.time_ns).verdicts if one.verdict_class.accuses), last)
    return last


def judge(path: Path) -> Judged | None:
    """The last verdict that accuses in a kept recording; ``None`` for a job that was no draw."""
    kept = Kept.load(path)
    kind = fault_of(kept)
    if kind is None and kept.verdicts:
        return None
    last = last_accusing(path)
    row = told(last) if last is not None else ""
    right = bool(right_cause([kind], last)) if kind is not None else last is None
    return Judged(name_of(path), str(kind or ""), str(last.verdict_class) if last else "", row, right)


def table(found: Sequence[Judged], *, markdown: bool = False) -> list[str]:
    """A line for each fault: jobs, in how many anything was said, in how many the cause was right, and what was told instead."""
    lines = []
    for fault in sorted({one.fault for one in found}):
        part = [one for one in found if one.fault == fault]
        wrong = sorted({one.row or "nothing" for one in part if not one.right})
        said = sum(bool(one.said) for one in part)
        lines.append([fault or "healthy", str(len(part)), str(said), str(sum(one.right for one in part)), ", ".join(wrong)])
    return grid(("fault", "jobs", "accused", "cause right", "told instead"), lines, markdown=markdown)


def main() -> None:
    """Print the table of the kept recordings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--markdown", action="store_true")
    options = parser.parse_args()
    found = [one for path in recordings_in(JOBS) if (one := judge(path)) is not None]
    print("\n".join(table(found, markdown=options.markdown)))


if __name__ == "__main__":
    main()
