"""How long the engine takes: one diagnosis by number of ranks, and call records into the ledger.

Made-up records (a ring AllReduce with one rank that has not entered, 2 channels): the engine's time, not the reading.
CCL-D quotes 108 ms to locate at 16 ranks and less than a minute at 4,000 (section 6).
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ncclwatch.engine.diagnose import diagnose
from ncclwatch.engine.ledger import Ledger
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from ncclwatch.model.state import ChannelRing, ProcessSample
from unit.synthetic import Rank, communicator, recv, send


def hung_ring(world: int) -> list[list[ProcessSample]]:
    """Two looks at a ring in which rank 1 has not entered."""
    series = []
    for rank in range(world):
        following, previous = (rank + 1) % world, (rank - 1) % world
        operations = []
        for channel in (0, 1):
            if rank == 1:
                continue
            done = 0 if following == 1 else 4
            got = 0 if previous == 1 else 4
            operations += [
                send(following, sent=8 if following == 1 else 4, done=done, produced=8 if following == 1 else 4, channel=channel),
                recv(previous, posted=got + 8, received=got, delivered=got, consumed=got, channel=channel),
            ]
        # Peers are left out: at 4,096 ranks they would be 16 million records.
        own = replace(communicator(rank, 1), nranks=world, rings=(ChannelRing(0, previous, following),), peers=())
        series.append(Rank(rank, world, (own,), tuple(operations)).looks(2))
    return series


def main() -> int:
    print("one diagnosis of a hung ring (simulated records)")
    print(f"{'ranks':>8} {'ms':>10} {'us a rank':>10}  named")
    for world in (16, 64, 512, 4096):
        samples = hung_ring(world)
        begin = time.perf_counter()
        verdict = diagnose(samples)
        spent = time.perf_counter() - begin
        named = [culprit.rank for culprit in verdict.culprits]
        print(f"{world:>8} {spent * 1e3:>10.1f} {spent / world * 1e6:>10.1f}  {verdict.verdict_class} {named}")
    events = np.zeros(1_000_000, EVENT_DTYPE)
    chance = np.random.default_rng(1)
    events["kind"], events["flags"], events["function"] = Kind.ENTER, Flag.COMM_READ, Function.ALL_REDUCE
    events["pid"], events["comm"] = chance.integers(0, 4096, len(events)), chance.integers(0, 4, len(events)) * 4096
    events["time_ns"] = np.arange(len(events))
    ledger = Ledger()
    ledger.add_calls(events[:100_000])
    begin = time.perf_counter()
    for start in range(0, len(events), 50_000):
        ledger.add_calls(events[start : start + 50_000])
    rate = len(events) / (time.perf_counter() - begin)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"ledger: {rate / 1e6:.2f} M call records a second, {len(ledger.rows)} rows; peak memory of this process {peak:.0f} MiB"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
