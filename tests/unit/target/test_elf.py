"""The ELF reader on files that gcc just made, and on damaged ones."""

from __future__ import annotations

import ctypes
import os
import random
import re
import subprocess
from pathlib import Path

import pytest

from ncclwatch.target.elf import ElfError, ElfFile
from ncclwatch.target.maps import read_maps
from ncclwatch.target.version import find_version
from unit.tiny_nccl import BUILD_ID, compile_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_tiny(tmp_path_factory.mktemp("elf"))


@pytest.fixture(scope="module")
def stripped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_tiny(tmp_path_factory.mktemp("stripped"), strip=True, build_id="")


def nm(path: Path, *options: str) -> dict[str, int]:
    """What binutils says: name → address of defined symbols."""
    lines = subprocess.run(["nm", *options, str(path)], check=True, capture_output=True, text=True).stdout.splitlines()
    return {parts[2]: int(parts[0], 16) for line in lines if len(parts := line.split()) == 3}


def test_headers(tiny: Path, stripped: Path) -> None:
    with ElfFile.open(tiny) as elf:
        assert elf.build_id == BUILD_ID
        assert elf.has_debug_info and not elf.is_stripped
        assert elf.machine == 62
        text = elf.section(".text")
        assert text is not None and elf.file_offset(text.address) == text.offset
        assert elf.address_at(text.offset) == text.address
        assert elf.section(".nope") is None
    with ElfFile.open(stripped) as elf:
        assert elf.build_id == "" and elf.is_stripped and not elf.has_debug_info
        assert elf.static_names_size == 0


def test_version_text(tiny: Path, tmp_path: Path) -> None:
    with ElfFile.open(tiny) as elf:
        version = find_version(elf)
    assert version is not None
    assert (version.number, version.suffix, version.cuda, str(version)) == ((2, 21, 5), "+cuda12.4", "12.4", "2.21.5+cuda12.4")
    with ElfFile.open(compile_tiny(tmp_path, version="no version here")) as elf:
        assert find_version(elf) is None


def test_exported_symbols_agree_with_nm(tiny: Path, stripped: Path) -> None:
    for path in (tiny, stripped):
        known = nm(path, "-D", "--defined-only")
        with ElfFile.open(path) as elf:
            for name in ("ncclAllReduce", "pncclAllReduce", "tinyMarker", "ncclNIbDevs"):
                symbol = elf.exported(name)
                assert symbol is not None and symbol.address == known[name], name
            assert elf.exported("ncclAllReduc") is None
            assert elf.exported("sendProxyProgress") is None
            assert set(elf.exports("p?nccl[A-Z][a-z]+[A-Za-z]*")) == {n for n in known if re.fullmatch("p?nccl[A-Z][a-z].*", n)}


def test_constants_are_read_by_address(tiny: Path) -> None:
    with ElfFile.open(tiny) as elf:
        marker = elf.exported("tinyMarker")
        assert marker is not None and not marker.is_function
        assert elf.read_address(marker.address, marker.size) == b"tiny constant\0"
        with pytest.raises(ElfError):
            elf.read_address(1 << 60, 8)


def test_static_functions_are_told_apart_by_source_file(tiny: Path) -> None:
    mangled = "_ZL17sendProxyProgressPv"
    lines = subprocess.run(["nm", str(tiny)], check=True, capture_output=True, text=True).stdout.splitlines()
    addresses = {int(line.split()[0], 16) for line in lines if line.endswith(mangled)}
    with ElfFile.open(tiny) as elf:
        net, collnet = elf.find("sendProxyProgress", "net.cc"), elf.find("sendProxyProgress", "coll_net.cc")
        assert net is not None and collnet is not None
        assert {net.address, collnet.address} == addresses and len(addresses) == 2
        assert (net.name, net.source_file, net.is_function) == (mangled, "net.cc", True)
        # The code differs in the constant it adds: the right one was attributed to the right file.
        assert b"\x01" in elf.read_address(net.address, net.size) and b"\x02" in elf.read_address(collnet.address, collnet.size)
        assert elf.find("sendProxyProgress") is None, "two functions answer to that name"
        assert elf.find("sendProxyProgress", "shm.cc") is None
        assert elf.find("ProxyProgress") is None, "a part of a name is no name"
        devices = elf.find("ncclNIbDevs")
        assert devices is not None and devices.size == 4


