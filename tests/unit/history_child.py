"""A writer that is killed: hands over numbered rows as fast as they are taken, and says on standard output how many it has.

python history_child.py FOLDER SEED
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

import pyarrow.parquet  # noqa: F401 - takes longer than many a life here

from ncclwatch.history.tables import Row
from ncclwatch.history.writer import HistoryWriter, Rhythm

HURRY = Rhythm(roll_s=0.05, roll_bytes=1 << 16, compact_s=0.15)
"""So that a kill meets every state that a writer can be in."""
DAY_NS = 86_400 * 10**9


def main() -> None:
    root, seed = Path(sys.argv[1]), int(sys.argv[2])
    dice = random.Random(seed)
    writer = HistoryWriter(root, command="child", rhythm=HURRY)
    print(f"life {writer.life}", flush=True)
    number = 0
    while True:
        number += 1
        time_ns = time.time_ns()
        # Days that are over are merged to one file each; today's once there are many.
        values = {"rank": number, "node": f"node{seed % 3}", "bytes_per_s": dice.random()}
        row = Row("rates", time_ns - dice.randrange(3) * DAY_NS, f"job/{number % 2}", "run", values)
        writer.put(time_ns, lambda row=row: [row])  # type: ignore[misc]
        print(f"offered {number} {time.time_ns()}", flush=True)
        if number % 4 == 0:
            time.sleep(0.01)


if __name__ == "__main__":
    main()
