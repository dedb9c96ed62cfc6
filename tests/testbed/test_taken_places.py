"""The place where NCCL takes completions, in the libraries as NVIDIA ships them."""

from __future__ import annotations

import os

from ncclwatch.probes.instructions import CostClass
from ncclwatch.target.elf import ElfFile
from ncclwatch.wire.taken import FUNCTION, taken_site
from testbed.job import cache_folder


def test_each_release_has_one_and_it_is_cheap_to_probe() -> None:
    paths = sorted(cache_folder().glob("*/lib/libnccl.so.2"))
    assert paths
    for path in paths:
        with ElfFile(os.open(path, os.O_RDONLY), str(path)) as elf:
            pieces = elf.symbols(FUNCTION).values()
            sites = [taken_site(elf.read_address(piece.address, piece.size), piece.address) for piece in pieces]
        (site,) = [site for site in sites if site is not None]
        assert site.cost is CostClass.EMULATED, path
        assert not site.first.memory and site.number != site.first
