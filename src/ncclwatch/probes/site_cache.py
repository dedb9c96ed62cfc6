"""Sites of a file without a disassembler in the agent's memory: a child looks for them once a build, and the answer is kept.

capstone takes 6 MiB for as long as the agent lives, and is asked once. Run as ``python -m`` with the number of an open file
this is the child: it prints the sites as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ncclwatch.model.events import Function
from ncclwatch.probes.functions import FUNCTIONS
from ncclwatch.probes.image_cache import ImageCache, release
from ncclwatch.probes.instructions import CostClass
from ncclwatch.probes.map_layouts import SiteKind
from ncclwatch.probes.sites import FunctionSites, ProbeSite, find_sites
from ncclwatch.target.elf import ElfFile

TIMEOUT_S = 60


def sites_of(
    elf: ElfFile, functions: Iterable[Function] | None = None, cache: ImageCache | None = None
) -> tuple[FunctionSites, ...]:
    """As :func:`ncclwatch.probes.sites.find_sites`, from ``cache`` (the user's, unless another is given) or by a child.

    Where neither answers, this process looks itself, and raises what is wrong with the file.
    """
    cache = cache or ImageCache()
    name = _name(elf)
    found = _from_json(cache.load(name)) if name else None
    if found is None:
        data = _ask_child(elf)
        found = _from_json(data)
        if found is None:
            return find_sites(elf, functions)
        if name:
            cache.save(name, data)
    wanted = set(FUNCTIONS if functions is None else functions)
    return tuple(sites for sites in found if sites.function in wanted)


def _name(elf: ElfFile) -> str:
    """What the sites depend on: the build, our own code and the disassembler; ``""`` for a file that does not say its build."""
    if not elf.build_id:
        return ""
    hasher = hashlib.sha256(release("capstone").encode())
    for name in ("functions.py", "sites.py"):
        hasher.update(Path(__file__).with_name(name).read_bytes())
    return f"sites-{elf.build_id}-{os.fstat(elf.fd).st_size}-{hasher.hexdigest()[:16]}"


def _ask_child(elf: ElfFile) -> Any:
    # -P: the current folder may be anybody's, and nothing in it shall be imported as root.
    command = [sys.executable, "-P", "-m", "ncclwatch.probes.site_cache", str(elf.fd)]
    try:
        done = subprocess.run(command, pass_fds=[elf.fd], capture_output=True, timeout=TIMEOUT_S, check=True)
        return json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None


def to_json(found: Iterable[FunctionSites]) -> list[Any]:
    """Sites as plain JSON data."""
    return [[f.function.value, f.symbol, f.problem, *(_site_to_json(site) for site in (f.entry, *f.returns))] for f in found]


def _site_to_json(site: ProbeSite) -> list[Any]:
    return [site.kind.value, site.address, site.offset, site.instruction, site.code.hex(), site.cost.value]


def _from_json(data: Any) -> tuple[FunctionSites, ...] | None:
    """The inverse of :func:`to_json`; ``None`` for what is no such data."""
    try:
        return tuple(_function_sites(Function(number), *rest) for number, *rest in data)
    except (TypeError, ValueError, KeyError):
        return None


def _function_sites(function: Function, symbol: str, problem: str, *rows: Any) -> FunctionSites:
    entry, *returns = (
        ProbeSite(function, symbol, SiteKind(kind), int(address), int(offset), text, bytes.fromhex(code), CostClass(cost))
        for kind, address, offset, text, code, cost in rows
    )
    return FunctionSites(function, symbol, entry, tuple(returns), problem)


def main() -> None:
    """Be the child."""
    with ElfFile.open(f"/proc/self/fd/{int(sys.argv[1])}") as elf:
        print(json.dumps(to_json(find_sites(elf))))


if __name__ == "__main__":
    main()
