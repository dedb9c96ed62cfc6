"""Compile the BPF programs with BCC and write them to standard output; run as ``python -m ncclwatch.probes.compile_child``.

A process of its own, because BCC keeps well over 100 MB once it has compiled. It loads and attaches nothing: it prints the
instructions of every program, with map references as numbers, and the shape of every map, as JSON
(``ncclwatch.bpf-image/1``). When it fails, standard output is a JSON object with ``error`` and ``hint``.
"""

from __future__ import annotations

import base64
import ctypes
import json
import mmap
import os
import re
import sys
from pathlib import Path
from typing import Any

FORMAT = "ncclwatch.bpf-image/1"

_PART = re.compile(r'#include "([\w-]+\.bpf\.h)"')


def main() -> int:
    """Compile the source named by the first argument; the second is the folder of its headers."""
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    os.environ["BCC_KERNEL_SOURCE"] = str(folder / "headers")
    # BCC and clang print to standard output and error as they like: keep our answer apart from it.
    answer = os.dup(1)
    os.dup2(2, 1)
    result = _compile(source, folder)
    with os.fdopen(answer, "w", encoding="ascii") as stream:
        json.dump(result, stream)
    return 1 if "error" in result else 0


def _compile(source: Path, folder: Path) -> dict[str, Any]:
    try:
        import bcc
    except ImportError as error:
        return _failure(f"BCC cannot be imported ({error})")
    if not hasattr(bcc, "BPF"):
        return _failure("the installed module bcc is PyPI's, an unrelated package")
    try:
        module = bcc.BPF(text=flatten(source), cflags=[f"-I{folder}", f"-DNW_PAGE_SIZE={mmap.PAGESIZE}UL"])
    except Exception as error:
        # BCC raises bare Exception for everything; clang's words are already on standard error.
        hint = "run as root" if os.geteuid() else "see ncclwatch doctor"
        return {"error": f"BCC cannot compile {source.name}: {error}", "hint": hint}
    return _image(module, bcc.lib)


def flatten(source: Path) -> str:
    """A source with its parts (``#include "….bpf.h"``, one level) in place: BCC rewrites map accesses in the main file only."""
    lines = source.read_text("utf-8").splitlines(keepends=True)
    parts = ((line, _PART.match(line)) for line in lines)
    return "".join((source.parent / found[1]).read_text("utf-8") if found else line for line, found in parts)


def _failure(reason: str) -> dict[str, Any]:
    return {
        "error": reason,
        "hint": "install Debian's python3-bpfcc and use a virtual environment with --system-site-packages of the system's Python",
    }


def _image(module: Any, lib: Any) -> dict[str, Any]:
    for name in ("bpf_table_key_size_id", "bpf_table_leaf_size_id", "bpf_table_fd_id"):
        getattr(lib, name).argtypes = [ctypes.c_void_p, ctypes.c_ulonglong]
        getattr(lib, name).restype = ctypes.c_size_t
    lib.bpf_num_tables.argtypes = lib.bpf_num_functions.argtypes = [ctypes.c_void_p]
    lib.bpf_table_name.argtypes = [ctypes.c_void_p, ctypes.c_ulonglong]
    lib.bpf_table_name.restype = ctypes.c_char_p
    handle = module.module
    maps, numbers = [], {}
    for index in range(lib.bpf_num_tables(handle)):
        numbers[lib.bpf_table_fd_id(handle, index)] = index
        maps.append(
            {
                "name": lib.bpf_table_name(handle, index).decode(),
                "type": lib.bpf_table_type_id(handle, index),
                "key_size": lib.bpf_table_key_size_id(handle, index),
                "value_size": lib.bpf_table_leaf_size_id(handle, index),
                "entries": lib.bpf_table_max_entries_id(handle, index),
                "flags": lib.bpf_table_flags_id(handle, index),
            }
        )
    programs = {}
    for index in range(lib.bpf_num_functions(handle)):
        name = lib.bpf_function_name(handle, index).decode()
        programs[name] = base64.b64encode(_number_maps(module.dump_func(name), numbers)).decode("ascii")
    return {"format": FORMAT, "maps": maps, "programs": programs}


def _number_maps(instructions: bytes, numbers: dict[int, int]) -> bytes:
    """Replace this process's map descriptors by the maps' numbers."""
    from ncclwatch.probes.bpf import relocate

    return relocate(instructions, numbers)


if __name__ == "__main__":
    sys.exit(main())
