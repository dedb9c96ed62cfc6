"""Values that come again and again (names, processes, lists of peers): sent once, then by number.

Numbers count from 1 within an *epoch*, which begins with a key batch; 0 is ``None``.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from ncclwatch.messaging.limits import MAX_TEXT, MAX_VALUE_BYTES, MAX_VALUES, UNDECODABLE, FormatError, MissingBaseError

_encoder = msgspec.msgpack.Encoder()


RECENT = 256
"""So many objects are known without being encoded again, or twice as many as a batch asks for, where that is more.

Two such sets are held: the newest, and the one before it.
"""


class ValueWriter:
    """Gives values numbers; ``take`` hands out those that are new since it was last called."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._by_id: dict[int, tuple[Any, int]] = {}
        self._older: dict[int, tuple[Any, int]] = {}
        self._new: list[bytes] = []
        self._recent = RECENT
        self._asked = 0
        """How many values were asked for since the last batch."""
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, value: Any) -> int:
        """The number of a value, a new one when it was not seen in this epoch. Values must not change afterwards."""
        if value is None:
            return 0
        self._asked += 1
        # Objects that live on are found without encoding them; the reference held keeps the address from being used again.
        known = self._by_id.get(id(value)) or self._older.get(id(value))
        if known is not None:
            self._remember(value, known[1])
            return known[1]
        if isinstance(value, str) and len(value) > MAX_TEXT:
            value = value[:MAX_TEXT]
        data = _encoder.encode(value)
        number = self._numbers.get(data)
        if number is None:
            number = self._numbers[data] = len(self._numbers) + 1
            self._new.append(data)
            self.nbytes += len(data)
        self._remember(value, number)
        return number

    def _remember(self, value: Any, number: int) -> None:
        if len(self._by_id) >= self._recent:
            # Most objects are of one sample. Those that live on are asked for again before they are forgotten.
            self._older, self._by_id = self._by_id, {}
        self._by_id[id(value)] = (value, number)

    def take(self) -> list[bytes]:
        """Encoded values in the order of their numbers, those that were not taken yet."""
        self._recent, self._asked = max(RECENT, 2 * self._asked), 0
        new, self._new = self._new, []
        return new


class Kept:
    """A decoded value, for as long as a reader holds it."""

    __slots__ = ("__weakref__", "value")

    def __init__(self, value: Any) -> None:
        self.value = value


class Shared:
    """Decoded values that several sources have in common: 4,096 ranks need the list of their peers only once.

    What no reader holds any more is not kept either: of a job that is over nobody asks for it again.
    """

    def __init__(self) -> None:
        self._kept: WeakValueDictionary[tuple[object, bytes], Kept] = WeakValueDictionary()

    def __len__(self) -> int:
        return len(self._kept)

    def decode(self, data: bytes, decoder: msgspec.msgpack.Decoder[Any], kind: object) -> Kept:
        """The value of ``data``, decoded once; whoever needs it holds what is returned."""
        key = (kind, data if len(data) <= 64 else blake2b(data, digest_size=24).digest())
        found = self._kept.get(key)
        if found is None:
            found = self._kept[key] = Kept(decoder.decode(data))
        return found


class ValueReader:
    """The values of one stream in one epoch."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._data: list[bytes] = []
        self._decoded: dict[object, dict[int, Any]] = {}
        """By the kind of value, then by number."""
        self._held: list[Kept] = []
        """What keeps the decoded ones for other readers."""
        self._nbytes = 0

    def add(self, first: int, data: list[bytes]) -> None:
        """Take new values; ``first`` is the number of the first of them."""
        if first != len(self._data) + 1:
            raise MissingBaseError("values of this stream are missing", "a key batch brings them")
        self._nbytes += sum(map(len, data))
        if len(self._data) + len(data) > MAX_VALUES or self._nbytes > MAX_VALUE_BYTES:
            raise FormatError("a stream has more distinct values than allowed")
        self._data += data

    def column(self, numbers: list[int], kind: object, decoder: msgspec.msgpack.Decoder[Any]) -> list[Any]:
        """The values of numbers, as the type ``decoder`` decodes; ``kind`` names that type."""
        known = self._decoded.get(kind)
        if known is None:
            known = self._decoded[kind] = {0: None}
        try:
            return [known[number] for number in numbers]
        except KeyError:
            return [known[number] if number in known else self._decode(number, kind, decoder, known) for number in numbers]

    def _decode(self, number: int, kind: object, decoder: msgspec.msgpack.Decoder[Any], known: dict[int, Any]) -> Any:
        if not 0 < number <= len(self._data):
            raise MissingBaseError("a value of this stream is missing", "a key batch brings it")
        try:
            kept = self._shared.decode(self._data[number - 1], decoder, kind)
        except UNDECODABLE as error:
            raise FormatError(f"a value of this stream is not what it should be: {error}") from error
        self._held.append(kept)
        known[number] = kept.value
        return kept.value
