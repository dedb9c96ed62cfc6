"""A history on an object store: whole days are copied there, and it is read there, by what pyarrow's file systems can reach."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

from ncclwatch.errors import UsageError
from ncclwatch.history import files
from ncclwatch.text import clean


def is_remote(where: str) -> bool:
    """Whether it is an address (``s3://bucket/history``) and no folder of this machine."""
    return "://" in where


def shown(where: str) -> str:
    """It for people, without the key that an address may hold."""
    return clean(re.sub(r"//[^/@]*@", "//…@", where))


def file_system(where: str) -> tuple[Any, str]:
    """(file system, path on it) of a folder or an address. Raises ``UsageError`` for what is no address of a store."""
    import pyarrow as pa
    from pyarrow import fs

    if not is_remote(where):
        return fs.LocalFileSystem(), str(Path(where).absolute())
    try:
        system, path = fs.FileSystem.from_uri(where)
    except (pa.ArrowException, OSError, ValueError, ImportError) as error:
        raise UsageError(f"{shown(where)} cannot be used: {clean(str(error))}", "write it like s3://BUCKET/PATH") from None
    return system, path


def copy_days(root: Path, store: str) -> tuple[int, str]:
    """Copy what is of days that are over and not there yet: how many files, and what failed, to be tried again next time.

    A file becomes visible there when it is whole (an object is).
    """
    import pyarrow as pa
    from pyarrow import fs

    today, copied = files.day_of(time.time_ns()), 0
    try:
        system, base = file_system(store)
        for _, day, folder in files.folders(root):
            if day >= today:
                continue
            relative = folder.relative_to(root).as_posix()
            there = system.get_file_info(fs.FileSelector(f"{base}/{relative}", allow_not_found=True))
            known = {one.base_name for one in there}
            for path in files.parquets(folder):
                if path.name not in known:
                    _copy(path, system, f"{base}/{relative}", path.name)
                    copied += 1
    except (OSError, pa.ArrowException, UsageError) as error:
        return copied, f"{shown(store)}: {clean(str(error))}"
    return copied, ""


def _copy(path: Path, system: Any, folder: str, name: str) -> None:
    system.create_dir(folder, recursive=True)
    # On a file system that shows what is half written nobody takes it for whole by this name.
    working = f"{folder}/.{name}.part" if type(system).__name__ == "LocalFileSystem" else f"{folder}/{name}"
    with path.open("rb") as source, system.open_output_stream(working) as target:
        while part := source.read(8 << 20):
            target.write(part)
    if not working.endswith(name):
        system.move(working, f"{folder}/{name}")
