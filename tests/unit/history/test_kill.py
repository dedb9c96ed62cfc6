"""A writer that is killed at any moment leaves a history without a gap that is not told, and no row twice.

``HISTORY_KILLS=200`` kills as often; a few kills are enough to see that it still holds.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from ncclwatch.history import compact
from ncclwatch.history.query import History

CHILD = Path(__file__).parents[1] / "history_child.py"
KILLS = int(os.environ.get("HISTORY_KILLS", "6"))


def test_kills(tmp_path: Path) -> None:
    root, dice = tmp_path / "history", random.Random(os.environ.get("HISTORY_SEED", "1"))
    offered: dict[str, dict[int, int]] = {}
    for turn in range(KILLS):
        with subprocess.Popen([sys.executable, CHILD, root, str(turn)], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            life = child.stdout.readline().split()[1]
            said = offered[life] = {}
            # Sometimes at once, mostly when it has made and merged files.
            until = time.monotonic() + dice.choice((0.01, 0.2, 1.0, 1.0)) * dice.random()
            for line in child.stdout:
                _, number, time_ns = line.split()
                said[int(number)] = int(time_ns)
                if time.monotonic() > until:
                    break
            child.kill()
            for line in child.stdout:
                if len(words := line.split()) == 3 and line.endswith("\n"):
                    said[int(words[1])] = int(words[2])
        if turn % 7 == 3:
            # Whoever asks in between sees the same.
            check(root, offered)
    done = compact.look_after(root, wait=True)
    assert done is not None and not done.problem
    assert not list((root / "journal").iterdir())
    kept = check(root, offered, everything=True)
    print(f"\n{KILLS} kills: {sum(map(len, offered.values()))} rows handed over, {kept} kept, no row twice, every loss told")


def check(root: Path, offered: dict[str, dict[int, int]], *, everything: bool = False) -> int:
    """No row is there twice, no number is missing, and every row that was lost is within a gap that is told."""
    with History(str(root), tables=("rates", "gaps", "lives")) as history:
        rows = history.ask("SELECT life, rank, n FROM rates").rows
        gaps = defaultdict(list)
        for life, kind, since, until in history.ask("SELECT life, kind, epoch_ns(since), epoch_ns(until) FROM gaps").rows:
            gaps[life].append((kind, since, until))
        numbers = history.ask(
            "SELECT life, count(*), count(DISTINCT n), max(n) FROM (SELECT life, n FROM rates UNION ALL "
            "SELECT life, n FROM lives UNION ALL SELECT life, n FROM gaps) WHERE n > 0 GROUP BY life"
        ).rows
        assert not history.problems
    for life, count, different, highest in numbers:
        assert count == different == highest, f"{life}: {count} rows, {different} numbers up to {highest}"
    kept = defaultdict(list)
    for life, rank, _ in rows:
        kept[life].append(rank)
    for life, said in offered.items():
        assert len(kept[life]) == len(set(kept[life])), f"{life}: a row is there twice"
        if everything:
            assert [kind for kind, *_ in gaps[life]].count("killed") == 1
            for number in said.keys() - set(kept[life]):
                # Times in the history are cut to microseconds.
                told = any(since - 1000 <= said[number] <= until + 1000 for _, since, until in gaps[life])
                assert told, f"{life}: row {number} of {len(said)} is lost, and no gap tells it"
    return len(rows)
