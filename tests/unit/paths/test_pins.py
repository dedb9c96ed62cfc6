from __future__ import annotations

import pytest

from ncclwatch.errors import UsageError
from ncclwatch.paths.pins import Connect, Listen, Roce, plan_text


def test_the_text_is_what_the_library_reads() -> None:
    text = plan_text([Listen(1, "10.0.0.2", (40000, 40001))], [Connect(0, "10.0.0.2", 40000, 50000)])
    assert text == "ncclwatch-path-pins 1\nlisten 1 10.0.0.2 40000 40001\nconnect 0 10.0.0.2 40000 50000\n"


@pytest.mark.parametrize("pin", [Connect(0, "x\nlisten", 1, 1), Connect(0, "10.0.0.1", 0, 1), Connect(0, "::1", 1, 65536)])
def test_nonsense_is_refused(pin: Connect) -> None:
    with pytest.raises(UsageError):
        plan_text([], [pin])


def test_a_plan_that_would_be_cut_is_refused() -> None:
    with pytest.raises(UsageError, match="too long"):
        plan_text([], [Connect(0, "10.0.0.1", 1, 1)] * 4000)


def test_ports_of_roce_are_taken_in_turns() -> None:
    text = plan_text([], [], [Roce(1, "10.0.0.2", (50000, 50007))])
    assert text == "ncclwatch-path-pins 1\nroce 1 10.0.0.2 50000 50007\n"
    with pytest.raises(UsageError, match="none of RoCE"):
        plan_text([], [], [Roce(1, "10.0.0.2", (40000,))])
