"""Tests marked ``vm`` run inside a boot of the guest; here, on the host, each is reported as if it had run in place.

On the host, the first such test boots the guest, which runs pytest on all selected ones and appends every report to a file in
the share; each item then only waits for its own reports (``layer.py``). Inside the guest (NCCLWATCH_GUEST is set) tests run as
usual. Where the guest cannot run, its tests are skipped with the reason, or fail if NCCLWATCH_REQUIRE_VM is set (as in CI).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.probes.program import Compilation
from ncclwatch.wire.kernel import SOURCE as WIRE_PROGRAM
from ncclwatch.wire.kernel import WireKernel
from vm.errors import GuestError, GuestUnavailableError
from vm.fabric import Fabric
from vm.guest import GUEST_VARIABLE
from vm.initramfs import SHARE
from vm.layer import REPORTS, Layer, PytestGuest, layer_timeout_s

_layer: Layer | None = None
_config: pytest.Config | None = None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """On the host, waiting for the guest counts against a test's time: allow as much as the guest is allowed."""
    if not _inside():
        for item in items:
            if item.get_closest_marker("vm") is not None:
                item.add_marker(pytest.mark.timeout(layer_timeout_s() + 60))


def _inside() -> bool:
    return GUEST_VARIABLE in os.environ


def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """On the host, take a ``vm`` test's reports from the guest instead of running it."""
    if _inside() or item.get_closest_marker("vm") is None:
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in _reports_of(item):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _reports_of(item: pytest.Item) -> list[pytest.TestReport]:
    global _layer  # noqa: PLW0603 - one boot for a whole run of pytest
    try:
        if _layer is None:
            config = item.config
            nodes = [other.nodeid for other in item.session.items if other.get_closest_marker("vm") is not None]
            _layer = Layer(config, nodes, lambda left: PytestGuest(config, left))
        return _layer.wait_for(item.nodeid)
    except GuestUnavailableError as error:
        required = bool(os.environ.get("NCCLWATCH_REQUIRE_VM"))
        return [_own_report(item, "failed" if required else "skipped", str(error))]
    except GuestError as error:
        return [_own_report(item, "failed", str(error))]


def _own_report(item: pytest.Item, outcome: Any, text: str) -> pytest.TestReport:
    longrepr: Any = (str(item.path), item.location[1] or 0, f"Skipped: {text}") if outcome == "skipped" else text
    return pytest.TestReport(item.nodeid, item.location, dict.fromkeys(item.keywords, 1), outcome, longrepr, "setup")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Inside the guest, hand each report to the host."""
    if not _inside() or _config is None:
        return
    data = _config.hook.pytest_report_to_serializable(config=_config, report=report)
    with Path(SHARE, REPORTS).open("a") as file:
        file.write(json.dumps(data) + "\n")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Remember the configuration that serialises reports."""
    global _config  # noqa: PLW0603 - the hook above gets none
    _config = session.config


def pytest_sessionfinish() -> None:
    """End the guest with the run."""
    if _layer is not None:
        _layer.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how often the guest had to be booted again, and why: nothing that went wrong is passed over."""
    for note in _layer.notes if _layer is not None else ():
        terminalreporter.write_line(f"BOOTED AGAIN {note}")


@pytest.fixture(scope="session")
def soft_roce() -> Iterator[Fabric]:
    """Two RDMA devices on the two ends of a virtual cable, in the guest."""
    fabric = Fabric.create()
    yield fabric
    fabric.close()


@pytest.fixture(scope="session")
def verbs_kernel() -> Iterator[WireKernel]:
    """The wire plane's programs, which the host has compiled (``layer.py``)."""
    with WireKernel(Compilation(WIRE_PROGRAM).result()) as wire:
        yield wire
