"""Which release of NCCL a test runs with."""

from __future__ import annotations

from collections import Counter

from releases import other_releases

RELEASES = ("2.21.5", "2.27.5", "2.32.3")


def nodes(*tests: str) -> list[str]:
    return [f"{test}[{release}-socket]" for test in tests for release in RELEASES]


def test_of_every_test_one_release_is_left_and_all_have_their_turn() -> None:
    tests = [f"tests/testbed/test_a.py::test_{number}" for number in range(60)]
    left = set(nodes(*tests)) - other_releases(nodes(*tests))
    assert sorted(node.partition("[")[0] for node in left) == sorted(tests)
    assert min(Counter(node.partition("[")[2] for node in left).values()) > 10
    assert left == set(nodes(*tests)) - other_releases(nodes(*reversed(tests))), "the same every time"


def test_other_parameters_and_what_was_asked_for_alone_stay() -> None:
    assert not other_releases(["a.py::test[2.21.5]", "a.py::other[2.27.5]", "a.py::test", "a.py::test[8-x]", "a.py::test[9-x]"])
    assert len(other_releases(["a.py::test[2.21.5-shm]", "a.py::test[2.27.5-shm]", "a.py::test[2.21.5-net]"])) == 1
