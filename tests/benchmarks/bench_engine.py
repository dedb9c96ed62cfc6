"""What the engine takes by the number of ranks, in one table: locating a hang, call records into the ledger, and memory.

    python tests/benchmarks/bench_engine.py [--ranks 16 512 4096 100000]

Made-up records: two looks at a ring AllReduce over two channels in which rank 1 has not entered, each decoded from batches of its
own, as an engine gets them, so that nothing is shared between the looks but the process; and a million call records of four
communicators a rank. Each line is measured in processes of its own: CPU time of the engine's one thread, not of the reading nor
of the decoding; median and spread of some runs. Memory is the peak of the process, the records it is given included. Beside it
what CCL-D quotes for location (section 6): 108 ms at 16 ranks, less than a minute at 4,000.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ncclwatch.collect.batch import NodeBatch
from ncclwatch.collect.ledger import Ledger
from ncclwatch.engine.diagnose import diagnose
from ncclwatch.messaging.reader import BatchReader
from ncclwatch.messaging.writer import BatchWriter
from ncclwatch.model.events import EVENT_DTYPE, Flag, Function, Kind
from ncclwatch.model.state import ChannelRing, Communicator, ProcessSample, ProxyOperation
from unit.synthetic import Rank, communicator, recv, send

QUOTED = {16: "108 ms", 4096: "< 1 min (4,000)"}
RECORDS, BATCH = 1_000_000, 50_000
RANKS_A_BATCH = 512
COMMUNICATORS = 4
LATE = 1
"""The rank that has not entered."""


def hung_ring(world: int) -> list[list[ProcessSample]]:
    """Two looks at a ring in which one rank has not entered."""
    series: list[list[ProcessSample]] = []
    for start in range(0, world, RANKS_A_BATCH):
        some = range(start, min(world, start + RANKS_A_BATCH))
        first, second = (_decoded([Rank(rank, world, *_seen(rank, world)).looks(2)[look] for rank in some]) for look in (0, 1))
        series += [[one, replace(other, process=one.process)] for one, other in zip(first, second, strict=True)]
    return series


def _decoded(samples: list[ProcessSample]) -> tuple[ProcessSample, ...]:
    batch = NodeBatch(
        host="node", boot_id="boot", sequence=0, time_ns=samples[0].time_ns, wall_ns=samples[0].wall_ns, looked=True, planes=(),
        samples=tuple(samples),
    )  # fmt: skip
    return BatchReader().decode(BatchWriter().encode(batch)).batch.samples


def _seen(rank: int, world: int) -> tuple[tuple[Communicator], tuple[ProxyOperation, ...]]:
    following, previous = (rank + 1) % world, (rank - 1) % world
    operations = []
    for channel in (0, 1) if rank != LATE else ():
        done = 0 if following == LATE else 4
        got = 0 if previous == LATE else 4
        sent = 8 if following == LATE else 4
        operations += [
            send(following, sent=sent, done=done, produced=sent, channel=channel),
            recv(previous, posted=got + 8, received=got, delivered=got, consumed=got, channel=channel),
        ]
    # Peers are left out: all ranks have them alike, and at 4,096 ranks they would be 16 million records.
    own = replace(communicator(rank, 1), nranks=world, rings=(ChannelRing(0, previous, following),), peers=())
    return (own,), tuple(operations)


def measure_location(world: int) -> tuple[list[float], float, str]:
    """CPU seconds of some diagnoses, peak memory of the process in MiB, and what was found."""
    samples = hung_ring(world)
    verdict, spent = diagnose(samples), []
    for _ in range(21 if world < 10_000 else 3):
        begin = time.process_time()
        verdict = diagnose(samples)
        spent.append(time.process_time() - begin)
    return spent, _peak_mib(), f"{verdict.verdict_class} {[culprit.rank for culprit in verdict.culprits]}"


def measure_ledger(world: int) -> tuple[float, float]:
    """Call records taken a second, and peak memory of the process in MiB; every rank has called before."""
    chance = np.random.default_rng(1)
    ledger = Ledger()
    everybody = _calls(np.repeat(np.arange(world), COMMUNICATORS), np.tile(np.arange(COMMUNICATORS), world))
    for start in range(0, len(everybody), BATCH):
        ledger.add_calls(everybody[start : start + BATCH])
    events = _calls(chance.integers(0, world, RECORDS), chance.integers(0, COMMUNICATORS, RECORDS))
    begin = time.process_time()
    for start in range(0, RECORDS, BATCH):
        ledger.add_calls(events[start : start + BATCH])
    rate = RECORDS / (time.process_time() - begin)
    if len(ledger.rows) != world * COMMUNICATORS:
        raise RuntimeError(f"{len(ledger.rows)} rows for {world} ranks")
    return rate, _peak_mib()


def _calls(ranks: np.ndarray, communicators: np.ndarray) -> np.ndarray:
    events = np.zeros(len(ranks), EVENT_DTYPE)
    events["kind"], events["flags"], events["function"] = Kind.ENTER, Flag.COMM_READ, Function.ALL_REDUCE
    events["pid"], events["comm"], events["time_ns"] = ranks, communicators * 4096, np.arange(len(events))
    return events


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description="What the engine takes by the number of ranks.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 512, 4096, 100_000])
    columns = ("ranks", "location", "spread", "a rank", "memory", "ledger", "memory", "CCL-D: location")
    print("".join(f"{name:>16}" for name in columns))
    for world in parser.parse_args().ranks:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as alone:
            spent, location_mib, found = alone.submit(measure_location, world).result()
            rate, ledger_mib = alone.submit(measure_ledger, world).result()
        middle = statistics.median(spent)
        cells = (
            f"{world:,}", f"{middle * 1e3:.1f} ms", f"{min(spent) * 1e3:.0f} to {max(spent) * 1e3:.0f}",
            f"{middle / world * 1e6:.0f} us", f"{location_mib:,.0f} MiB", f"{rate / 1e6:.2f} M/s", f"{ledger_mib:,.0f} MiB",
            QUOTED.get(world, "-"),
        )  # fmt: skip
        print("".join(f"{cell:>16}" for cell in cells), f"  {found}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
