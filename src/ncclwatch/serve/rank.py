"""One rank in full: its communicators and what each unfinished transfer of it waits for."""

from __future__ import annotations

from typing import Any

from ncclwatch.model.state import ProcessSample
from ncclwatch.serve.moment import window_part
from ncclwatch.text import clean
from ncclwatch.view.frame import View
from ncclwatch.view.steps import operation_name, waits_for

MAX_TRANSFERS = 64
MAX_COMMUNICATORS = 64


def rank_detail(view: View, rank: int) -> dict[str, Any] | None:
    """What is known of a rank now; ``None`` for one that no process of is observed."""
    windows = view.frame.windows
    place = next((at for at, window in enumerate(windows) if window.rank == rank), None)
    if place is None:
        return None
    window = windows[place]
    found = window_part(window, view.letters[place])
    sample = view.frame.samples.get(window.process.key)
    found["command"] = clean(" ".join(window.process.command[:24]), 300)
    found["waits_for"] = sorted({other for waiter, other in view.waits if waiter == rank})[:MAX_COMMUNICATORS]
    found["waited_by"] = sorted({waiter for waiter, other in view.waits if other == rank})[:MAX_COMMUNICATORS]
    found["communicators"] = _communicators(view, sample) if sample is not None else None
    found["transfers"] = _transfers(sample) if sample is not None else None
    return found


def _communicators(view: View, sample: ProcessSample) -> list[dict[str, Any]]:
    roles = {row.hash: row.role for row in view.communicators}
    return [
        {"hash": f"{one.hash:016x}", "rank": one.rank, "nranks": one.nranks, "role": clean(roles.get(one.hash, ""), 40)}
        for one in sample.communicators[:MAX_COMMUNICATORS]
    ]


def _transfers(sample: ProcessSample) -> list[dict[str, Any]]:
    """Unfinished transfers, each with what the first step that is not done waits for."""
    found: list[dict[str, Any]] = []
    for operation in sample.operations:
        for sub in operation.subs:
            if sub.done < sub.nsteps and len(found) < MAX_TRANSFERS:
                found.append(
                    {
                        "operation": clean(operation_name(operation), 60),
                        "direction": operation.direction.name.lower(),
                        "channel": sub.channel,
                        "peer": sub.peer,
                        "done": sub.done,
                        "total": sub.nsteps,
                        "waits": clean(waits_for(operation, sub), 160),
                    }
                )
    return found
