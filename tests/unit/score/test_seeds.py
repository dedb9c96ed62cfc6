"""Seeds of drawn jobs are accounted for, and the generator's hash is that of what it draws."""

from __future__ import annotations

from dataclasses import replace

import pytest

from score import drawn, nccl_choice, network, seeds
from score.seeds import Kind, Seed, State, generator_hash, problems

ONE = Seed(1, Kind.SLOW, State.SPENT, "a test", judgements=10, right=7)


def test_the_list_is_whole() -> None:
    found = {one.seed: one for one in seeds.seeds()}
    assert {801, 802, 803, 804, 805, 806, 901, 902, 903, 904, 1001} <= found.keys()
    assert all(found[number].state is State.SPENT for number in (801, 806, 901, 904, 1001))
    assert (found[802].right, found[802].judgements) == (93, 101)
    for one in found.values():
        assert one.state is not State.FRESH or one.generator == generator_hash(one.kind), (
            "the generator has changed: python -m score.seeds --hash, and the fresh seeds wait for that"
        )


def test_a_list_that_contradicts_itself_is_refused() -> None:
    assert not list(problems([ONE]))
    assert list(problems([ONE, ONE])) == ["seed 1 is there twice"]
    assert list(problems([replace(ONE, state=State.FRESH)])) == ["seed 1 is fresh and was judged"]
    assert list(problems([replace(ONE, right=11)])) == ["seed 1: more were right than were judged"]


def test_the_hash_changes_with_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    before = generator_hash()
    assert before == generator_hash() and len(before) == 16
    monkeypatch.setattr(drawn, "BEFORE", drawn.BEFORE + 1)
    assert generator_hash() != before
    network_before = generator_hash(Kind.NETWORK)
    monkeypatch.setattr(network, "LAYOUTS", network.LAYOUTS[:1])
    assert generator_hash(Kind.NETWORK) not in {network_before, before}
    choice_before = generator_hash(Kind.CHOICE)
    monkeypatch.setattr(nccl_choice, "DRAWN_SIZES", nccl_choice.DRAWN_SIZES[:4])
    assert generator_hash(Kind.CHOICE) not in {choice_before, network_before, before}


def test_a_fresh_seed_is_given_only_to_its_generator(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fresh = replace(ONE, state=State.FRESH, judgements=0, right=0, generator=generator_hash())
    monkeypatch.setattr(seeds, "seeds", lambda: [fresh])
    assert seeds.main(["--fresh", "slow"]) == 0 and capsys.readouterr().out == "1\n"
    assert seeds.main(["--fresh", "healthy"]) == 1
    monkeypatch.setattr(drawn, "BEFORE", drawn.BEFORE + 1)
    assert seeds.main(["--fresh", "slow"]) == 1


def test_the_list_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert seeds.main([]) == 0
    assert "93 of 101 right" in capsys.readouterr().out
