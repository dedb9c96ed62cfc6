"""What a probe of a path found out."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Answer(StrEnum):
    """Who answered, from everybody to nobody.

    ``OK``: the other end's process. ``SILENT``: only the kernel of the other host, which took the connection. ``REFUSED``: that
    kernel, which says that nobody listens. ``UNAUTHORISED``: somebody who does not share our token. ``NO_ROUTE``: our own kernel
    or a router, which know no way. ``TIMEOUT``: nobody. ``BROKEN``: it answered and went away. ``UNAVAILABLE``: this machine
    cannot probe that way.
    """

    OK = "ok"
    SILENT = "silent"
    REFUSED = "refused"
    UNAUTHORISED = "unauthorised"
    NO_ROUTE = "no-route"
    TIMEOUT = "timeout"
    BROKEN = "broken"
    UNAVAILABLE = "unavailable"

    @property
    def path_is_alive(self) -> bool | None:
        """Whether packets came back from the other host; ``None`` where that is not known."""
        if self in (Answer.OK, Answer.SILENT, Answer.REFUSED, Answer.UNAUTHORISED, Answer.BROKEN):
            return True
        return None if self is Answer.UNAVAILABLE else False


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of one probe. Times are seconds; ``detail`` says in words what stands behind ``answer``."""

    kind: str
    """``tcp`` or ``rdma``."""
    answer: Answer
    detail: str
    device: str = ""
    sent: int = 0
    answered: int = 0
    round_trips: tuple[float, ...] = ()

    @property
    def median(self) -> float | None:
        """The median round trip."""
        ordered = sorted(self.round_trips)
        return ordered[len(ordered) // 2] if ordered else None
