"""Values made to fit, wherever they are from."""

from __future__ import annotations

import math

import pytest

from ncclwatch.history import tables
from ncclwatch.history.tables import Row, arrow_table, columns, fit, fitted


@pytest.mark.parametrize(
    ("kind", "given", "kept"),
    [
        ("text", "a\ud800b", "a?b"), ("text", 3, None), ("text", "x" * 5000, "x" * 1024),
        ("real", math.nan, None), ("real", math.inf, None), ("real", 10**400, None), ("real", 3, 3.0), ("real", True, None),
        ("whole", 1 << 70, None), ("whole", -(1 << 63) + 1, -(1 << 63) + 1), ("whole", 1.5, None), ("whole", False, None),
        ("flag", 1, None), ("flag", True, True), ("time", -1, None), ("time", 1 << 62, 1 << 62), ("time", (1 << 63) - 1, None),
        ("texts", ["a", 1, None, "b"], ["a", "b"]), ("texts", "ab", []), ("wholes", list(range(5000)), list(range(4096))),
        ("wholes", {"a": 1}, []),
    ],
)  # fmt: skip
def test_a_value_fits_or_is_none(kind: str, given: object, kept: object) -> None:
    assert fit(kind, given) == kept


def test_every_table_becomes_arrow_with_all_of_its_columns() -> None:
    for name in tables.TABLES:
        made = arrow_table(name, [[*fitted(Row(name, 1_000_000_999, "job", "run", {"unknown": 1})), "life", 1]])
        assert made.schema == tables.arrow_schema(name)
        assert made.column_names == list(columns(name))
        assert made.to_pylist()[0]["time"].microsecond == 0
