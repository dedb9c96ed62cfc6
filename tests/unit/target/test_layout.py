"""Layouts: asking them, their JSON form, and reading them from debug information that gcc just wrote."""

from __future__ import annotations

import copy
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.model.state import VersionSource
from ncclwatch.target import dwarf, resolve
from ncclwatch.target.elf import ElfFile
from ncclwatch.target.layout import Layout, LayoutError, Member, MissingMemberError, Struct
from ncclwatch.target.resolve import LayoutCache, resolve_layout
from unit.tiny_nccl import BUILD_ID, compile_tiny


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_tiny(tmp_path_factory.mktemp("layout"))


@pytest.fixture(scope="module")
def layout(tiny: Path) -> Layout:
    with ElfFile.open(tiny) as elf:
        return dwarf.extract(elf, (2, 21, 5))


def test_members_lie_where_the_compiler_says(layout: Layout) -> None:
    # The source asserts the same numbers with offsetof.
    assert (layout.size("ncclChannel"), layout.size("ncclRecvMem")) == (64, 4096)
    assert layout.member("ncclComm.rank") == Member("rank", 320, 4, "int", "int", 1, 4)
    assert layout.member("ncclComm.aborted").kind == "bool"
    assert layout.member("ncclComm.counter") == Member("counter", 376, 4, "uint", "atomic<unsigned int>", 1, 4)
    assert layout.member("ncclComm.endMagic").offset == 424
    assert layout.member("ncclComm.callback").type_name == "function"


def test_paths_lead_through_embedded_structures_and_arrays(layout: Layout) -> None:
    assert layout.member("ncclComm.channels") == Member("channels", 64, 256, "array", "ncclChannel", 4, 64, "struct")
    assert layout.member("ncclComm.channels").at(3) == 64 + 3 * 64
    assert layout.member("ncclComm.channels[3]").kind == "struct"
    assert layout.member("ncclComm.channels[3].ring.next").offset == 64 + 3 * 64 + 8 + 4
    assert layout.member("ncclComm.config.commName").type_name == "char"
    assert layout.member("ncclComm.offsets.buffs[1]") == Member("buffs[1]", 408, 4, "uint", "uint32_t", 1, 4)
    assert layout.member("ncclComm.latencies") == Member("latencies", 336, 24, "array", "float", 6, 4, "float")


def test_anonymous_members_belong_to_the_structure(layout: Layout) -> None:
    assert layout.member("ncclRecvMem.tail").offset == 0
    assert layout.member("ncclRecvMem.connFifo[7].size").offset == 128 + 7 * 24 + 8
    assert layout.member("ncclRecvMem.pad4").offset == 0


def test_pointers_enumerations_and_bit_fields(layout: Layout) -> None:
    assert layout.member("ncclComm.proxyState") == Member("proxyState", 416, 8, "pointer", "ncclProxyState", 1, 8)
    assert layout.member("ncclComm.siblings").type_name == "ncclComm*"
    assert layout.member("ncclComm.asyncResult").kind == "enum"
    assert layout.member("ncclComm.asyncResult").type_name == "ncclResult_t"
    assert layout.member("ncclComm.func").size == 1
    assert layout.enum_name("ncclResult_t", 7) == "ncclInProgress"
    assert layout.enum_name("ncclResult_t", 5) == "5" and layout.enum_name("nope", 5) == "5"
    assert layout.enum_name("ncclFunc_t", 1) == "ncclFuncReduce", "the first of two names for one number"
    algorithm = layout.member("ncclTaskColl.algorithm")
    assert (algorithm.offset, algorithm.size, algorithm.bit_offset, algorithm.bit_size) == (8, 4, 8, 8)
    nvls, function = layout.member("ncclTaskColl.isNvls"), layout.member("ncclTaskColl.devFuncId")
    assert (nvls.kind, nvls.offset, nvls.bit_offset, nvls.bit_size) == ("uint", 8, 16, 1)
    assert (function.offset, function.bit_offset, function.bit_size) == (12, 0, 31)


def test_structures_of_one_name_are_told_apart_by_source_file(layout: Layout) -> None:
    assert layout.member("sendNetResources.netDev").offset == 0
    assert layout.member("coll_net.cc:sendResources.netDev").offset == 8


def test_symbols(layout: Layout, tiny: Path) -> None:
    with ElfFile.open(tiny) as elf:
        for name in ("net.cc:sendProxyProgress", "coll_net.cc:sendProxyProgress", "ncclComms", "ncclNIbDevs"):
            symbol = elf.find(name.rpartition(":")[2], name.rpartition(":")[0])
            assert symbol is not None and layout.symbols[name] == (symbol.address, symbol.size)
    assert "netTransport" not in layout.symbols


