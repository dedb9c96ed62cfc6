"""Dataclasses of the model as tables of fixed numpy records, by their type hints.

A number is a column; text, enumerations and whatever else a field holds are values with a number (``values``); a field that
holds other records (``tuple[Sub, ...]`` or ``Sub | None``) is a column of counts and a table of its own. So a field that is
added to a record travels without a change here, and one that the other side does not know takes its default.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ncclwatch.messaging.limits import APART, FormatError
from ncclwatch.messaging.packing import Layout, padded
from ncclwatch.messaging.steps import with_steps
from ncclwatch.messaging.values import ValueReader, ValueWriter
from ncclwatch.model.state import ProxyOperation

NO_INT = -(1 << 63)
NO_WORD = (1 << 64) - 1
"""What stands for ``None`` in a column of signed and of unsigned numbers."""

_UNSIGNED = ("hash", "address", "proxy_state")
"""Fields that hold all 64 bits; of the others 63 are enough for what NCCL counts."""

_ANY = msgspec.msgpack.Decoder()

_FORMAT = {"bool": "|i1", "int": "<i8", "word": "<u8", "float": "<f4", "value": "<u4", "many": "<u4", "one": "<u4"}


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a record: ``kind`` is bool, int, word, float, value, many or one (the last two: other records)."""

    name: str
    kind: str
    optional: bool
    default: Any
    hint: Any = None
    child: RecordType | None = None
    decoder: msgspec.msgpack.Decoder[Any] = _ANY


class RecordType:
    """How a dataclass is written as records. ``tables`` are the dataclasses that get tables of their own below it."""

    def __init__(
        self, cls: type[Any], tables: frozenset[type[Any]], *, only: Collection[str] | None = None, path: str = ""
    ) -> None:
        self.cls = cls
        self.name = path or cls.__name__
        hints = typing.get_type_hints(cls)
        self.fields = [
            _field(field, hints[field.name], tables, self.name)
            for field in dataclasses.fields(cls)
            if field.init and (only is None or field.name in only)
        ]
        self._make = _maker(cls, tuple(field.name for field in self.fields))
        self.layout: Layout = [(field.name, _FORMAT[field.kind]) for field in self.fields]
        self.dtype = padded(self.layout)

    def every(self) -> Iterable[RecordType]:
        """This type and all below it."""
        yield self
        for field in self.fields:
            if field.child is not None:
                yield from field.child.every()

    # --- writing ---------------------------------------------------------------------------------------------------

    def write(self, objects: Sequence[Any], values: ValueWriter, out: dict[str, NDArray[Any]]) -> None:
        """Put the records of ``objects`` into ``out``, by table."""
        records = np.zeros(len(objects), self.dtype)
        for field in self.fields:
            column = [getattr(item, field.name) for item in objects]
            if field.kind == "value":
                records[field.name] = [values.number(item) for item in column]
            elif field.child is not None:
                many = field.kind == "many"
                records[field.name] = [len(item) if many else item is not None for item in column]
                below = [c for item in column for c in item] if many else [item for item in column if item is not None]
                field.child.write(below, values, out)
            else:
                records[field.name] = _numbers(field, column)
        out[self.name] = records

    # --- reading ---------------------------------------------------------------------------------------------------

    def read(self, tables: dict[str, NDArray[Any]], values: ValueReader) -> list[Any]:
        """The objects of the records in ``tables``; raises ``FormatError`` where they do not fit together."""
        make = self._make
        return [make(*row) for row in self._rows(tables, values)]

    def read_fields(self, tables: dict[str, NDArray[Any]], values: ValueReader) -> list[dict[str, Any]]:
        """The same as fields by name, for records that hold only some of the fields of their class."""
        names = [field.name for field in self.fields]
        return [dict(zip(names, row, strict=True)) for row in self._rows(tables, values)]

    def _rows(self, tables: dict[str, NDArray[Any]], values: ValueReader) -> Iterable[tuple[Any, ...]]:
        records = tables.get(self.name)
        if records is None:
            return ()
        return zip(*[self._column(field, records, tables, values) for field in self.fields], strict=True)

    def _column(self, field: Field, records: NDArray[Any], tables: dict[str, NDArray[Any]], values: ValueReader) -> Iterable[Any]:
        if field.name not in (records.dtype.names or ()):
            if field.default is dataclasses.MISSING:
                raise FormatError(f"records of {self.name} lack {field.name}", APART)
            return [field.default] * len(records)
        column = records[field.name]
        if column.dtype.kind == "f" and field.kind != "float":
            raise FormatError(f"{field.name} of a record is no whole number", APART)
        numbers = column.tolist()
        if field.child is not None:
            dealt = _dealt(field, numbers, field.child.read(tables, values))
            if field.child.cls is not ProxyOperation:
                return dealt
            below = [tables[part.name] for part in field.child.every() if part.name in tables]
            own = [found.dtype for found in below] == [part.dtype for part in field.child.every()]
            return with_steps(dealt, *below) if own else dealt
        if field.kind == "value":
            if not field.optional and 0 in numbers:
                raise FormatError(f"{field.name} of a record is missing")
            return values.column(numbers, (self.name, field.name), field.decoder)
        return _restored(field, numbers)


