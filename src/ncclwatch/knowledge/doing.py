"""What a process was doing, told from its run state, its threads and its Python frames; patterns of frames are data."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ncclwatch.model.doing import Doing


@dataclass(frozen=True, slots=True)
class FramePattern:
    """Frames that tell ``doing``: by parts of the file's path, by names of functions, or both."""

    doing: Doing
    files: tuple[str, ...]
    names: tuple[str, ...]

    def fits(self, name: str, file: str) -> bool:
        """Whether a frame of this function in this file is one of them."""
        if self.files and not any(part in file for part in self.files):
            return False
        return not self.names or name.rpartition(".")[2] in self.names


@cache
def patterns() -> tuple[FramePattern, ...]:
    """Those of ``frames.toml``, in their order; raises ``ValueError`` where a row is of another form."""
    text = Path(__file__).with_name("frames.toml").read_text("utf-8")
    found = []
    for entry in tomllib.loads(text)["frame"]:
        if set(entry) - {"doing", "file", "name"} or not {"file", "name"} & set(entry):
            raise ValueError(f"frames.toml: {entry} has 'doing' and 'file' or 'name'")
        found.append(FramePattern(Doing(entry["doing"]), tuple(entry.get("file", ())), tuple(entry.get("name", ()))))
    return tuple(found)


def of_frames(frames: Sequence[tuple[str, str]]) -> Doing:
    """What a thread does, from its frames (function, file), the innermost first."""
    for name, file in frames:
        for pattern in patterns():
            if pattern.fits(name, file):
                return pattern.doing
    return Doing.USER_CODE if frames else Doing.UNKNOWN


_BY_STATE = {"Z": Doing.ZOMBIE, "X": Doing.GONE, "T": Doing.STOPPED, "t": Doing.TRACED}


def doings(state: str, thread_states: Sequence[str], frames: Sequence[tuple[str, str]], *, gil_held: bool) -> tuple[Doing, ...]:
    """Everything that is so, most telling first.

    ``state`` is the letter of ``/proc/PID/stat``; ``thread_states`` those of the threads in words, ``disk sleep`` among them;
    ``frames`` of the main thread; ``gil_held``: another thread holds the GIL while the main thread wants it.
    """
    found = set(_doings(state, thread_states, frames, gil_held))
    if len(found) > 1:
        found.discard(Doing.UNKNOWN)
    return tuple(sorted(found, key=list(Doing).index))


def _doings(state: str, thread_states: Sequence[str], frames: Sequence[tuple[str, str]], gil_held: bool) -> Iterator[Doing]:
    if state in _BY_STATE:
        yield _BY_STATE[state]
    if "disk sleep" in thread_states or state == "D":
        yield Doing.DISK_WAIT
    if gil_held:
        yield Doing.GIL_HELD
    yield of_frames(frames)
