"""doctor's checks of the machine, on made-up machines: every gap says what to do."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclwatch.cli import host_checks, main
from ncclwatch.cli.findings import Finding, Level

ALL = "000001ffffffffff"
NONE = "0000000000000000"
Machine = Callable[..., Path]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A file system with the given files, beside those of a healthy machine."""

    def make(**files: str) -> Path:
        healthy = {
            "proc/self/status": f"Name:\tx\nCapEff:\t{ALL}\nNSpid:\t77\n",
            "proc/self/uid_map": "0 0 4294967295",
            "proc/1/comm": "systemd",
            "sys/bus/event_source/devices/uprobe/type": "8",
            "sys/kernel/tracing/uprobe_events": "",
            "sys/kernel/security/lockdown": "[none] integrity confidentiality",
        }
        for name, text in {**healthy, **{name.replace("__", "/"): text for name, text in files.items()}}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def levels(findings: list[Finding]) -> dict[str, Level]:
    for finding in findings:
        assert finding.level in (Level.OK, Level.INFO) or finding.hint, f"{finding.name} says nothing to do"
    return {finding.name: finding.level for finding in findings}


def test_a_healthy_machine(machine: Machine) -> None:
    found = levels(list(host_checks.host_findings(machine())))
    assert found["read memory"] is found["trace calls"] is found["yama"] is found["uprobes"] is found["tracefs"] is Level.OK
    assert found["RDMA"] is Level.INFO


def test_without_capabilities(machine: Machine) -> None:
    root = machine(proc__self__status=f"CapEff:\t{NONE}\n", proc__sys__kernel__perf_event_paranoid="2")
    found = levels(list(host_checks.host_findings(root)))
    assert found["read memory"] is found["trace calls"] is Level.MISSING
    assert found["perf events"] is Level.GAP


@pytest.mark.parametrize(
    ("scope", "capabilities", "level"),
    [("0", NONE, Level.OK), ("1", NONE, Level.MISSING), ("1", ALL, Level.OK), ("3", ALL, Level.MISSING)],
)
def test_yama(machine: Machine, scope: str, capabilities: str, level: Level) -> None:
    root = machine(proc__sys__kernel__yama__ptrace_scope=scope, proc__self__status=f"CapEff:\t{capabilities}\n")
    assert levels([host_checks.ptrace_scope(root)]) == {"yama": level}


@pytest.mark.parametrize(
    ("architecture", "release", "level"),
    [
        ("x86_64", "5.8.0-generic", Level.OK),
        ("x86_64", "5.7.19", Level.MISSING),
        ("x86_64", "6.18.44-x", Level.OK),
        ("x86_64", "strange", Level.MISSING),
        ("aarch64", "6.1.0", Level.OK),
        ("ppc64le", "6.1.0", Level.MISSING),
    ],
)
def test_kernels_and_machines(architecture: str, release: str, level: Level) -> None:
    assert levels([host_checks.machine(architecture, release)]) == {"kernel": level}


def test_lockdown_that_forbids_bpf_to_read(machine: Machine) -> None:
    root = machine(sys__kernel__security__lockdown="none integrity [confidentiality]")
    assert levels([host_checks.lockdown(root)]) == {"lockdown": Level.GAP}


def test_nested_namespaces_are_told(machine: Machine) -> None:
    root = machine(proc__self__status=f"CapEff:\t{ALL}\nNSpid:\t77\t1\n", proc__self__uid_map="0 1000 1")
    found = levels(list(host_checks.host_findings(root)))
    assert found["pid namespace"] is Level.INFO
    assert found["user namespace"] is Level.GAP


def test_rdma_ports(machine: Machine) -> None:
    root = machine(
        sys__class__infiniband__mlx5_0__ports__1__state="4: ACTIVE",
        sys__class__infiniband__mlx5_0__ports__1__rate="400 Gb/sec (4X NDR)",
    )
    good = host_checks.rdma(root)
    assert (good.level, good.detail) == (Level.OK, "mlx5_0/1 ACTIVE 400 Gb/sec (4X NDR)")
    bad = host_checks.rdma(machine(sys__class__infiniband__mlx5_1__ports__1__state="1: DOWN"))
    assert (bad.level, bad.hint) == (Level.GAP, "check mlx5_1/1")


def test_the_unrelated_bcc_of_pypi_is_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bcc", types.ModuleType("bcc"))
    finding = host_checks.bcc_module()
    assert finding.level is Level.MISSING
    assert "pip uninstall bcc" in finding.hint


def test_missing_bcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bcc", None)
    finding = host_checks.bcc_module()
    assert finding.level is Level.MISSING
    assert "python3-bpfcc" in finding.hint


@pytest.mark.parametrize(
    ("host", "process", "status"),
    [(Level.OK, Level.GAP, 0), (Level.GAP, Level.OK, 0), (Level.MISSING, Level.OK, 4), (Level.MISSING, Level.MISSING, 3)],
)
def test_the_exit_status_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, host: Level, process: Level, status: int
) -> None:
    monkeypatch.setattr(host_checks, "host_findings", lambda: [Finding("h", host, "x\x1b[31m", "mend it")])
    monkeypatch.setattr("ncclwatch.cli.process_checks.process_findings", lambda _pids: [Finding("p", process, "y", "mend it")])
    assert main.run(["doctor", "--json"]) == status
    report = json.loads(capsys.readouterr().out)
    assert (report["schema"], report["status"]) == ("ncclwatch.doctor/1", status)
    assert report["host"][0]["level"] == str(host)
    assert main.run(["doctor"]) == status
    text = capsys.readouterr().out
    assert "mend it" in text
    assert "\x1b" not in text


def test_py_spy_is_a_gap_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ncclwatch.target.python_stack.program", lambda: None)
    found = host_checks.py_spy()
    assert found.level is Level.GAP
    assert "pip install" in found.hint
    monkeypatch.setattr("ncclwatch.target.python_stack.program", lambda: "/x/py-spy")
    assert host_checks.py_spy().level is Level.OK
