"""A pulse on a live process of our own: words that move, words that cannot be read, and more words than are read."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest
from numpy.typing import NDArray

from ncclwatch.errors import TargetGoneError
from ncclwatch.target.memory import LiveReader, MemoryReader
from ncclwatch.target.pulse import FEW, MOST, SURE, Pulse


@pytest.fixture
def reader() -> Iterator[LiveReader]:
    found = LiveReader(os.getpid())
    yield found
    found.close()


def places(words: ctypes.Array[ctypes.c_uint64]) -> list[int]:
    return [ctypes.addressof(words) + 8 * at for at in range(len(words))]


def test_any_word_that_changes_is_a_beat_and_only_once(reader: LiveReader) -> None:
    words = (ctypes.c_uint64 * 5)(*range(5))
    pulse = Pulse(reader)
    pulse.follow(places(words))
    assert not pulse.moved()
    words[3] += 1
    assert pulse.moved()
    assert not pulse.moved()


def test_words_count_from_when_they_are_followed(reader: LiveReader) -> None:
    words = (ctypes.c_uint64 * 2)(7, 8)
    pulse = Pulse(reader)
    pulse.follow(places(words))
    words[0] = 9
    pulse.follow(places(words))
    assert not pulse.moved()


def test_what_cannot_be_read_does_not_move(reader: LiveReader) -> None:
    words = (ctypes.c_uint64 * 1)(1)
    pulse = Pulse(reader)
    pulse.follow([0x10000, *places(words), 0x7FFF_FFFF_0000])
    assert not pulse.moved()
    words[0] = 2
    assert pulse.moved()
    pulse.follow([])
    assert not pulse.moved()


def test_of_too_many_words_some_are_read(reader: LiveReader) -> None:
    words = (ctypes.c_uint64 * (10 * MOST))()
    pulse, calls = Pulse(reader), reader.counters.bytes
    pulse.follow(places(words))
    assert reader.counters.bytes - calls <= 8 * MOST
    for at in range(len(words)):
        words[at] = 1
    assert pulse.moved()


class Counting:
    """A reader that counts the words it is asked for."""

    def __init__(self, reader: LiveReader) -> None:
        self.words, self._reader = 0, reader

    def probe(self, addresses: NDArray[np.uint64]) -> NDArray[np.uint64]:
        self.words += len(addresses)
        return self._reader.probe(addresses)


def sure_of(pulse: Pulse, words: ctypes.Array[ctypes.c_uint64], lively: range) -> None:
    """Let these words move until they speak for all."""
    pulse.follow(places(words))
    for _ in range(SURE):
        for at in lively:
            words[at] += 1
        assert pulse.moved()


def test_words_that_always_move_speak_for_all_and_their_standing_is_noticed_at_once(reader: LiveReader) -> None:
    words, counting = (ctypes.c_uint64 * 200)(), Counting(reader)
    pulse = Pulse(cast(MemoryReader, counting))
    sure_of(pulse, words, range(50, 150))
    counting.words = 0
    for _ in range(5):
        for at in range(50, 150):
            words[at] += 1
        assert pulse.moved()
    assert counting.words <= 5 * FEW
    words[0] += 1
    assert not pulse.moved(), "what never moved before says nothing of the others"
    assert not pulse.moved()
    words[0] += 1
    assert pulse.moved(), "of a process that stood every word counts"


def test_words_that_move_by_turns_are_all_read(reader: LiveReader) -> None:
    words, counting = (ctypes.c_uint64 * 40)(), Counting(reader)
    pulse = Pulse(cast(MemoryReader, counting))
    pulse.follow(places(words))
    for turn in range(4 * SURE):
        counting.words = 0
        words[turn % 40] += 1
        assert pulse.moved()
        assert counting.words == 40


def test_a_look_that_finds_other_words_keeps_those_that_spoke_for_all_as_far_as_they_are_there(reader: LiveReader) -> None:
    words, counting = (ctypes.c_uint64 * 64)(), Counting(reader)
    pulse = Pulse(cast(MemoryReader, counting))
    sure_of(pulse, words, range(0, 8))
    pulse.follow(places(words)[4:])
    assert not pulse.moved()
    sure_of(pulse, words, range(0, 8))
    pulse.follow(places(words)[4:])
    counting.words = 0
    words[5] += 1
    assert pulse.moved() and counting.words == 4
    pulse.follow(places(words)[8:])
    words[20] += 1
    assert pulse.moved(), "none of them is left: all are read"


def test_a_process_that_is_gone_is_said_to_be() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    other = LiveReader(child.pid)
    pulse = Pulse(other)
    pulse.follow([other.mappings()[0].start])
    child.kill()
    child.wait()
    with pytest.raises(TargetGoneError):
        pulse.moved()
    other.close()
