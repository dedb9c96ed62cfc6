"""From a binary that carries NCCL to its layout: its own debug information, else the manifest by build id, else by version.

Layouts read from debug information are cached by build id in the user's cache folder, so that only the first look at a build
takes the 0.4 s of an extraction. Whatever is wrong with the cache, the layout is extracted again.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from weakref import WeakValueDictionary

from ncclwatch.model.state import VersionSource
from ncclwatch.target import dwarf, manifest
from ncclwatch.target.elf import ElfError, ElfFile
from ncclwatch.target.layout import Layout, LayoutError, format_version
from ncclwatch.target.version import NcclVersion, find_version
from ncclwatch.target.wanted import digest

MAX_CACHE_FILE = 4 << 20
_in_use: WeakValueDictionary[tuple[Path, str, int], Layout] = WeakValueDictionary()
"""Layouts that somebody holds, by the cache's folder, build and size of the binary: the ranks of a node share one, of 0.4 MiB."""

DEBUG_FOLDER = Path("/usr/lib/debug/.build-id")
"""Where distributions put debug information apart from the binary: ``xx/yyyy.debug`` by build id."""


class LayoutCache:
    """Layouts by build id in ``$XDG_CACHE_HOME/ncclwatch/layouts`` (``~/.cache`` without the variable).

    Only files and a folder that belong to the user and that nobody else can write are trusted: a layout steers what is read
    from a process.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or default_cache_folder()

    def load(self, build_id: str, size: int) -> Layout | None:
        """The cached layout of a build whose binary has ``size`` bytes; ``None`` when there is none that can be used."""
        try:
            fd = os.open(self._path(build_id, size), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return None
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or not _is_private(status) or status.st_size > MAX_CACHE_FILE:
                return None
            try:
                layout = Layout.from_json(json.loads(file.read(MAX_CACHE_FILE)))
            except (ValueError, LayoutError, RecursionError):
                return None
        return layout if layout.build_id == build_id else None

    def save(self, layout: Layout, size: int) -> None:
        """Keep a layout; a cache that cannot be written is no error."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not _is_private(self.folder.stat()):
                return
            import tempfile

            with tempfile.NamedTemporaryFile("w", dir=self.folder, delete=False, suffix=".part") as file:
                try:
                    json.dump(layout.to_json(), file, separators=(",", ":"))
                    file.close()
                    Path(file.name).rename(self._path(layout.build_id, size))
                except BaseException:
                    Path(file.name).unlink(missing_ok=True)
                    raise

    def _path(self, build_id: str, size: int) -> Path:
        return self.folder / f"{build_id}-{size}-{digest()}.json"


def default_cache_folder() -> Path:
    """The folder of :class:`LayoutCache`."""
    configured = os.environ.get("XDG_CACHE_HOME", "")
    try:
        base = Path(configured) if configured.startswith("/") else Path.home() / ".cache"
    except RuntimeError:  # a user id without an entry, as in many containers; files of others are not trusted there either
        import tempfile

        base = Path(tempfile.gettempdir()) / f"ncclwatch-{os.geteuid()}"
    return base / "ncclwatch" / "layouts"


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def resolve_layout(elf: ElfFile, version: NcclVersion | None = None, cache: LayoutCache | None = None) -> Layout:
    """The best layout there is for the build of NCCL in ``elf``.

    ``version`` spares the search when it is known already. ``cache`` is the user's unless another is given. ``Layout.source``
    says how sure the match is. Raises :class:`LayoutError` when nothing describes this build; its message lists what was tried.
    """
    version = version or find_version(elf)
    cache = cache or LayoutCache()
    tried = []
    attempts: tuple[Callable[[], Layout], ...] = (
        lambda: _from_debug_info(elf, version, cache),
        lambda: _from_separate_debug_info(elf, version, cache),
        lambda: _from_manifest_by_build_id(elf),
        lambda: _from_manifest_by_version(elf, version),
    )
    for attempt in attempts:
        try:
            return attempt()
        except (LayoutError, ElfError) as error:
            tried.append(error.message)
    raise LayoutError(
        f"the structures of NCCL in {elf.name} are unknown: " + "; ".join(tried),
        "install its debug information, or an NCCL release from PyPI (2.18 and later), which carries it",
    )


def _from_debug_info(elf: ElfFile, version: NcclVersion | None, cache: LayoutCache) -> Layout:
    if not elf.has_debug_info:
        raise LayoutError("no debug information in it")
    size = os.fstat(elf.fd).st_size
    if not elf.build_id:
        return dwarf.extract(elf, version.number if version else None)
    place = (cache.folder, elf.build_id, size)
    found = _in_use.get(place) or cache.load(elf.build_id, size)
    if found is None:
        found = dwarf.extract(elf, version.number if version else None)
        cache.save(found, size)
    _in_use[place] = found
    return found


def _from_separate_debug_info(elf: ElfFile, version: NcclVersion | None, cache: LayoutCache) -> Layout:
    if len(elf.build_id) < 4:
        raise LayoutError("no build id")
    path = DEBUG_FOLDER / elf.build_id[:2] / f"{elf.build_id[2:]}.debug"
    if not path.exists():
        raise LayoutError(f"no {path}")
    with ElfFile.open(path) as separate:
        if separate.build_id != elf.build_id:
            raise LayoutError(f"{path} belongs to another build")
        return _from_debug_info(separate, version, cache)


def _from_manifest_by_build_id(elf: ElfFile) -> Layout:
    layout = manifest.load().by_build_id(elf.build_id)
    if layout is None:
        raise LayoutError(f"build id {elf.build_id or '(none)'} is of no release on PyPI")
    return layout


def _from_manifest_by_version(elf: ElfFile, version: NcclVersion | None) -> Layout:
    if version is None:
        raise LayoutError("no NCCL version in it")
    machine = elf.architecture
    layout = manifest.load().by_version(version.number, version.cuda, machine) if machine else None
    if layout is None or not layout.has("ncclComm"):
        raise LayoutError(f"NCCL {format_version(version.number)} is not among the known releases")
    # Addresses of another build mean nothing here: only what this binary itself still names.
    return Layout(elf.build_id, version.number, VersionSource.VERSION, layout.structs, layout.enums, dwarf.find_symbols(elf))
