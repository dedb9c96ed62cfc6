"""The check of the code's shape, on a package of known shape: what it counts, what it leaves out, when it fails."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]

NUMBERS = '''
"""A module."""
from enum import IntEnum
PATIENCE_S = 2.5
"""From here on a rank stands still. Unit: seconds. From: 3 sigma of 40 healthy recordings."""
SHARE = 0.3
"""A share of something."""
A, B = 1 << 4, -3
TABLE = {"a": 1.5, "b": 2.5}
TWICE = 2 * PATIENCE_S
MAX_LINES = 12
"""Bound: lines of evidence."""
NCCL_STEPS = 8
"""Fact: slots of a connection (``src/include/device.h``)."""
NAME, FLAG, NOTHING, MANY = "x", True, None, ()
COPY = SHARE


class Kind(IntEnum):
    ONE = 5


class Rule:
    weight: float = 0.7
    begun: int = 0


def judge(value, least=4, most=1):
    return value > 0.9 or value < 1 or value == SHARE
'''


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_shape", ROOT / "scripts" / "check_shape.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_shape"] = module
    spec.loader.exec_module(module)
    return module


shape = load()


def write(source: Path, package: str, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = source / package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        for folder in (path.parent, source / package):
            (folder / "__init__.py").touch()


def function(lines: int, name: str = "f") -> str:
    return "\n".join([f"def {name}():", *["    x = 1"] * (lines - 1)])


def test_what_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "engine/numbers.py": NUMBERS,
        "engine/long.py": "@staticmethod\n" + function(59) + "\n" + function(59, "short"),
        "cli/long.py": "class A:\n    " + function(60).replace("\n", "\n    "),
        "cli/numbers.py": "X = 3\ndef f(a=7):\n    return a > 9\n",
        # A late import closes the first circle, one for annotations the second.
        "engine/a.py": "from shaped_one.engine import b\n",
        "engine/b.py": "def f():\n    from shaped_one.engine import a\n",
        "engine/c.py": "from shaped_one.engine import d\n",
        "engine/d.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shaped_one.engine import c\n",
    }
    write(tmp_path, "shaped_one", files)
    monkeypatch.syspath_prepend(str(tmp_path))
    found = {each.name: each for each in shape.measure(tmp_path, "shaped_one")}
    assert found["engine_modules"].value == 7
    assert found["engine_lines"].value == sum(len(text.splitlines()) for name, text in files.items() if name.startswith("engine"))
    named = [line.split()[1] for line in found["thresholds"].items]
    assert named == ["PATIENCE_S", "SHARE", "A", "B", "TABLE", "TWICE"]
    assert [line.split()[1] for line in found["thresholds_underived"].items] == named[1:]
    assert [line.partition(" ")[2] for line in found["defaults"].items] == ["Rule: weight: float = 0.7", "judge(… = 4)"]
    assert [line.partition(" ")[2] for line in found["inline_numbers"].items] == ["value > 0.9"]
    assert found["engine_long_functions"].items == ["engine/long.py:1 f: 60 lines"]
    assert found["long_functions"].items == ["cli/long.py:2 f: 60 lines"]
    assert found["import_cycles"].items == ["shaped_one.engine.a ↔ shaped_one.engine.b"]
    assert found["type_cycles"].items == ["shaped_one.engine.c ↔ shaped_one.engine.d"]


def test_limits_hold_what_they_name_and_nothing_else() -> None:
    measures = [shape.Measure("lines", 10, "lines"), shape.Measure("modules", 3, "modules")]
    assert shape.exceeded(measures, {"lines": 10, "modules": 3}, {"lines": 5}) == []
    (over,) = shape.exceeded(measures, {"lines": 9, "modules": 3}, {})
    assert over.startswith("lines: 10, 1 more than the limit of 9")
    assert shape.exceeded(measures, {"lines": 10}, {}) == ["modules: no limit in pyproject.toml"]
    assert shape.exceeded(measures, {"lines": 10, "modules": 3}, {"line": 5}) == ["line: not a measure"]


@pytest.mark.parametrize(("goal", "limit"), [(9, 10), (11, 11)])
def test_limits_are_only_lowered_and_no_lower_than_the_goal(goal: int, limit: int) -> None:
    text = f"a = 1\n[tool.ncclwatch.shape.limits]\nlines = 12\nmodules = 2\n\n[tool.ncclwatch.shape.goals]\nlines = {goal}\n"
    measures = [shape.Measure("lines", 10, "lines"), shape.Measure("modules", 3, "modules")]
    assert shape.lowered(text, measures) == text.replace("lines = 12\nmodules", f"lines = {limit}\nmodules")


def test_no_goal_of_this_project_is_above_its_limit() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["ncclwatch"]["shape"]
    assert {name for name, goal in settings["goals"].items() if goal > settings["limits"][name]} == set()