@pytest.mark.parametrize(
    ("path", "missing"),
    [
        ("ncclComm.seqNumber", "ncclComm.seqNumber"),
        ("ncclComm.channels[4].ring", "channels[4]"),
        ("ncclComm.rank[0]", "rank[0]"),
        ("ncclComm.proxyState.stop", "structure at ncclComm.proxyState"),
        ("ncclComm.channels.ring", "structure at ncclComm.channels"),
        ("ncclProxyState.stop", "structure ncclProxyState"),
        ("ncclComm", "member path 'ncclComm'"),
        ("ncclComm.", "ncclComm."),
        ("ncclComm.rank; x", "ncclComm.rank; x"),
        ("coll_net.cc:sendResources.step", "coll_net.cc:sendResources.step"),
    ],
)
def test_a_missing_member_names_path_and_version(layout: Layout, path: str, missing: str) -> None:
    with pytest.raises(MissingMemberError, match=re.escape(missing)) as caught:
        layout.member(path)
    assert caught.value.path == path and "2.21.5" in caught.value.message
    assert "." not in path or not layout.has(path)


def test_has(layout: Layout) -> None:
    assert layout.has("ncclRing") and layout.has("ncclRing.prev") and layout.has("ncclComm.channels[0].ring.prev")
    assert not layout.has("ncclTree") and not layout.has("ncclTree.up")


def test_json_round_trip(layout: Layout) -> None:
    again = Layout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again.structs == layout.structs and again.enums == layout.enums and again.symbols == layout.symbols
    assert (again.build_id, again.version, again.source) == (BUILD_ID, (2, 21, 5), VersionSource.DEBUG_INFO)


def set_at(*path: Any, to: Any) -> Callable[[Any], Any]:
    def change(data: Any) -> Any:
        inner = data
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = to
        return data

    return change


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: [],
        lambda data: None,
        lambda data: {k: v for k, v in data.items() if k != "structs"},
        set_at("format", to="ncclwatch.layout/0"),
        set_at("version", to=[2, 21]),
        set_at("version", to="2.21.5"),
        set_at("source", to="guess"),
        set_at("structs", "ncclRing", 0, to=-1),
        set_at("structs", "ncclRing", 0, to=4),
        set_at("structs", "ncclRing", 0, to=1 << 40),
        set_at("structs", "ncclRing", 1, 0, 1, to=-8),
        set_at("structs", "ncclRing", 1, 0, 2, to=1 << 20),
        set_at("structs", "ncclRing", 1, 0, 3, to="quantum"),
        set_at("structs", "ncclRing", 1, 0, to=["prev", 0]),
        set_at("structs", "ncclComm", 1, 1, 5, to=1 << 30),
        set_at("symbols", "ncclComms", to=[1]),
        set_at("enums", "ncclResult_t", to=[["x", "y"]]),
    ],
)
def test_damaged_json_is_a_layout_error(layout: Layout, damage: Callable[[Any], Any]) -> None:
    data = copy.deepcopy(layout.to_json())
    with pytest.raises(LayoutError):
        Layout.from_json(damage(data))


def test_symbols_do_not_outlive_their_build(layout: Layout) -> None:
    assert layout.with_source(VersionSource.BUILD_ID).symbols == layout.symbols
    other = layout.with_source(VersionSource.VERSION, build_id="ff")
    assert (other.symbols, other.build_id, other.structs) == ({}, "ff", layout.structs)


# --- from a file to its layout -----------------------------------------------------------------------------------------------


