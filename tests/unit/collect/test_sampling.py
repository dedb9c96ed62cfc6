"""Looking at a few ranks while all is well, and at everybody when one of them stands still."""

from __future__ import annotations

from dataclasses import replace

from ncclwatch.collect.sampling import CALM_LOOKS, Sampling, choose
from ncclwatch.model.state import ProcessSample
from unit.synthetic import WORLD, Rank, communicator


def job(world: int = 16, pairs: int = 2) -> list[ProcessSample]:
    """Ranks of a world communicator and of data-parallel groups of ``pairs`` ranks."""
    groups = world // pairs
    return [
        Rank(
            rank,
            world,
            (
                communicator(rank, world),
                communicator(rank // groups, pairs, comm_hash=WORLD + 1 + rank % groups),
            ),
        ).looks(1)[0]
        for rank in range(world)
    ]


def moved(sample: ProcessSample) -> ProcessSample:
    """The same process after one more launch."""
    first, *rest = sample.communicators
    return replace(sample, communicators=(replace(first, op_count=(first.op_count or 0) + 1), *rest))


def going_on(samples: list[ProcessSample]) -> list[ProcessSample]:
    return [moved(sample) for sample in samples]


def looks_until_calm(sampling: Sampling, samples: list[ProcessSample]) -> list[ProcessSample]:
    for _ in range(CALM_LOOKS + 2):
        samples = going_on(samples)
        sampling.looked(samples)
    return samples


def test_every_group_has_a_rank_among_the_chosen_as_far_as_the_limit_goes() -> None:
    samples = job(16)
    chosen = choose(samples, 10)
    held = {c.hash for s in samples if s.process.key in chosen for c in s.communicators}
    assert len(chosen) == 8 and held == {c.hash for s in samples for c in s.communicators}
    assert len(choose(samples, 3)) == 3
    assert choose([], 10) == frozenset()


def test_a_few_are_looked_at_while_they_move() -> None:
    samples, sampling = job(16), Sampling(10)
    assert all(sampling.wants(sample.process.key) for sample in samples)
    looks_until_calm(sampling, samples)
    assert sum(sampling.wants(sample.process.key) for sample in samples) == 8


def test_one_of_them_that_stands_still_makes_everybody_looked_at_until_all_have_moved_for_a_while() -> None:
    samples, sampling = job(16), Sampling(4)
    samples = looks_until_calm(sampling, samples)
    victim = next(iter(sampling.chosen))
    after = [s if s.process.key == victim else moved(s) for s in samples]
    sampling.looked(after)
    assert all(sampling.wants(sample.process.key) for sample in samples)
    after = going_on(after)
    sampling.looked(after)
    assert sampling.alarmed
    looks_until_calm(sampling, after)
    assert not sampling.alarmed


def test_a_sampled_process_that_ends_raises_the_alarm() -> None:
    samples, sampling = job(8), Sampling(4)
    samples = looks_until_calm(sampling, samples)
    sampling.looked([replace(s, run_state="X") if s.process.key in sampling.chosen else s for s in going_on(samples)])
    assert sampling.alarmed
