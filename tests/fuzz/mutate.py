"""Mutations that know a little of what they change: words of bytes, and leaves of JSON and msgpack trees."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec

Mutator = Callable[[bytes, random.Random], bytes]

WORDS = (
    0,
    1,
    2,
    7,
    127,
    128,
    255,
    256,
    4095,
    4096,
    (1 << 15),
    (1 << 16) - 1,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 47,
    (1 << 62),
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 2,
    (1 << 64) - 1,
)
"""Numbers at which something changes."""

LEAVES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2**31,
    2**32,
    2**53 + 1,
    2**62,
    2**63 - 1,
    -(2**63),
    2**64 - 1,
    0.0,
    -0.0,
    1e308,
    -1e308,
    0.5,
    float("nan"),
    float("inf"),
    1e300,
    "",
    "x",
    "x" * 5000,
    "\x1b[2J",
    "\n",
    "½",
    "-1",
    "9" * 400,
    "nan",
    [],
    {},
    [[]],
    {"": {}},
    [0] * 300,
    "../../etc",
)


def of_bytes(data: bytes, source: random.Random) -> bytes:
    """Bits, words, and pieces that are cut out, doubled or put in."""
    found = bytearray(data)
    for _ in range(source.choice((1, 1, 1, 2, 3, 6))):
        kind, size = source.randrange(7), len(found)
        at = source.randrange(size) if size else 0
        if kind == 0 and size:
            found[at] ^= 1 << source.randrange(8)
        elif kind == 1 and size:
            found[at] = source.randrange(256)
        elif kind in (2, 3) and size:
            width = source.choice((1, 2, 4, 8))
            place = at // width * width if kind == 2 else at
            word = source.choice(WORDS) & (1 << 8 * width) - 1
            found[place : place + width] = word.to_bytes(width, source.choice(("little", "little", "big")))
        elif kind == 4 and size:
            del found[at : at + source.choice((1, 2, 4, 8, 16, 64, size))]
        elif kind == 5 and size:
            end = min(size, at + source.choice((1, 4, 16, 128)))
            found[at:at] = found[at:end] * source.choice((1, 1, 2, 20))
        else:
            found[at:at] = source.randbytes(source.choice((1, 2, 4, 8, 32)))
    return bytes(found)


def _leaf(source: random.Random) -> Any:
    return copy.deepcopy(source.choice(LEAVES))


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of everything below."""
    waiting = [tree]
    while waiting:
        one = waiting.pop()
        keys: Iterable[Any] = ()
        if isinstance(one, dict):
            keys = list(one)
        elif isinstance(one, list):
            keys = range(len(one))
        for key in keys:
            yield one, key
            waiting.append(one[key])


def _shallow(tree: Any, source: random.Random) -> tuple[Any, Any]:
    """A place found by walking down from the root: the few fields at the top are met as often as the many below."""
    while True:
        key = source.choice(list(tree) if isinstance(tree, dict) else range(len(tree)))
        below = tree[key]
        if not isinstance(below, dict | list) or not below or source.random() < 0.2:
            return tree, key
        tree = below


def of_tree(tree: Any, source: random.Random) -> Any:
    """A tree of lists and maps with some leaves, branches or keys changed, in place where it can be."""
    for _ in range(source.choice((1, 1, 2, 3))):
        places = list(_places(tree))
        if not places:
            return _leaf(source)
        container, key = source.choice(places) if source.random() < 0.5 else _shallow(tree, source)
        kind, old = source.randrange(9), container[key]
        if kind == 0:
            del container[key]
        elif kind == 1 and isinstance(container, list):
            container.insert(key, _leaf(source) if source.random() < 0.5 else old)
        elif kind == 2:
            other, name = source.choice(places)
            container[key] = other[name] if not isinstance(other[name], dict | list) else _leaf(source)
        elif kind in (3, 4) and isinstance(old, int) and not isinstance(old, bool):
            container[key] = old + source.choice((1, -1, 2**31, 2**32, -(2**40)))
        elif kind in (3, 4, 5) and isinstance(old, bytes) and old:
            container[key] = of_packed(old, source)
        elif kind in (3, 4) and isinstance(old, str) and old:
            container[key] = of_bytes(old.encode("utf-8", "replace"), source).decode("utf-8", "replace")
        elif kind == 6 and isinstance(container, dict):
            container[source.choice(("", "x", 0, *map(str, container)))] = container.pop(key)
        else:
            container[key] = _leaf(source)
    return tree


def of_packed(data: bytes, source: random.Random) -> bytes:
    """msgpack, where it is that; else bytes."""
    if source.random() < 0.8:
        try:
            tree = msgspec.msgpack.decode(data)
            if isinstance(tree, dict | list):
                return msgspec.msgpack.encode(of_tree(tree, source))
        except (msgspec.MsgspecError, ValueError, OverflowError, TypeError, RecursionError):
            pass
    return of_bytes(data, source)


def of_json(data: bytes, source: random.Random) -> bytes:
    """JSON, where it is that; else bytes."""
    if source.random() < 0.8:
        try:
            return json.dumps(of_tree(json.loads(data), source)).encode("utf-8", "replace")
        except (ValueError, RecursionError, TypeError):
            pass
    return of_bytes(data, source)


def of_lines(data: bytes, source: random.Random) -> bytes:
    """Lines and words of text."""
    lines = data.split(b"\n")
    at = source.randrange(len(lines))
    kind = source.randrange(5)
    if kind == 0:
        del lines[at]
    elif kind == 1:
        lines.insert(at, source.choice(lines))
    elif kind in (2, 3):
        words = lines[at].split(b" ")
        place = source.randrange(len(words))
        number = str(source.choice((*WORDS, -1, 10**30))).encode() if source.random() < 0.95 else b"9" * 5000
        words[place] = source.choice((number, b"", b"\xff\xfe", words[place] * 2, source.choice(words), "²".encode(), b"-0x1"))
        lines[at] = b" ".join(words)
    else:
        return of_bytes(data, source)
    return b"\n".join(lines)


def pack(parts: Iterable[bytes]) -> bytes:
    """Several inputs as one: three bytes of length before each (see :func:`parts`)."""
    return b"".join(len(part).to_bytes(3, "little") + part for part in parts)


def parts(data: bytes, most: int = 16) -> list[bytes]:
    """The inverse of :func:`pack`, of any bytes."""
    found: list[bytes] = []
    at = 0
    while at + 3 <= len(data) and len(found) < most:
        size = int.from_bytes(data[at : at + 3], "little")
        found.append(data[at + 3 : at + 3 + size])
        at += 3 + size
    return found


def of_parts(inner: Mutator) -> Mutator:
    """Mutates one part with ``inner``, or leaves parts out, doubles and exchanges them."""

    def mutate(data: bytes, source: random.Random) -> bytes:
        found = parts(data)
        if not found:
            return of_bytes(data, source)
        at, kind = source.randrange(len(found)), source.randrange(10)
        if kind == 0:
            del found[at]
        elif kind == 1:
            found.insert(source.randrange(len(found) + 1), found[at])
        elif kind == 2:
            other = source.randrange(len(found))
            found[at], found[other] = found[other], found[at]
        else:
            found[at] = inner(found[at], source)
        return pack(found)

    return mutate