def test_cache_spares_the_second_extraction(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = LayoutCache(tmp_path / "cache")
    with ElfFile.open(tiny) as elf:
        first = resolve_layout(elf, cache=cache)
        assert (first.source, first.version, first.build_id) == (VersionSource.DEBUG_INFO, (2, 21, 5), BUILD_ID)
        monkeypatch.setattr(dwarf, "extract", lambda *_: pytest.fail("extracted again"))
        assert resolve_layout(elf, cache=cache).structs == first.structs
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700
    (file,) = (tmp_path / "cache").iterdir()
    assert file.stat().st_mode & 0o077 == 0


def test_cache_that_cannot_be_trusted_is_ignored(tiny: Path, layout: Layout, tmp_path: Path) -> None:
    cache = LayoutCache(tmp_path / "cache")
    size = tiny.stat().st_size
    cache.save(layout, size)
    (file,) = (tmp_path / "cache").iterdir()
    good = file.read_bytes()
    assert cache.load(BUILD_ID, size) is not None
    assert cache.load(BUILD_ID, size + 1) is None and cache.load("ff" * 20, size) is None
    for content in (b"", b"{", b"[]", good[:-5], b"[" * 100000, good.replace(BUILD_ID.encode(), b"f" * 40)):
        file.write_bytes(content)
        assert cache.load(BUILD_ID, size) is None
    file.write_bytes(good)
    file.chmod(0o666)
    assert cache.load(BUILD_ID, size) is None, "anybody could have written it"
    file.rename(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").chmod(0o600)
    file.symlink_to(tmp_path / "elsewhere")
    assert cache.load(BUILD_ID, size) is None, "a link may lead anywhere"


def test_cache_in_a_folder_that_others_may_write_is_not_used(layout: Layout, tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    LayoutCache(folder).save(layout, 1)
    assert list(folder.iterdir()) == []


def test_cache_that_cannot_be_written_is_no_error(layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    LayoutCache(tmp_path / "file" / "below").save(layout, 1)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert LayoutCache().folder == tmp_path / "ncclwatch" / "layouts"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert LayoutCache().folder == Path("/home/somebody/.cache/ncclwatch/layouts")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert LayoutCache().folder.parts[-2:] == ("ncclwatch", "layouts")


def test_separate_debug_information(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = compile_tiny(tmp_path)
    stripped = tmp_path / "stripped.so"
    debug = tmp_path / "debug" / BUILD_ID[:2] / f"{BUILD_ID[2:]}.debug"
    debug.parent.mkdir(parents=True)
    os.system(f"objcopy --only-keep-debug {whole} {debug} && strip -o {stripped} {whole}")  # noqa: S605 - names of our own
    monkeypatch.setattr(resolve, "DEBUG_FOLDER", tmp_path / "debug")
    with ElfFile.open(stripped) as elf:
        found = resolve_layout(elf, cache=LayoutCache(tmp_path / "cache"))
    assert found.source is VersionSource.DEBUG_INFO
    assert found.member("ncclComm.rank").offset == 320 and "net.cc:sendProxyProgress" in found.symbols


def test_stripped_build_of_a_known_version_is_matched_by_version(tmp_path: Path) -> None:
    with ElfFile.open(compile_tiny(tmp_path, strip=True)) as elf:
        found = resolve_layout(elf, cache=LayoutCache(tmp_path / "cache"))
        exported = elf.exported("ncclNIbDevs")
    assert (found.source, found.version, found.build_id) == (VersionSource.VERSION, (2, 21, 5), BUILD_ID)
    assert found.size("ncclComm") == 16288, "the release's structure, not the stand-in's"
    # Only what this very binary still names has an address.
    assert exported is not None and found.symbols["ncclNIbDevs"] == (exported.address, exported.size)
    assert "net.cc:sendProxyProgress" not in found.symbols and "netTransport" not in found.symbols


@pytest.mark.parametrize(
    ("version", "reason"), [("NCCL version 3.99.0+cuda20.1", "NCCL 3.99.0 is not among"), ("nothing", "no NCCL version in it")]
)
def test_an_unknown_build_is_one_clear_error(tmp_path: Path, version: str, reason: str) -> None:
    path = compile_tiny(tmp_path, strip=True, version=version)
    with ElfFile.open(path) as elf, pytest.raises(LayoutError) as caught:
        resolve_layout(elf, cache=LayoutCache(tmp_path / "cache"))
    assert reason in caught.value.message and "no debug information in it" in caught.value.message
    assert BUILD_ID in caught.value.message and caught.value.hint and "\n" not in str(caught.value)


def test_damaged_debug_information_is_a_layout_error_or_a_layout(tiny: Path, tmp_path: Path) -> None:
    """drgn runs in a child: whatever damaged DWARF does to it, the parent gets a layout or one clear error."""
    with ElfFile.open(tiny) as elf:
        info, abbreviations = elf.section(".debug_info"), elf.section(".debug_abbrev")
    assert info is not None and abbreviations is not None
    good = tiny.read_bytes()
    numbers = random.Random(7)
    refused = 0
    for trial in range(8):
        data = bytearray(good)
        section = (info, abbreviations)[trial % 2]
        for _ in range(1 + trial * 40):
            data[section.offset + numbers.randrange(section.size)] = numbers.randrange(256)
        path = tmp_path / "damaged"
        path.write_bytes(data)
        with ElfFile.open(path) as elf:
            try:
                dwarf.extract(elf, None)
            except LayoutError as error:
                refused += 1
                assert "\n" not in str(error)
    assert refused >= 3


def test_debug_information_of_something_else(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("struct other { int a; } x; int f(void) { return x.a; }")
    os.system(f"gcc -g -shared -fPIC -o {tmp_path}/a.so {tmp_path}/a.c")  # noqa: S605 - names of our own
    with ElfFile.open(tmp_path / "a.so") as elf, pytest.raises(LayoutError, match="does not describe NCCL"):
        dwarf.extract(elf, None)


def test_member_bounds() -> None:
    member = Member("a", 8, 12, "array", "int", 3, 4, "int")
    assert [member.at(index) for index in range(3)] == [8, 12, 16] and member.end == 20
    for index in (-1, 3):
        with pytest.raises(IndexError):
            member.at(index)
    assert Struct("s", 20, {"a": member}).members["a"] is member
