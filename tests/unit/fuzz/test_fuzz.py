"""Hostile input, a little of each kind, and everything that once did harm (``python -m fuzz`` does the rest)."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fuzz import mutate
from fuzz.harness import FINDINGS, LIMIT_BYTES, Guard, Target, inputs, kept
from fuzz.targets import every
from ncclwatch.errors import TargetError

SEED = 1


@pytest.fixture
def guard() -> Iterator[Guard]:
    with Guard() as found:
        yield found


@pytest.mark.parametrize("name", every())
def test_a_few_inputs_of_every_kind_do_no_harm(name: str, guard: Guard) -> None:
    target = every()[name]
    for data in inputs(target, target.quick, SEED):
        finding = guard.check(target, data)
        assert finding is None, finding.trace


@pytest.mark.parametrize("file", sorted(path for name in every() for path in kept(name)), ids=lambda path: path.name)
def test_what_did_harm_once_does_none_now(file: Path, guard: Guard) -> None:
    target = every()[file.name.rpartition("-")[0]]
    finding = guard.check(target, file.read_bytes())
    assert finding is None, finding.trace


def test_every_kept_finding_is_of_a_target() -> None:
    assert {path for path in FINDINGS.iterdir() if path.suffix == ".bin"} == {path for name in every() for path in kept(name)}


def test_a_hostile_input_is_the_same_for_the_same_seed() -> None:
    target = every()["kmsg"]
    assert list(inputs(target, 50, 7)) == list(inputs(target, 50, 7)) != list(inputs(target, 50, 8))


def loops(data: bytes) -> None:
    until = time.process_time() + 5
    while time.process_time() < until:
        pass


def allocates(data: bytes) -> None:
    bytearray(LIMIT_BYTES + (64 << 20))


def refuses(data: bytes) -> None:
    raise TargetError("no", "yes")


def breaks(data: bytes) -> None:
    raise KeyError("x")


@pytest.mark.parametrize(
    ("run", "kind"), [(loops, "TooSlowError"), (allocates, "MemoryError"), (breaks, "KeyError"), (refuses, None)]
)
def test_harm_is_noticed(run: object, kind: str | None, guard: Guard) -> None:
    """Time, memory and undocumented errors are findings, a documented error is none; the process is as it was afterwards."""
    target = Target("x", "", lambda: [b""], run)  # type: ignore[arg-type]
    finding = guard.check(target, b"abc")
    assert (finding.kind if finding is not None else None) == kind


def test_the_guard_leaves_nothing_behind() -> None:
    before = signal.getsignal(signal.SIGPROF)
    with Guard():
        assert signal.getitimer(signal.ITIMER_PROF) != (0.0, 0.0)
    assert signal.getsignal(signal.SIGPROF) == before
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    bytearray(LIMIT_BYTES + (64 << 20))


def test_parts_come_apart_as_they_were_put_together() -> None:
    source = random.Random(3)
    for _ in range(100):
        given = [source.randbytes(source.randrange(300)) for _ in range(source.randrange(8))]
        assert mutate.parts(mutate.pack(given)) == given
