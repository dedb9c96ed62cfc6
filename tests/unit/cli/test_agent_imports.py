"""What an agent process has loaded: it stays for days beside a job, so nothing comes in that it does not run."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest

from ncclwatch.cli import agent, agent_process

HEAVY = {
    "_hashlib", "asyncio", "bcc", "capstone", "drgn", "email", "http", "importlib.metadata", "multiprocessing",
    "ncclwatch.dashboard", "ncclwatch.engine", "ncclwatch.report", "ncclwatch.simulate", "ncclwatch.store", "ncclwatch.view",
    "networkx", "numpy.ma", "numpy.random", "perfetto", "pydantic", "pyroute2", "rich", "sqlite3", "ssl", "textual", "typer",
    "unittest", "zmq.asyncio",
}  # fmt: skip
"""Each took between 0.3 and 12 MiB of an agent."""

MODULES = 355
"""All modules that an agent which watches processes loads, Python's own among them; some 100 the interpreter has by itself."""

CODE = """
import sys
before = set(sys.modules)
import os, threading, time
sys.argv = ["agent"]
from ncclwatch.cli import agent_process
from ncclwatch.cli.agent_process import AgentOptions
chosen = AgentOptions("tcp://127.0.0.1:9", [], True, "no process is called so", None, None, 0.2, 15.0, True, "0.1", 5.0, None, 1,
                      60.0, None, 1.0)
agent_process.run(chosen)
import ncclwatch.collect.device, ncclwatch.probes.tracer, ncclwatch.target.session, ncclwatch.wire.process
print("loaded", *sorted(name for name, module in sys.modules.items() if module is not None and name not in before))
"""


def loaded() -> set[str]:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return set(next(line for line in done.stdout.splitlines() if line.startswith("loaded ")).split()[1:])


def test_an_agent_loads_only_what_it_runs() -> None:
    modules = loaded()
    assert not HEAVY & modules
    assert "ncclwatch.collect.node" in modules and "ncclwatch.messaging.link" in modules
    assert len(modules) <= MODULES, len(modules)


def test_a_command_does_not_wait_until_the_others_are_loaded() -> None:
    code = (
        "import sys; from ncclwatch.cli import main; main.run(['version']);"
        "print(*[name for name in sys.modules if name.startswith('ncclwatch.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    modules = set(done.stdout.splitlines()[-1].split())
    assert "ncclwatch.cli.version" in modules and not {"ncclwatch.cli.attach", "ncclwatch.cli.diagnose"} & modules


def test_it_does_without_docstrings_where_what_is_compiled_for_that_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    assert agent.without_docstrings() == ["-OO"]
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert agent.without_docstrings() == [], "it would be compiled at each start"
    kept = Path(cache_from_source(agent_process.__file__, optimization=2))
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert agent.without_docstrings() == ["-OO"]
