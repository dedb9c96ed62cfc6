"""What the slowness estimate weighed in jobs whose fault is known, as a file: weights are fitted to it where recordings are gone.

A recording takes hundreds of kilobytes, what was weighed of it a few. Profiles and what is known beside them are kept, and not
the terms made of them, so that the terms can change. ``python -m score.slowness --keep FILE`` writes such a file,
``--observations FILE`` fits to it. Processes are numbers here: nothing names the machine.
"""

from __future__ import annotations

import lzma
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ncclwatch.engine.slow.findings import Context
from ncclwatch.engine.slow.lateness import Lateness
from ncclwatch.engine.slow.profile import LinkKey, Profile
from ncclwatch.engine.slow.snapshot import Part
from ncclwatch.model.identity import ProcessKey

FORMAT = 1
ARRAYS = ("busy", "waits", "seen", "cpu_wait", "cpu_use", "held_back", "limits")
"""Of a profile, by process."""
SETS = ("equal", "host", "node", "alike", "hidden", "unseen")
"""Of a context, by process; those that are not known are left out."""
Number = Callable[[ProcessKey | None], int]


@dataclass(slots=True)
class Observation:
    """One judged moment: what was weighed. ``shows``: the fault shows by now. ``pretended``: a healthy stretch that is said to
    have become slow.
    """

    ranks: list[int | None]
    profile: Profile
    context: Context
    shows: bool
    pretended: bool = False


@dataclass(slots=True)
class Observed:
    """What was weighed of one job, and what is the truth of it. ``hidden``: what the host cannot see into joins its ranks."""

    name: str
    real: bool
    wanted: tuple[int, ...]
    """Ranks at fault."""
    also: tuple[int, ...]
    """Ranks that are no mistake either."""
    verdicts: tuple[str, ...]
    hidden: bool
    observations: list[Observation]


def write(jobs: Sequence[Observed], path: Path) -> None:
    """Keep them."""
    packed = {"format": FORMAT, "jobs": [_job_out(job) for job in jobs]}
    path.write_bytes(lzma.compress(msgspec.msgpack.encode(packed), preset=9))


def read(path: Path) -> list[Observed]:
    """Those of a file. Raises ValueError for one of another format."""
    packed = msgspec.msgpack.decode(lzma.decompress(path.read_bytes()))
    if packed.get("format") != FORMAT:
        raise ValueError(f"{path} has format {packed.get('format')}, this is {FORMAT}: make it anew from recordings")
    return [_job_in(job) for job in packed["jobs"]]


def _process(number: int) -> ProcessKey:
    return ProcessKey("", number, 0, "")


def _job_out(job: Observed) -> dict[str, Any]:
    numbers: dict[ProcessKey, int] = {}

    def number(key: ProcessKey | None) -> int:
        return -1 if key is None else numbers.setdefault(key, len(numbers))

    return {
        "name": job.name,
        "real": job.real,
        "truth": [job.wanted, job.also, job.verdicts, job.hidden],
        "moments": [
            [one.ranks, one.shows, one.pretended, _profile_out(one.profile, number), _context_out(one.context, number)]
            for one in job.observations
        ],
    }


def _job_in(packed: Mapping[str, Any]) -> Observed:
    wanted, also, verdicts, hidden = packed["truth"]
    moments = [
        Observation(ranks, _profile_in(profile), _context_in(context), shows, pretended)
        for ranks, shows, pretended, profile, context in packed["moments"]
    ]
    return Observed(packed["name"], packed["real"], tuple(wanted), tuple(also), tuple(verdicts), hidden, moments)


def _array_out(values: NDArray[Any]) -> list[Any]:
    """Floats lose what no judgement turns on: half of their digits."""
    if values.dtype == np.float64:
        values = values.astype(np.float32)
    return [values.dtype.str, values.tobytes()]


def _array_in(packed: Sequence[Any]) -> NDArray[Any]:
    values = np.frombuffer(packed[1], packed[0])
    return values.astype(np.float64) if values.dtype == np.float32 else values.copy()


def _link_out(key: LinkKey, number: Number) -> list[int]:
    return [number(key[0]), number(key[1]), *key[2:]]


def _link_in(packed: Sequence[int]) -> LinkKey:
    one, other = (_process(at) if at >= 0 else None for at in packed[:2])
    return (one, other, packed[2], packed[3], packed[4])


def _profile_out(profile: Profile, number: Number) -> dict[str, Any]:
    held = [[part.name, _array_out(profile.hold[part]), _array_out(profile.looks_held[part])] for part in profile.hold]
    links = [[_link_out(key, number), share, profile.link_looks.get(key, 0)] for key, share in profile.links.items()]
    arrays = {name: _array_out(getattr(profile, name)) for name in ARRAYS}
    processes = [number(key) for key in profile.processes]
    return {"processes": processes, "looks": profile.looks, "held": held, "links": links, "arrays": arrays}


def _profile_in(packed: Mapping[str, Any]) -> Profile:
    links = [(_link_in(key), share, looks) for key, share, looks in packed["links"]]
    profile = Profile(
        [_process(at) for at in packed["processes"]],
        packed["looks"],
        {Part[name]: _array_in(share) for name, share, _ in packed["held"]},
        {Part[name]: _array_in(looks) for name, _, looks in packed["held"]},
        {key: share for key, share, _ in links},
        Counter({key: looks for key, _, looks in links if looks}),
    )
    for name, values in packed["arrays"].items():
        setattr(profile, name, _array_in(values))
    return profile


def _context_out(context: Context, number: Number) -> dict[str, Any]:
    late = context.late
    return {
        "lost": context.lost,
        "idle": context.idle,
        "before": None if context.before is None else _profile_out(context.before, number),
        "late": None if late is None else [_array_out(late.share), _array_out(late.late), late.seen, _array_out(late.seconds)],
        "delayed": [[number(one), number(other), seconds] for (one, other), seconds in context.delayed.items()],
        "sets": {name: _array_out(values) for name in SETS if (values := getattr(context, name)) is not None},
    }


def _context_in(packed: Mapping[str, Any]) -> Context:
    sets = {name: _array_in(values) for name, values in packed["sets"].items()}
    late, before = packed["late"], packed["before"]
    return Context(
        lost=packed["lost"],
        idle=packed["idle"],
        before=None if before is None else _profile_in(before),
        late=None if late is None else Lateness(_array_in(late[0]), _array_in(late[1]), late[2], _array_in(late[3])),
        delayed={(_process(one), _process(other)): seconds for one, other, seconds in packed["delayed"]},
        **sets,
    )
