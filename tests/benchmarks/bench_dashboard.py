"""What drawing costs: CPU share and latency of the dashboard at 2 Hz with 8, 512 and 4,096 ranks; goal: under 5 % of a core.

`python tests/benchmarks/bench_dashboard.py [RANKS...]`. Every redraw gets a view in which every rank has moved on, as in a
running job; time is CPU time of the process over the redraws, taking apart what making the view for the first time costs.
"""

from __future__ import annotations

import asyncio
import resource
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from ncclwatch.dashboard.app import Dashboard
from ncclwatch.dashboard.source import Mailbox, StillSource
from ncclwatch.model.verdict import VerdictClass
from ncclwatch.view.frame import View
from unit.views import view

REDRAWS = 20
HZ = 2
KEYS = {"ranks": "1", "grid": "2", "communicators": "3", "operations": "4", "delays": "7", "log": "8"}


class Fed(StillSource):
    """Views as they are handed in."""

    def __init__(self) -> None:
        super().__init__([])
        self.mailbox = Mailbox()

    def take(self) -> list[View]:
        return self.mailbox.take()


async def measure(views: Sequence[View], key: str, size: tuple[int, int]) -> tuple[float, float]:
    """(share of a core at 2 Hz, longest redraw in ms)."""
    source = Fed()
    app = Dashboard(source)
    took, spent = [], []
    async with app.run_test(size=size) as pilot:
        source.mailbox.put(views[0])
        app.redraw()
        await pilot.press(key)
        await pilot.pause()
        for shown in views[1:]:
            # The collector's thread makes views; only what drawing needs of one is counted.
            source.mailbox.put(View(shown.frame))
            begun, cpu = time.perf_counter(), time.process_time()
            app.redraw()
            await pilot.pause()
            took.append(time.perf_counter() - begun)
            spent.append(time.process_time() - cpu)
    return statistics.mean(spent) * HZ, max(took) * 1e3


def main() -> int:
    """Print a line for each size and view."""
    print(f"{'ranks':>6} {'terminal':>9} {'view':<14} {'of a core at 2 Hz':>18} {'longest redraw':>15}")
    for ranks in [int(word) for word in sys.argv[1:]] or [8, 512, 4096]:
        views = [
            view(ranks, VerdictClass.STOPPED if i % 4 == 3 else VerdictClass.RUNNING, number=i, time=1.7e9 + i)
            for i in range(REDRAWS + 1)
        ]
        for size in ((80, 24), (200, 60)):
            for name, key in KEYS.items():
                share, longest = asyncio.run(measure(views, key, size))
                print(f"{ranks:>6} {size[0]:>5}x{size[1]:<3} {name:<14} {share:>17.2%} {longest:>12.1f} ms", flush=True)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"memory of this benchmark at its largest, {REDRAWS + 1} views held twice: {peak:.0f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
