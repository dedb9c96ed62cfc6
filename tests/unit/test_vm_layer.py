"""The guest's boots: a kernel that gives up costs another boot, not the tests after it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from vm.errors import GuestError
from vm.guest import Guest
from vm.layer import BOOTS, REPORTS, Layer

TESTS = ["tests/a.py::one", "tests/a.py::two", "tests/a.py::three"]


class FakeBoot:
    """A guest that has reported some tests whole, has begun one more perhaps, and is down."""

    def __init__(
        self, config: pytest.Config, share: Path, done: Sequence[str], begun: str = "", status: int | None = None
    ) -> None:
        self.share = share
        self.running = False
        self.status = status
        self.closed = False
        phases = [(node, when) for node in done for when in ("setup", "call", "teardown")]
        with (share / REPORTS).open("w") as file:
            for node, when in [*phases, *([(begun, "setup")] if begun else [])]:
                report = pytest.TestReport(node, (node, 1, node), {}, "passed", None, when)  # type: ignore[arg-type]
                file.write(json.dumps(config.hook.pytest_report_to_serializable(config=config, report=report)) + "\n")

    def tail(self) -> str:
        return "the console"

    def last_words(self) -> str:
        return "soft lockup"

    def close(self) -> None:
        self.closed = True


class Boots:
    """Plays one guest after the other: of the tests it is given, each boot does so many and, but for the last, begins another."""

    def __init__(self, config: pytest.Config, folder: Path, *does: int) -> None:
        self._config, self._folder, self._does = config, folder, does
        self.given: list[list[str]] = []

    def __call__(self, nodes: Sequence[str]) -> FakeBoot:
        share = self._folder / str(len(self.given))
        share.mkdir()
        done = self._does[len(self.given)]
        self.given.append(list(nodes))
        begun = nodes[done] if done < len(nodes) else ""
        return FakeBoot(self._config, share, nodes[:done], begun, None if begun else 0)


@pytest.fixture
def boots(pytestconfig: pytest.Config, tmp_path: Path) -> Callable[..., Boots]:
    return lambda *does: Boots(pytestconfig, tmp_path, *does)


def test_what_a_lost_boot_had_not_done_is_done_in_another(pytestconfig: pytest.Config, boots: Callable[..., Boots]) -> None:
    played = boots(1, 2)
    layer = Layer(pytestconfig, TESTS, played)
    assert [report.when for node in TESTS for report in layer.wait_for(node)] == ["setup", "call", "teardown"] * 3
    assert played.given == [TESTS, TESTS[1:]]
    assert layer.notes == ["the guest's kernel gave up during tests/a.py::two: soft lockup"]


def test_one_that_takes_the_kernel_down_twice_has_failed(pytestconfig: pytest.Config, boots: Callable[..., Boots]) -> None:
    played = boots(1, 0, 1)
    layer = Layer(pytestconfig, TESTS, played)
    assert len(layer.wait_for(TESTS[0])) == 3
    with pytest.raises(GuestError, match=r"during tests/a\.py::two: soft lockup, 2 times"):
        layer.wait_for(TESTS[1])
    assert len(layer.wait_for(TESTS[2])) == 3
    assert played.given == [TESTS, TESTS[1:], TESTS[2:]]


def test_boots_are_bounded(pytestconfig: pytest.Config, boots: Callable[..., Boots]) -> None:
    played = boots(0, 1, 0)
    layer = Layer(pytestconfig, TESTS, played)
    assert len(layer.wait_for(TESTS[0])) == 3
    for node in TESTS[1:]:
        with pytest.raises(GuestError, match=f"gave up in each of {BOOTS} boots"):
            layer.wait_for(node)
    assert len(played.given) == BOOTS


def test_a_guest_that_ended_by_itself_is_not_booted_again(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    """Pytest inside ended without running the test: no accident of the kernel's."""
    booted: list[Sequence[str]] = []

    def boot(nodes: Sequence[str]) -> FakeBoot:
        booted.append(nodes)
        return FakeBoot(pytestconfig, tmp_path, nodes[:1], status=2)

    layer = Layer(pytestconfig, TESTS, boot)
    assert len(layer.wait_for(TESTS[0])) == 3
    with pytest.raises(GuestError, match="ended without running this test"):
        layer.wait_for(TESTS[1])
    assert len(booted) == 1


def test_the_kernels_last_words_are_one_line() -> None:
    guest = Guest.__new__(Guest)
    guest.console = [
        "....[   52.843225] watchdog: BUG: soft lockup - CPU#1 stuck for 26s! [ib_write_bw:161]",
        "[   52.843230] RIP: 0010:rxe_completer+0x1f/0x20 [rdma_rxe]",
        "[   52.843240] Kernel panic - not syncing: softlockup: hung tasks",
        "[   52.843250] RIP: 0033:0x7f49d6b9c38f",
    ]
    said = "watchdog: BUG: soft lockup - CPU#1 stuck for 26s! [ib_write_bw:161]"
    assert guest.last_words() == f"{said}, at rxe_completer+0x1f/0x20 [rdma_rxe]"
    guest.console = ["nothing of the kind"]
    assert guest.last_words() == "nothing said"
