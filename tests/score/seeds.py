"""The seeds of drawn jobs: what each is for, whether it is spent, and by which generator it was drawn.

A judgement of jobs that nobody has seen is one only if nothing was changed after looking. So before each, ``python -m
score.seeds --hash`` prints a hash of the generator (its code, and what it draws; of a network's faults what it draws), which is
committed to ``seeds.toml`` with the seed; afterwards the first-judged figures are written beside it and the seed is spent.
``python -m score.seeds`` lists them; ``--fresh`` is the next one of a kind.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from ncclwatch.simulate.scenario import load
from score import ambiguous, drawn, nccl_choice, network

FILE = Path(__file__).resolve().parent / "seeds.toml"
SCENARIOS = Path(__file__).resolve().parent.parent / "scenarios"
SAMPLE = range(40)
"""Numbers of the jobs that are drawn from seed 1 for the hash: a change of what the simulator's types mean shows in them, though
not a line of the generator is another.
"""


class Kind(StrEnum):
    """What is drawn from a seed."""

    MIXED = "mixed"
    SLOW = "slow"
    HEALTHY = "healthy"
    NETWORK = "network"
    """Faults of the network (:mod:`score.network`)."""
    CHOICE = "choice"
    """Quick scenarios with NCCL's own choices (:mod:`score.nccl_choice`)."""
    AMBIGUOUS = "ambiguous"
    """Jobs in which the cause is not plain (:mod:`score.ambiguous`)."""


class State(StrEnum):
    """Whether a seed can still be judged as one that nobody has seen."""

    FRESH = "fresh"
    SPENT = "spent"


@dataclass(frozen=True, slots=True)
class Seed:
    """One seed. ``generator`` is the hash under which it was or will be played; empty for those from before there was one."""

    seed: int
    kind: Kind
    state: State
    purpose: str
    generator: str = ""
    jobs: int = 0
    """Of the drawn numbers those that were played."""
    judgements: int = 0
    right: int = 0
    """Right when first judged."""
    visible: int = -1
    """Slow jobs whose fault shows; -1 where that was not told."""
    visible_right: int = -1
    innocents: int = -1
    """Jobs in which an innocent rank was named."""
    releases: tuple[str, ...] = ()
    note: str = ""


def generator_hash(kind: Kind = Kind.MIXED) -> str:
    """A short hash of the generator of a kind: of the jobs that it draws from a fixed seed, and of its file where it has one."""
    if kind is Kind.NETWORK:
        played = [network.draw(fault, 1, number) for fault in network.FAULTS for number in SAMPLE]
        return hashlib.sha256(repr(played).encode()).hexdigest()[:16]
    if kind is Kind.AMBIGUOUS:
        doubtful = [ambiguous.draw(1, number) for number in SAMPLE]
        return hashlib.sha256(repr(doubtful).encode()).hexdigest()[:16]
    if kind is Kind.CHOICE:
        quick = [load(SCENARIOS / f"{name}.toml") for name in nccl_choice.PLAYED]
        cells = [cell for seed in SAMPLE for cell in nccl_choice.draw(quick, nccl_choice.RELEASES, seed)]
        return hashlib.sha256(repr(cells).encode()).hexdigest()[:16]
    digest = hashlib.sha256(Path(drawn.__file__).read_bytes())
    for number in SAMPLE:
        for job in (drawn.draw(1, number), drawn.draw(1, number, slow=True), drawn.draw_healthy(1, number, 60.0)):
            digest.update(repr(job).encode())
    return digest.hexdigest()[:16]


def seeds(path: Path = FILE) -> list[Seed]:
    """All of them, in the order of the file. Raises ValueError for a file that contradicts itself."""
    entries = tomllib.loads(path.read_text("utf-8"))["seed"]
    found = [
        Seed(
            **(
                entry
                | {"kind": Kind(entry["kind"]), "state": State(entry["state"]), "releases": tuple(entry.get("releases", ()))}
            )
        )
        for entry in entries
    ]
    for problem in problems(found):
        raise ValueError(f"{path.name}: {problem}")
    return found


def problems(found: Sequence[Seed]) -> Iterator[str]:
    """What contradicts itself."""
    numbers = [one.seed for one in found]
    for number in sorted({n for n in numbers if numbers.count(n) > 1}):
        yield f"seed {number} is there twice"
    for one in found:
        if one.state is State.FRESH and one.judgements:
            yield f"seed {one.seed} is fresh and was judged"
        if not 0 <= one.right <= max(one.judgements, 0) or one.visible_right > one.visible:
            yield f"seed {one.seed}: more were right than were judged"


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0; 1 when no fresh seed of the kind is left, or the fresh ones wait for another generator."""
    parser = argparse.ArgumentParser(prog="score.seeds", description="List the seeds of drawn jobs.")
    parser.add_argument("--hash", action="store_true", help="print the hash of the generator as it is")
    parser.add_argument("--fresh", choices=[str(kind) for kind in Kind], help="print the next fresh seed of a kind")
    options = parser.parse_args(arguments)
    if options.hash:
        print(generator_hash())
        print(generator_hash(Kind.NETWORK), "(faults of the network)")
        print(generator_hash(Kind.CHOICE), "(NCCL's own choices)")
        print(generator_hash(Kind.AMBIGUOUS), "(jobs in which the cause is not plain)")
        return 0
    if options.fresh:
        return _next(Kind(options.fresh))
    for one in seeds():
        judged = f"{one.right} of {one.judgements} right" if one.judgements else ""
        shown = f", {one.visible_right} of {one.visible} that show" if one.visible >= 0 else ""
        print(f"{one.seed:6} {one.kind:8} {one.state:6} {one.generator or '-':16} {one.purpose}: {judged}{shown}".rstrip(": "))
    return 0


def _next(kind: Kind) -> int:
    left = [one for one in seeds() if one.kind is kind and one.state is State.FRESH]
    if not left:
        print(f"no fresh seed of {kind} jobs: add one", file=sys.stderr)
        return 1
    if left[0].generator != generator_hash(kind):
        print(f"seed {left[0].seed} waits for generator {left[0].generator}, this is {generator_hash(kind)}", file=sys.stderr)
        return 1
    print(left[0].seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