def _field(field: dataclasses.Field[Any], hint: Any, tables: frozenset[type[Any]], path: str) -> Field:
    optional = False
    if isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint):
        rest = [part for part in typing.get_args(hint) if part is not type(None)]
        if len(rest) == 1:
            hint, optional = rest[0], True
    default = field.default
    if field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    name = field.name
    if hint in (bool, int, float):
        kind = hint.__name__
        if hint is int and any(word in name for word in _UNSIGNED):
            kind = "word"
        return Field(name, kind, optional, default)
    arguments = typing.get_args(hint)
    if hint in tables:
        return Field(name, "one", True, default, child=RecordType(hint, tables, path=f"{path}.{name}"))
    if typing.get_origin(hint) is tuple and len(arguments) == 2 and arguments[1] is Ellipsis and arguments[0] in tables:
        return Field(name, "many", False, default, child=RecordType(arguments[0], tables, path=f"{path}.{name}"))
    return Field(name, "value", optional, default, hint=hint, decoder=msgspec.msgpack.Decoder(hint))


def _numbers(field: Field, column: list[Any]) -> list[Any]:
    if field.kind == "bool":
        return [-1 if item is None else item for item in column]
    if field.kind == "float":
        return [np.nan if item is None else item for item in column]
    if field.kind == "word":
        return [NO_WORD if item is None else item & NO_WORD for item in column]
    # What was read from a target can be any number of 64 bits; a count that large is none.
    return [NO_INT if item is None else item if -NO_INT > item > NO_INT else -NO_INT - 1 for item in column]


def _restored(field: Field, numbers: list[Any]) -> list[Any]:
    if field.kind == "bool":
        return [None if n < 0 else n > 0 for n in numbers] if field.optional else [n > 0 for n in numbers]
    if field.kind == "float":
        # Seven digits were sent; the noise behind them was not.
        nothing = None if field.optional else 0.0
        return [nothing if n != n else float(f"{n:.7g}") for n in numbers]  # noqa: PLR0124
    missing = NO_WORD if field.kind == "word" else NO_INT
    if field.optional:
        return [None if n == missing else n for n in numbers]
    return numbers


def _dealt(field: Field, counts: list[int], below: list[Any]) -> list[Any]:
    if sum(counts) != len(below) or (field.kind == "one" and any(count > 1 for count in counts)):
        raise FormatError(f"records of {field.name} do not fit those above them")
    if field.kind == "one":
        items = iter(below)
        return [next(items) if count else None for count in counts]
    dealt, place = [], 0
    for count in counts:
        dealt.append(tuple(below[place : place + count]))
        place += count
    return dealt


def _maker(cls: type[Any], names: tuple[str, ...]) -> Callable[..., Any]:
    """A constructor that takes the fields in this order."""
    if names == tuple(field.name for field in dataclasses.fields(cls))[: len(names)]:
        return cls
    return lambda *row: cls(**dict(zip(names, row, strict=True)))
