#!/usr/bin/env python3
"""Check the shape of the code: size of the engine, length of functions, numbers that decide, imports that go in a circle.

Limits stand in pyproject.toml, ``[tool.ncclwatch.shape]``: a measure that exceeds its limit fails. A limit is only ever lowered,
to what was reached, until it is the goal. ``make lint`` runs this.

    scripts/check_shape.py              # the measures, and what exceeds its limit
    scripts/check_shape.py --list       # and everything that is counted: thresholds, long functions, cycles
    scripts/check_shape.py --lower      # write what was reached into pyproject.toml where it is below the limit
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import grimp
import networkx as nx

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "ncclwatch"
ENGINE = "engine"
LONG_LINES = 60
"""A function of that many lines is long: it no longer fits a screen."""
FEW = 40
"""So many things are listed when there is one too many; more only with ``--list``."""
TRIVIAL = frozenset({-1, 0, 1, 2})
"""Numbers that decide nothing by being what they are: a bound of a list, a half, one step on."""
NO_THRESHOLD = ("Bound: ", "Fact: ")
"""How the docstring of a number begins that is no threshold: what is kept or shown at most, and what NCCL, the kernel or
arithmetic fix (with the place that says so).
"""
DERIVED = ("Unit: ", "From: ")
"""What the docstring of a threshold holds: its unit, and the recordings, paper or source that it was derived from."""


@dataclass(frozen=True, slots=True)
class Number:
    """A module-level number: ``path:line`` where it stands, its name, its value as written, and its docstring."""

    place: str
    name: str
    value: str
    doc: str

    @property
    def is_threshold(self) -> bool:
        """Whether a judgement turns on it."""
        return not self.doc.startswith(NO_THRESHOLD)

    @property
    def is_derived(self) -> bool:
        """Whether its docstring says its unit and where it is from."""
        return all(word in self.doc for word in DERIVED)


@dataclass(frozen=True, slots=True)
class Function:
    """A function and how many lines it has, decorators and docstring included."""

    place: str
    name: str
    lines: int


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure: what it counts, and the single things it counts, as lines."""

    name: str
    value: int
    about: str
    items: Sequence[str] = ()


def numbers(path: Path, shown: str) -> Iterator[Number]:
    """Module-level names that are bound to numbers, or to tables of numbers, written out in a module."""
    body = ast.parse(path.read_text("utf-8")).body
    for statement, following in zip_longest(body, body[1:]):
        if isinstance(statement, ast.Assign):
            targets, value = statement.targets, statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets, value = [statement.target], statement.value
        else:
            continue
        doc = _text(following)
        for name, each in _pairs(targets, value):
            if _is_numeric(each):
                yield Number(f"{shown}:{statement.lineno}", name, ast.unparse(each), doc)


