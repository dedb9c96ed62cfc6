"""Questions to a history: DuckDB over its Parquet files, in memory, read only, bounded in time and memory.

DuckDB sees the tables as views; it may open no file, load no extension and change no setting, whatever the SQL says.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from types import TracebackType
from typing import Any

from ncclwatch.errors import TargetError, UsageError
from ncclwatch.history import snapshot
from ncclwatch.history.tables import TABLES
from ncclwatch.text import clean

MEMORY, TIMEOUT_S, THREADS = 1 << 30, 60.0, 2
"""Bound: what a question may take, by default: bytes, seconds, threads."""
MAX_ROWS = 100_000
"""Bound: rows of an answer."""
TRIES = 4
"""Bound: how often a question is asked again because files were merged while it was answered."""
MAX_SQL = 1 << 16

Value = Any
_READING = frozenset({"SELECT", "EXPLAIN"})

INCIDENTS = """
CREATE VIEW incidents AS
SELECT told.* EXCLUDE (kind, duration_s), ended.time AS ended, ended.kind AS ended_by,
       coalesce(ended.duration_s, epoch(ended.time - told.time)) AS stood_s
FROM (SELECT * FROM verdicts WHERE kind = 'verdict') AS told
ASOF LEFT JOIN (SELECT job, run, verdict_id, time, kind, duration_s FROM verdicts WHERE kind <> 'verdict') AS ended
ON told.job = ended.job AND told.run = ended.run AND told.verdict_id = ended.verdict_id AND told.time <= ended.time
"""
"""A verdict from when it was told to when it ended: ``ended_by`` is ``recovery`` or ``over``, empty while it stands."""


@dataclass(frozen=True, slots=True)
class Answer:
    """Rows of an answer; ``cut``: there were more than ``MAX_ROWS``."""

    names: tuple[str, ...]
    rows: list[tuple[Value, ...]]
    cut: bool = False

    def dicts(self) -> list[dict[str, Value]]:
        """A dictionary a row."""
        return [dict(zip(self.names, row, strict=True)) for row in self.rows]


class History:
    """An open history; a context manager. Raises ``TargetError`` where there is none or a package is missing."""

    def __init__(
        self, where: str, *, tables: Collection[str] = tuple(TABLES), since_day: str = "", memory: int = MEMORY,
        timeout_s: float = TIMEOUT_S,
    ) -> None:  # fmt: skip
        need_packages()
        self.where, self._tables, self._since_day = where, tuple(tables), since_day
        self._memory, self._timeout_s = memory, timeout_s
        self._open()

    def _open(self) -> None:
        self.taken = snapshot.take(self.where, self._tables, self._since_day)
        self._connection = _connect(self._memory)
        for table in self._tables:
            self._connection.register(f"{table}_files", snapshot.dataset(self.taken, table))
            self._connection.register(f"{table}_fresh", self.taken.fresh[table])
            both = f"SELECT * FROM {table}_files UNION ALL SELECT * FROM {table}_fresh"  # noqa: S608 - names of ours
            # A verdict may be told by several: live, and imported later.
            one = " QUALIFY row_number() OVER (PARTITION BY id ORDER BY time, life, n) = 1" if table == "verdicts" else ""
            self._connection.execute(f"CREATE VIEW {table} AS SELECT * FROM ({both}){one}")  # noqa: S608 - as above
        if "verdicts" in self._tables:
            self._connection.execute(INCIDENTS)
        for setting in ("enable_external_access = false", "lock_configuration = true"):
            self._connection.execute(f"SET {setting}")

    def __enter__(self) -> History:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._connection.close()

    @property
    def problems(self) -> list[str]:
        """What is there and could not be read, in words."""
        return self.taken.problems

    def ask(self, sql: str, values: Sequence[Value] | Mapping[str, Value] = ()) -> Answer:
        """The answer to one question. Raises ``UsageError`` for SQL that is wrong or does not only read, ``TargetError`` when it
        takes too long or too much memory, or a file is damaged.
        """
        import duckdb

        for attempt in range(TRIES):
            try:
                return self._ask(sql, values)
            except duckdb.OutOfMemoryException:
                raise TargetError(
                    "the question needs too much memory", "narrow it in time, or allow more with --memory"
                ) from None
            except duckdb.InterruptException:
                raise TargetError(
                    f"no answer within {self._timeout_s:.0f} s", "narrow the question in time, or allow more with --timeout"
                ) from None
            except (duckdb.ParserException, duckdb.BinderException, duckdb.CatalogException, duckdb.PermissionException) as error:
                raise UsageError(clean(str(error).splitlines()[0], 300), "docs/history.md has the tables") from None
            except (duckdb.Error, OSError, MemoryError) as error:
                if attempt + 1 == TRIES or not snapshot.is_stale(self.taken):
                    raise TargetError(f"no answer: {clean(str(error) or type(error).__name__, 300)}", "see --help") from None
                self._connection.close()
                self._open()
        raise AssertionError

    def _ask(self, sql: str, values: Sequence[Value] | Mapping[str, Value]) -> Answer:
        statements = self._connection.extract_statements(sql[:MAX_SQL])
        if len(statements) != 1 or statements[0].type.name not in _READING:
            raise UsageError("that does not only read", "one SELECT is answered; docs/history.md has the tables")
        timer = threading.Timer(self._timeout_s, self._connection.interrupt)
        timer.daemon = True
        timer.start()
        try:
            cursor = self._connection.execute(statements[0], values or None)
            rows = cursor.fetchmany(MAX_ROWS + 1)
        finally:
            timer.cancel()
        return Answer(tuple(column[0] for column in cursor.description), rows[:MAX_ROWS], len(rows) > MAX_ROWS)


def _connect(memory: int) -> Any:
    import duckdb

    return duckdb.connect(
        ":memory:",
        config={
            "memory_limit": f"{memory}B",
            "threads": THREADS,
            "temp_directory": "",
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "python_enable_replacements": False,
        },
    )


def need_packages() -> None:
    """Raise ``TargetError`` where what a history needs is not installed; loads nothing."""
    missing = [name for name in ("duckdb", "pyarrow") if find_spec(name) is None]
    if missing:
        what = f"a history needs the package{'s' if len(missing) > 1 else ''} {' and '.join(missing)}"
        raise TargetError(what, "install it with: pip install 'ncclwatch[fleet]'")
