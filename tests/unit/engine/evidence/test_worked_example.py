"""The example of docs/adding-a-source.md is a source that runs, with tests that pass."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from ncclwatch.collect.network_memory import NetworkMemory
from ncclwatch.engine import beside
from ncclwatch.engine import diagnose as diagnosis
from ncclwatch.engine.case import SOURCES, Known
from ncclwatch.engine.evidence.base import Source
from ncclwatch.engine.rules import Rule, Stratum
from ncclwatch.model.network import NetworkLook
from unit.synthetic import SECOND, frozen_ring, looks

GUIDE = Path(__file__).resolve().parents[4] / "docs" / "adding-a-source.md"


def program(path: str) -> str:
    """A program of the guide, by the path in its first line."""
    found: list[str] = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    return next(text for text in found if path in text.splitlines()[0])


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example's module, as if it were one of the package."""
    module = ModuleType("ncclwatch.engine.evidence.nvlink")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(program("evidence/nvlink.py"), "nvlink.py", "exec"), module.__dict__)  # noqa: S102 - the guide is ours
    return module


def the_tests(example: ModuleType) -> ModuleType:
    module = ModuleType("test_nvlink")
    exec(compile(program("test_nvlink.py"), "test_nvlink.py", "exec"), module.__dict__)  # noqa: S102 - the guide is ours
    return module


def test_the_examples_tests_pass(example: ModuleType) -> None:
    tests = the_tests(example)
    names = [name for name in vars(tests) if name.startswith("test_")]
    assert len(names) == 3
    for name in names:
        getattr(tests, name)()


def test_the_example_stands_beside_a_verdict(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    source: Source = example.Nvlink()
    assert type(source).__name__ not in {type(known).__name__ for known in SOURCES}
    (rule,) = re.findall(r"```python\n(def nvlink_errors.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    place = dict(vars(beside))
    exec(compile(rule, "beside.py", "exec"), place)  # noqa: S102 - the guide is ours
    row = Rule("nvlink", Stratum.BESIDE, place["nvlink_errors"], "Xid 74")
    strata = diagnosis._BY_STRATUM
    monkeypatch.setitem(strata, Stratum.BESIDE, (*strata[Stratum.BESIDE], row))
    ranks = frozen_ring(2)
    for rank in ranks:
        rank.communicators = tuple(replace(own, bus_id=0x3B000) for own in rank.communicators)
    memory = NetworkMemory()
    memory.feed("node2", NetworkLook(kernel=(replace(the_tests(example).LINE, host="node2"),)), SECOND)
    for sources, told in ((SOURCES, False), ((*SOURCES, source), True)):
        verdict = diagnosis.diagnose(looks(ranks), Known(network=memory, sources=sources))
        assert [culprit.rank for culprit in verdict.culprits] == [2]
        assert any("logged 1 NVLink errors" in line for line in verdict.evidence) is told, verdict.evidence