def _pairs(targets: Sequence[ast.expr], value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Names with what they are bound to; ``A, B = 1, 2`` binds two."""
    for target in targets:
        if isinstance(target, ast.Name):
            yield target.id, value
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for inner, each in zip(target.elts, value.elts, strict=True):
                yield from _pairs([inner], each)


def _is_numeric(node: ast.expr) -> bool:
    """Whether arithmetic on numbers (at least one of them written out), or a table of nothing else."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
    if isinstance(node, ast.UnaryOp):
        return _is_numeric(node.operand)
    if isinstance(node, ast.BinOp):
        sides = (node.left, node.right)
        return any(map(_is_numeric, sides)) and all(_is_numeric(side) or isinstance(side, ast.Name) for side in sides)
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return bool(node.elts) and all(map(_is_numeric, node.elts))
    if isinstance(node, ast.Dict):
        return bool(node.values) and all(map(_is_numeric, node.values))
    return False


def _text(statement: ast.stmt | None) -> str:
    """The text of a statement that is only a string."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str):
        return " ".join(statement.value.value.split())
    return ""


def defaults(path: Path, shown: str) -> Iterator[str]:
    """Numbers given as defaults of parameters and of fields of classes, other than trivial ones and members of enumerations."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for value in (*node.args.defaults, *node.args.kw_defaults):
                if value is not None and _weighs(value):
                    yield f"{shown}:{value.lineno} {node.name}(… = {ast.unparse(value)})"
        elif isinstance(node, ast.ClassDef) and not re.search("Enum|Flag", " ".join(map(ast.unparse, node.bases))):
            for inner in node.body:
                if isinstance(inner, (ast.Assign, ast.AnnAssign)) and inner.value is not None and _weighs(inner.value):
                    yield f"{shown}:{inner.lineno} {node.name}: {ast.unparse(inner)}"


def comparisons(path: Path, shown: str) -> Iterator[str]:
    """Comparisons with a number that is written there and then, other than a trivial one."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Compare) and any(map(_weighs, (node.left, *node.comparators))):
            yield f"{shown}:{node.lineno} {ast.unparse(node)}"


def _weighs(node: ast.expr) -> bool:
    if not _is_numeric(node):
        return False
    try:
        return ast.literal_eval(node) not in TRIVIAL
    except (ValueError, TypeError):
        return True


def functions(path: Path, shown: str) -> Iterator[Function]:
    """Every function and method, inner ones too."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            yield Function(f"{shown}:{first}", node.name, (node.end_lineno or first) - first + 1)


def cycles(package: str, *, types: bool) -> list[list[str]]:
    """Groups of modules that import each other, late imports included; with ``types`` also those for annotations alone."""
    found = grimp.build_graph(package, exclude_type_checking_imports=not types, cache_dir=None)
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_edges_from((module, other) for module in found.modules for other in found.find_modules_directly_imported_by(module))
    return sorted(sorted(group) for group in nx.strongly_connected_components(graph) if len(group) > 1)


def measure(source: Path, package: str = PACKAGE) -> list[Measure]:
    """All measures of a source folder that holds the package."""
    engine = sorted((source / package / ENGINE).rglob("*.py"))
    all_modules = sorted((source / package).rglob("*.py"))

    def shown(path: Path) -> str:
        return str(path.relative_to(source / package))

    lines = {shown(path): len(path.read_text("utf-8").splitlines()) for path in engine}
    long = [f for path in all_modules for f in functions(path, shown(path)) if f.lines >= LONG_LINES]
    inside = [f for f in long if f.place.startswith(f"{ENGINE}/")]
    outside = [f for f in long if f not in inside]
    known = [number for path in engine for number in numbers(path, shown(path))]
    thresholds = [number for number in known if number.is_threshold]
    underived = [number for number in thresholds if not number.is_derived]
    given = [line for path in engine for line in defaults(path, shown(path))]
    compared = [line for path in engine for line in comparisons(path, shown(path))]
    round_trips = cycles(package, types=False)
    typed = [group for group in cycles(package, types=True) if group not in round_trips]
    return [
        Measure("engine_lines", sum(lines.values()), "lines of the engine"),
        Measure("engine_modules", len(engine), "modules of the engine"),
        Measure("engine_long_functions", len(inside), f"its functions of {LONG_LINES} lines or more", _functions(inside)),
        Measure("long_functions", len(outside), "such functions elsewhere", _functions(outside)),
        Measure("thresholds", len(thresholds), "numbers a judgement turns on", [_line(number) for number in thresholds]),
        Measure("thresholds_underived", len(underived), "of those: without unit and derivation", [_line(n) for n in underived]),
        Measure("defaults", len(given), "numbers as defaults of parameters and fields in the engine", given),
        Measure("inline_numbers", len(compared), "comparisons in the engine with a number that has no name", compared),
        Measure("import_cycles", len(round_trips), "import cycles", [" ↔ ".join(group) for group in round_trips]),
        Measure("type_cycles", len(typed), "import cycles for annotations alone", [" ↔ ".join(group) for group in typed]),
    ]


def _functions(found: Sequence[Function]) -> list[str]:
    return [f"{f.place} {f.name}: {f.lines} lines" for f in sorted(found, key=lambda f: -f.lines)]


def _line(number: Number) -> str:
    return f"{number.place} {number.name} = {number.value}" + (f"  {number.doc}" if number.doc else "")


def exceeded(measures: Sequence[Measure], limits: Mapping[str, int], goals: Mapping[str, int]) -> list[str]:
    """What is wrong, a line each: a limit that is exceeded, one that is missing, one that limits nothing."""
    wrong = []
    for each in measures:
        limit = limits.get(each.name)
        if limit is None:
            wrong.append(f"{each.name}: no limit in pyproject.toml")
        elif each.value > limit:
            wrong.append(f"{each.name}: {each.value}, {each.value - limit} more than the limit of {limit} ({each.about})")
    names = {each.name for each in measures}
    wrong += [f"{name}: not a measure" for name in sorted((set(limits) | set(goals)) - names)]
    return wrong


def table(measures: Sequence[Measure], limits: Mapping[str, int], goals: Mapping[str, int]) -> Iterator[str]:
    """The measures with their limits and goals."""
    yield f"{'measure':<22} {'now':>6} {'limit':>6} {'goal':>6}"
    for each in measures:
        yield f"{each.name:<22} {each.value:>6} {limits.get(each.name, '-'):>6} {goals.get(each.name, '-'):>6}  {each.about}"


def lowered(settings: str, measures: Sequence[Measure]) -> str:
    """The text of pyproject.toml with every limit lowered to what was reached, and no lower than its goal."""
    goals = tomllib.loads(settings)["tool"][PACKAGE]["shape"].get("goals", {})
    head, found, rest = settings.partition("[tool.ncclwatch.shape.limits]\n")
    limits, end, after = rest.partition("\n[")
    reached = {each.name: each.value for each in measures}

    def lower(match: re.Match[str]) -> str:
        limit = int(match[2])
        return f"{match[1]} = {min(limit, max(reached.get(match[1], limit), goals.get(match[1], 0)))}"

    limits = re.sub(r"(\w+) = (\d+)", lower, limits)
    return head + found + limits + end + after


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--list", action="store_true", help="print everything that is counted")
    parser.add_argument("--lower", action="store_true", help="lower the limits in pyproject.toml to what was reached")
    chosen = parser.parse_args(arguments)
    # The package of this checkout, whatever else the environment has installed.
    sys.path.insert(0, str(ROOT / "src"))
    measures, file = measure(ROOT / "src"), ROOT / "pyproject.toml"
    if chosen.lower:
        file.write_text(lowered(file.read_text("utf-8"), measures), "utf-8")
    settings = tomllib.loads(file.read_text("utf-8"))["tool"][PACKAGE]["shape"]
    for line in table(measures, settings["limits"], settings["goals"]):
        print(line)
    wrong = exceeded(measures, settings["limits"], settings["goals"])
    failed = {line.partition(":")[0] for line in wrong}
    for each in measures:
        if each.items and (chosen.list or (each.name in failed and len(each.items) <= FEW)):
            print(f"\n{each.name}: {each.about}", *(f"  {item}" for item in each.items), sep="\n")
    for line in wrong:
        print(f"check_shape: {line}", file=sys.stderr)
    if wrong and not chosen.list:
        print("check_shape: all that is counted: scripts/check_shape.py --list", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
