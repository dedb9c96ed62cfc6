"""The wire plane where it cannot run: it says why, loads nothing, and everything else goes on."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from ncclwatch.errors import NcclwatchError, PrivilegeError
from ncclwatch.probes.support import UnsupportedError
from ncclwatch.wire import session as module
from ncclwatch.wire.contexts import VerbsFile
from ncclwatch.wire.governor import Mode
from ncclwatch.wire.plane import WatchedProcess
from ncclwatch.wire.session import VerbsUser, WireSession, check_numbering, why_no_verbs

FILE = VerbsFile(3, "uverbs0", "mlx5_0")


def user(*networks: str, files: tuple[VerbsFile, ...] = ()) -> VerbsUser:
    return VerbsUser(1, None, 0, networks, files=files)


@pytest.mark.parametrize(
    ("networks", "expected"),
    [
        (("Socket",), "TCP sockets"),
        (("AWS Libfabric",), "the plugin 'AWS Libfabric', which has no verbs device open"),
        (("AWS Libfabric", "Socket"), "the plugin 'AWS Libfabric'"),
        (("IB",), "has not loaded libibverbs"),
        ((), "has not loaded libibverbs"),
    ],
)
def test_a_process_without_rdma_says_which_network_it_uses(networks: tuple[str, ...], expected: str) -> None:
    assert expected in why_no_verbs(user(*networks), ())
    assert why_no_verbs(user(*networks), (FILE,)) == ""


def test_nothing_is_loaded_where_nobody_uses_rdma(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WireKernel", None)
    session = WireSession()
    session.start([user("Socket")])
    assert not session.running
    assert session.reason == "no process uses RDMA"
    assert session.step() is False
    assert (session.flows({}, {}), session.report(), session.trial(), session.first_burst_s()) == ([], "", "", 0.0)
    session.close()


@pytest.mark.parametrize(
    "error",
    [
        PrivilegeError("tracing needs privileges", "run as root"),
        UnsupportedError("this kernel has no uprobes"),
        NcclwatchError("BCC cannot be imported", "install it"),
        ImportError("No module named 'bcc'"),
        OSError("no"),
    ],
)
def test_a_machine_that_cannot_probe_gives_a_reason(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def refuse() -> None:
        raise error

    monkeypatch.setattr(module, "check_support", refuse)
    session = WireSession()
    session.start([user("IB", files=(FILE,))])
    assert not session.running
    assert str(error) in session.reason
    assert session.flows({}, {}) == []


def test_what_was_taken_in_quickly_is_searched_later_one_process_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[tuple[int, bool]] = []

    class Plane:
        processes: ClassVar[dict[int, WatchedProcess]] = {}

        def watch(self, pid: int, *_: object, quick: bool, binaries: object) -> WatchedProcess:
            watched.append((pid, quick))
            return WatchedProcess(pid)

    session = WireSession()
    monkeypatch.setattr(session, "plane", Plane())
    monkeypatch.setattr(session, "bursts", object())
    session.start([VerbsUser(pid, None, 0, ("IB",), files=(FILE,)) for pid in (1, 2, 3)], quick=True)
    assert watched == [(1, True), (2, True), (3, True)]
    session._to_search.pop(2)
    for _ in range(4):
        session.search()
    assert watched[3:] == [(1, False), (3, False)]


def test_switched_off_is_switched_off() -> None:
    session = WireSession(Mode.STATE)
    session.start([user("IB", files=(FILE,))])
    assert (session.running, session.reason) == (False, "switched off")


def test_a_pid_namespace_of_our_own_is_refused(tmp_path: Path) -> None:
    """The bill goes by the kernel's numbers of threads: where those are not ours, nothing may be attached."""
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/status").write_text("Name:\tx\nNSpid:\t7\n")
    (tmp_path / "self/ns/pid").write_text("")
    with pytest.raises(PrivilegeError, match="pid namespace of its own"):
        check_numbering(tmp_path)
