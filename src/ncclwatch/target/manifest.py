"""The manifest: layouts of every NCCL release on PyPI from 2.18 on, for builds whose debug information was stripped.

The data file is generated from the wheels by ``scripts/make_layout_manifest.py``. Equal structures of different builds are kept
once: ``structs`` and ``enums`` are pools, and a build is a list of indices into them. A build is matched by its build id, with
all its symbols; else by version, without symbols, because addresses differ between builds of one version.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from ncclwatch.model.state import VersionSource
from ncclwatch.target.layout import (
    Layout,
    LayoutError,
    Version,
    enum_from_json,
    enum_to_json,
    struct_from_json,
    struct_to_json,
)
from ncclwatch.target.machine import Machine

FORMAT = "ncclwatch.layouts/1"
FILE_NAME = "layouts.json.xz"


@dataclass(frozen=True, slots=True)
class Build:
    """One build of NCCL in the manifest: ``packages`` are those of PyPI that hold it (``nvidia-nccl-cu12==2.21.5``)."""

    build_id: str
    version: Version
    cuda: str
    packages: tuple[str, ...]
    machine: Machine = Machine.X86_64


class Entry(NamedTuple):
    """What a wheel says: its layout, the CUDA version it is made for, its package, and its architecture."""

    layout: Layout
    cuda: str
    package: str
    machine: Machine = Machine.X86_64


class Manifest:
    """Known builds. Layouts are made when they are asked for."""

    def __init__(self, data: Any) -> None:
        try:
            if data["format"] != FORMAT:
                raise LayoutError(f"layout manifest of format {str(data['format'])[:40]!r}", "install ncclwatch again")
            self._structs: list[Any] = data["structs"]
            self._enums: list[Any] = data["enums"]
            self._rows: list[dict[str, Any]] = data["builds"]
            self.builds: tuple[Build, ...] = tuple(
                Build(
                    row["build_id"],
                    _version(row["version"]),
                    row["cuda"],
                    tuple(row["packages"]),
                    Machine(row.get("machine", Machine.X86_64)),
                )
                for row in self._rows
            )
        except (KeyError, TypeError, ValueError) as error:
            raise LayoutError(f"damaged layout manifest ({error})", "install ncclwatch again") from None

    def by_build_id(self, build_id: str) -> Layout | None:
        """The layout of exactly this build, symbols included."""
        for number, build in enumerate(self.builds):
            if build_id and build.build_id == build_id:
                return self._layout(number, VersionSource.BUILD_ID)
        return None

    def by_version(self, version: Version, cuda: str = "", machine: Machine = Machine.X86_64) -> Layout | None:
        """The layout that builds of this version for one architecture share, without symbols; ``None`` for an unknown version.

        Builds for the same CUDA, then the same major CUDA version, are preferred. Where those differ in a structure, it is left
        out: its signals are unavailable rather than wrong.
        """
        numbers = [number for number, build in enumerate(self.builds) if (build.version, build.machine) == (version, machine)]
        if not numbers:
            return None
        numbers = self._nearest(numbers, cuda)
        layouts = [self._layout(number, VersionSource.VERSION) for number in numbers]
        first = layouts[0]
        return Layout(
            build_id="",
            version=version,
            source=VersionSource.VERSION,
            structs={k: v for k, v in first.structs.items() if all(other.structs.get(k) == v for other in layouts)},
            enums={k: v for k, v in first.enums.items() if all(other.enums.get(k) == v for other in layouts)},
            symbols={},
        )

    def entries(self) -> Iterator[Entry]:
        """What it was made from, package by package."""
        for number, build in enumerate(self.builds):
            layout = self._layout(number, VersionSource.BUILD_ID)
            yield from (Entry(layout, build.cuda, package, build.machine) for package in build.packages)

    def _nearest(self, numbers: list[int], cuda: str) -> list[int]:
        """Builds for the same CUDA, else for its major version, else all: members depend on CUDART_VERSION (NVLS: from 12.1)."""
        same = [number for number in numbers if self.builds[number].cuda == cuda]
        major = [number for number in numbers if self.builds[number].cuda.partition(".")[0] == cuda.partition(".")[0]]
        return same or major or numbers

    def _layout(self, number: int, source: VersionSource) -> Layout:
        row, build = self._rows[number], self.builds[number]
        structs = {}
        for index in row["structs"]:
            name, data = self._structs[index]
            structs[name] = struct_from_json(name, data)
        enums = {self._enums[index][0]: enum_from_json(self._enums[index][1]) for index in row["enums"]}
        symbols = {name: (int(address), int(size)) for name, (address, size) in row["symbols"].items()}
        return Layout(build.build_id, build.version, source, structs, enums, symbols)


def build_manifest(entries: Iterable[Entry]) -> dict[str, Any]:
    """The manifest's JSON data; deterministic for the same input. Packages with the same build are one row."""
    structs: dict[str, int] = {}
    enums: dict[str, int] = {}
    rows: dict[str, dict[str, Any]] = {}
    for layout, cuda, package, machine in entries:
        if not layout.build_id or layout.version is None:
            raise LayoutError(f"{package} has no build id or no version")
        if layout.build_id in rows:
            rows[layout.build_id]["packages"].append(package)
            continue
        rows[layout.build_id] = {
            "build_id": layout.build_id,
            "version": list(layout.version),
            "cuda": cuda,
            "packages": [package],
            "machine": machine,
            "structs": _pooled(structs, {name: struct_to_json(struct) for name, struct in layout.structs.items()}),
            "enums": _pooled(enums, {name: enum_to_json(values) for name, values in layout.enums.items()}),
            "symbols": {name: list(place) for name, place in sorted(layout.symbols.items())},
        }
    return {
        "format": FORMAT,
        "structs": [json.loads(text) for text in structs],
        "enums": [json.loads(text) for text in enums],
        "builds": list(rows.values()),
    }


def _pooled(pool: dict[str, int], items: Mapping[str, Any]) -> list[int]:
    """Indices of the items in the pool, which grows by those it does not have yet."""
    texts = (json.dumps([name, value], separators=(",", ":")) for name, value in sorted(items.items()))
    return [pool.setdefault(text, len(pool)) for text in texts]


def compress(data: dict[str, Any]) -> bytes:
    """The data file's bytes."""
    text = json.dumps(data, separators=(",", ":"), sort_keys=True).encode()
    return lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)


@lru_cache(maxsize=1)
def load() -> Manifest:
    """The manifest that comes with ncclwatch; raises :class:`LayoutError` when it is damaged or missing."""
    # Not by ``importlib.resources``, which an agent would keep.
    file = Path(__file__).parent / "data" / FILE_NAME
    try:
        return Manifest(json.loads(lzma.decompress(file.read_bytes())))
    except (OSError, lzma.LZMAError, ValueError) as error:
        raise LayoutError(f"the layout manifest cannot be read ({error})", "install ncclwatch again") from None


def _version(parts: Any) -> Version:
    major, minor, patch = parts
    return int(major), int(minor), int(patch)
