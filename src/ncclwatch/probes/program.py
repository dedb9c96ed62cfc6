"""The compiled BPF programs: where their sources lie, how they are compiled, and how they become objects of the kernel."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ncclwatch.errors import NcclwatchError
from ncclwatch.probes.bpf import BpfMap, MapType, ProgramType, load_program, relocate
from ncclwatch.probes.compile_child import FORMAT
from ncclwatch.probes.image_cache import ImageCache, digest

SITE_PLACEHOLDER = 0x6E63636C73697465
"""``NW_SITE_PLACEHOLDER`` of nccl_calls.bpf.c."""
CALLS_SOURCE = "nccl_calls.bpf.c"


class CompileError(NcclwatchError):
    """The BPF programs could not be compiled; the hint says what is missing."""


def source_folder() -> Path:
    """The folder of the BPF sources: beside the package when installed, at the root of a checkout otherwise.

    Raises :class:`CompileError` when there is neither.
    """
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "_bpf", package.parent.parent / "bpftrace_probes"):
        if (folder / "events.h").is_file():
            return folder
    raise CompileError("the BPF sources of ncclwatch are missing", "install the package again")


@dataclass(frozen=True, slots=True)
class MapShape:
    """A map as the source declares it: sizes in bytes; ``entries`` of a ring buffer is its size in bytes."""

    name: str
    kind: MapType
    key_size: int
    value_size: int
    entries: int
    flags: int


@dataclass(frozen=True, slots=True)
class Image:
    """Compiled programs: instructions by name, with map references as indices into ``maps``."""

    maps: tuple[MapShape, ...]
    programs: Mapping[str, bytes]

    @staticmethod
    def from_json(data: Any) -> Image:
        """Parse what the compiler process wrote; raises :class:`CompileError`."""
        try:
            if "error" in data:
                raise CompileError(str(data["error"]), str(data.get("hint", "")))
            if data["format"] != FORMAT:
                raise CompileError("the BPF compiler process speaks another format", "install the package again")
            maps = tuple(
                MapShape(str(m["name"]), MapType(m["type"]), *(int(m[k]) for k in ("key_size", "value_size", "entries", "flags")))
                for m in data["maps"]
            )
            programs = {str(name): base64.b64decode(code, validate=True) for name, code in data["programs"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CompileError(f"the BPF compiler process answered nonsense ({error})", "install the package again") from None
        return Image(maps, programs)


class Compilation:
    """A compilation that runs in a process of its own while the caller does something else.

    BCC needs about half a second and 150 MB; both are gone with the process. An image that was compiled before from the same
    sources is taken from ``cache`` (the user's, unless another is given).
    """

    def __init__(self, source: str = CALLS_SOURCE, *, cache: ImageCache | None = None) -> None:
        folder = source_folder()
        path = folder / source
        self._cache = cache or ImageCache()
        self._process: subprocess.Popen[bytes] | None = None
        self._image: Image | None = None
        try:
            self._digest = digest(path, folder)
        except OSError as error:
            raise CompileError(
                f"cannot read the BPF sources in {folder}: {error.strerror}", "install the package again"
            ) from None
        kept = self._cache.load(self._digest)
        if kept is not None:
            # A damaged file is compiled over.
            with contextlib.suppress(CompileError):
                self._image = Image.from_json(kept)
        if self._image is None:
            # -P: the current folder may be anybody's, and nothing in it shall be imported as root.
            command = [sys.executable, "-P", "-m", "ncclwatch.probes.compile_child", str(path), str(folder)]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    @property
    def running(self) -> bool:
        """Whether it takes a compiler: the image was not kept."""
        return self._process is not None and self._image is None

    def result(self, timeout_s: float = 120) -> Image:
        """Wait for the image; raises :class:`CompileError`."""
        if self._image is None:
            if self._process is None:
                raise CompileError("the compilation was cancelled", "start it again")
            try:
                out, err = self._process.communicate(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                self.cancel()
                raise CompileError(f"BCC did not compile within {timeout_s:.0f} s", "the machine is busy: try again") from None
            try:
                data = json.loads(out)
            except ValueError:
                said = err.decode("utf-8", "replace").strip().splitlines()
                reason = said[-1] if said else f"status {self._process.returncode}"
                raise CompileError(f"the BPF compiler process failed: {reason}", "see ncclwatch doctor") from None
            self._image = Image.from_json(data)
            self._cache.save(self._digest, data)
        return self._image

    def cancel(self) -> None:
        """Stop the process, if it still runs."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


class Kernel:
    """The maps of an image, made in the kernel, and its programs, loaded on demand.

    ``ring_bytes`` is the size of the ring buffers, a power of two of at least one page.
    """

    def __init__(self, image: Image, *, ring_bytes: int) -> None:
        self.image = image
        self.maps: dict[str, BpfMap] = {}
        self._programs: list[int] = []
        try:
            for shape in image.maps:
                ring = shape.kind == MapType.RINGBUF
                # BCC gives ring buffers key and value sizes, which the kernel does not want.
                sizes = (0, 0) if ring else (shape.key_size, shape.value_size)
                entries = ring_bytes if ring else shape.entries
                self.maps[shape.name] = BpfMap(shape.name, shape.kind, *sizes, entries, shape.flags)
        except BaseException:
            self.close()
            raise

    def load(self, name: str, kind: ProgramType = ProgramType.KPROBE, *, multi: bool = False, site: int | None = None) -> int:
        """Load a program and return its descriptor, which :meth:`close` closes. ``site`` replaces the placeholder."""
        numbers = {index: self.maps[shape.name].fd for index, shape in enumerate(self.image.maps)}
        constants = None if site is None else {SITE_PLACEHOLDER: site}
        fd = load_program(name, kind, relocate(self.image.programs[name], numbers, constants), multi=multi)
        self._programs.append(fd)
        return fd

    def close(self) -> None:
        """Close programs and maps; what is attached lives on by its own descriptors."""
        for fd in self._programs:
            os.close(fd)
        self._programs.clear()
        for entry in self.maps.values():
            entry.close()

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
