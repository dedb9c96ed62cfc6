"""What an agent keeps of its privileges; tried in children, for what is given up does not come back."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ncclwatch.cli.findings import Level
from ncclwatch.cli.host_checks import agent_privileges
from ncclwatch.messaging.privileges import CAPABILITIES, KEPT

CHILD = """
import os, threading
from pathlib import Path
from ncclwatch.messaging import privileges
privileges.uprobes_without_admin = lambda: {without}
line = privileges.drop_privileges({user!r})
def masks():
    lines = Path("/proc/thread-self/status").read_text().splitlines()
    return dict(line.split(":\\t") for line in lines if line.startswith(("Cap", "NoNewPrivs")))
found = []
thread = threading.Thread(target=lambda: found.append(masks()))
thread.start()
thread.join()
own = masks()
assert own == found[0], (own, found)
print(int(own["CapEff"], 16), int(own["CapPrm"], 16), int(own["CapBnd"], 16), own["NoNewPrivs"], os.getuid(), line, sep="|")
"""
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def child(*, without: bool = True, user: str | None = None) -> list[str]:
    program = CHILD.format(without=without, user=user)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().split("|")


def mask(*names: str) -> int:
    return sum(1 << CAPABILITIES[name] for name in names)


@AS_ROOT
@pytest.mark.parametrize("without", [True, False])
def test_only_the_documented_capabilities_are_left_in_every_set_and_thread(without: bool) -> None:
    wanted = mask(*KEPT, *([] if without else ["CAP_SYS_ADMIN"]))
    effective, permitted, bounding, no_new, _, line = child(without=without)
    assert int(effective) == int(permitted)
    assert int(effective) & ~wanted == 0
    assert int(bounding) & ~wanted == 0
    assert no_new == "1"
    assert ("SYS_ADMIN" in line) is (bool(int(effective) & mask("CAP_SYS_ADMIN")))


@AS_ROOT
def test_an_agent_can_become_another_user_and_keep_what_it_needs() -> None:
    effective, _, _, _, uid, line = child(user="nobody")
    assert int(uid) != 0
    assert int(effective) & mask("CAP_SYS_PTRACE")
    assert line.endswith("as user nobody")


@AS_ROOT
def test_every_thread_of_an_agent_has_given_them_up() -> None:
    command = [sys.executable, "-m", "ncclwatch", "agent", "--engine", "127.0.0.1:9", "--match", "no process is called so"]
    agent = subprocess.Popen([*command, "--no-probes"], stdout=subprocess.PIPE, text=True)
    assert agent.stdout is not None
    try:
        while "privileges kept" not in (line := agent.stdout.readline()):
            assert line, "it ended"
        (pid,) = [int(entry.name) for entry in Path("/proc").iterdir() if is_agent_of(entry, agent.pid)]
        tasks = Path(f"/proc/{pid}/task")
        # The main thread, ZeroMQ's two, and those that send, hear of links and hear of ends.
        while len(list(tasks.iterdir())) < 6:
            time.sleep(0.05)
        threads = [dict(line.split(":\t", 1) for line in (one / "status").read_text().splitlines()) for one in tasks.iterdir()]
    finally:
        agent.terminate()
        agent.wait(60)
    assert {one["NoNewPrivs"] for one in threads} == {"1"}
    assert len({one["CapEff"] for one in threads}) == 1


def is_agent_of(entry: Path, command: int) -> bool:
    """Whether a process of /proc is the agent that a command has become, or has started."""
    try:
        fields = (entry / "stat").read_text().rpartition(")")[2].split()
        return b"agent_process" in (entry / "cmdline").read_bytes() and command in (int(entry.name), int(fields[1]))
    except (OSError, ValueError):
        return False


def test_doctor_says_what_an_agent_would_keep() -> None:
    every = set(CAPABILITIES)
    assert "SYS_ADMIN" not in agent_privileges(every, lambda: True).detail
    assert "this kernel wants SYS_ADMIN" in agent_privileges(every, lambda: False).detail
    assert agent_privileges(set(), lambda: True).level is Level.GAP