def test_stripped_file_still_names_what_it_exports(stripped: Path) -> None:
    with ElfFile.open(stripped) as elf:
        assert elf.find("sendProxyProgress", "net.cc") is None
        assert elf.find("ncclNIbDevs") is not None


def test_load_bias_of_a_library_in_this_process(tiny: Path) -> None:
    library = ctypes.CDLL(str(tiny))
    loaded = ctypes.cast(library.pncclAllReduce, ctypes.c_void_p).value
    with ElfFile.open(tiny) as elf:
        symbol = elf.exported("pncclAllReduce")
        assert symbol is not None
        parts = [m for m in read_maps(os.getpid()) if m.path == str(tiny)]
        assert len(parts) >= 3
        assert {elf.load_bias(part.start, part.offset) for part in parts if part.executable} == {
            loaded - symbol.address if loaded else 0
        }


def test_search_finds_a_text_across_the_border_of_two_reads(tmp_path: Path) -> None:
    assembler = tmp_path / "long.s"
    for shift in range(0, 40, 7):
        assembler.write_text(
            f'.section .rodata\n.fill {(4 << 20) - shift}, 1, 65\n.asciz "NCCL version 2.27.5+cuda12.9"\n.fill 100, 1, 66\n'
        )
        output = tmp_path / f"long{shift}.so"
        subprocess.run(["gcc", "-shared", "-nostdlib", "-o", str(output), str(assembler)], check=True)
        with ElfFile.open(output) as elf:
            version = find_version(elf)
            assert version is not None and version.number == (2, 27, 5), shift
            assert elf.search(re.compile(rb"NCCL version"), 1 << 20) is None, "the limit holds"
        output.unlink()


def test_what_is_no_elf_file_is_refused(tmp_path: Path) -> None:
    for content in (b"", b"\x7fELF", b"#!/bin/sh\n" * 20, b"\x7fELF\x01\x01" + bytes(100)):
        path = tmp_path / "file"
        path.write_bytes(content)
        with pytest.raises(ElfError):
            ElfFile.open(path)
    with pytest.raises(ElfError, match="cannot open"):
        ElfFile.open(tmp_path / "missing")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ElfError):
        ElfFile.open(tmp_path / "pipe")


def exercise(path: Path) -> None:
    """Call everything that reads the file."""
    with ElfFile.open(path) as elf:
        _ = elf.build_id, elf.sections, elf.has_debug_info, elf.is_stripped
        elf.exported("ncclAllReduce")
        elf.find("sendProxyProgress", "net.cc")
        elf.exports("nccl.*")
        elf.load_bias(0x1000, 0)
        find_version(elf)


def test_damaged_files_raise_nothing_but_elf_error(tiny: Path, tmp_path: Path) -> None:
    good = tiny.read_bytes()
    random_numbers = random.Random(20260)
    path = tmp_path / "damaged"
    refused = 0
    for trial in range(150):
        data = bytearray(good)
        if trial % 3 == 0:
            del data[random_numbers.randrange(len(data)) :]
        else:
            # Headers and tables: the first bytes, and the section headers at the end.
            for _ in range(random_numbers.randrange(1, 6)):
                window = random_numbers.choice([(16, 64), (64, 900), (len(data) - 2600, len(data))])
                data[random_numbers.randrange(*window)] = random_numbers.randrange(256)
        path.write_bytes(data)
        try:
            exercise(path)
        except ElfError:
            refused += 1
    assert refused > 50
