"""Programs between compiler and kernel: relocation, the image's JSON, the sources, what the machine must offer."""

from __future__ import annotations

import base64
import contextlib
import struct
from pathlib import Path
from typing import Any

import pytest

from ncclwatch.errors import PrivilegeError
from ncclwatch.probes.bpf import MapType, relocate
from ncclwatch.probes.image_cache import ImageCache, digest
from ncclwatch.probes.program import Compilation, CompileError, Image, source_folder
from ncclwatch.probes.support import UnsupportedError, check_support, kernel_release

MAP_LOAD, CONSTANT_LOAD, EXIT = 0x18 | 1 << 12, 0x18, 0x95


def load64(opcode: int, value: int) -> bytes:
    return struct.pack("<HHIHHI", opcode, 0, value & 0xFFFFFFFF, 0, 0, value >> 32)


CODE = (
    load64(MAP_LOAD, 3) + load64(CONSTANT_LOAD, 0x6E63636C73697465) + load64(CONSTANT_LOAD, 7) + struct.pack("<HHI", EXIT, 0, 0)
)


def test_maps_become_descriptors_and_constants_values() -> None:
    code = relocate(CODE, {3: 41}, {0x6E63636C73697465: 0x1_0000_0005})
    assert code == load64(MAP_LOAD, 41) + load64(CONSTANT_LOAD, 0x1_0000_0005) + load64(CONSTANT_LOAD, 7) + CODE[-8:]


def test_constants_are_not_taken_for_maps() -> None:
    assert relocate(CODE, {3: 3, 7: 99})[32:48] == load64(CONSTANT_LOAD, 7)


def test_a_missing_map_or_constant_is_an_error() -> None:
    with pytest.raises(KeyError):
        relocate(CODE, {})
    with pytest.raises(ValueError, match="no such constant"):
        relocate(CODE, {3: 1}, {0x1234: 1})


def image_json() -> dict[str, Any]:
    shape = {"name": "events", "type": 27, "key_size": 0, "value_size": 0, "entries": 4096, "flags": 0}
    return {"format": "ncclwatch.bpf-image/1", "maps": [shape], "programs": {"enter": base64.b64encode(CODE).decode()}}


def test_an_image_survives_its_way_from_the_compiler() -> None:
    image = Image.from_json(image_json())
    assert image.programs == {"enter": CODE}
    assert (image.maps[0].name, image.maps[0].kind) == ("events", MapType.RINGBUF)


@pytest.mark.parametrize(
    "damage",
    [{"format": "other/1"}, {"maps": [{}]}, {"maps": [{"name": "x", "type": 999}]}, {"programs": {"x": "!"}}, {"programs": None}],
)
def test_a_damaged_image_is_one_clear_error(damage: dict[str, Any]) -> None:
    with pytest.raises(CompileError, match="install the package again"):
        Image.from_json(image_json() | damage)


def test_the_compilers_words_reach_the_user() -> None:
    with pytest.raises(CompileError, match=r"BCC cannot be imported: install Debian's python3-bpfcc"):
        Image.from_json({"error": "BCC cannot be imported", "hint": "install Debian's python3-bpfcc"})


def test_the_sources_are_found_with_their_header_tree() -> None:
    folder = source_folder()
    assert (folder / "nccl_calls.bpf.c").is_file()
    assert (folder / "headers/include/linux/kconfig.h").is_file()


def test_without_sources_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ncclwatch.probes.program.__file__", str(tmp_path / "a/b/c/program.py"))
    with pytest.raises(CompileError, match="install the package again"):
        source_folder()


def test_an_installed_package_brings_its_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "ncclwatch/_bpf").mkdir(parents=True)
    (tmp_path / "ncclwatch/_bpf/events.h").write_text("")
    monkeypatch.setattr("ncclwatch.probes.program.__file__", str(tmp_path / "ncclwatch/probes/program.py"))
    assert source_folder() == tmp_path / "ncclwatch/_bpf"


@pytest.mark.parametrize(("text", "expected"), [("6.1.0-28-amd64", (6, 1)), ("5.8", (5, 8)), ("nonsense", (0, 0))])
def test_kernel_releases(text: str, expected: tuple[int, int]) -> None:
    assert kernel_release(text) == expected


def test_what_the_machine_lacks_is_one_line() -> None:
    with pytest.raises(UnsupportedError, match="ppc64le: ncclwatch probes x86-64 and aarch64 only; dump"):
        check_support(machine="ppc64le")
    with pytest.raises(UnsupportedError, match=r"kernel 5\.4\.0-generic: it takes kernel 5\.8"):
        check_support(machine="x86_64", release="5.4.0-generic")


def test_missing_privileges_are_a_privilege_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ncclwatch.probes.support._UPROBE_PMU", tmp_path)
    monkeypatch.setattr("ncclwatch.probes.support._has_capabilities", lambda: False)
    with pytest.raises(PrivilegeError, match="run as root"):
        check_support(machine="x86_64", release="6.1.0", euid=1000)
    check_support(machine="x86_64", release="6.1.0", euid=0)


def test_a_kernel_without_uprobes_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("ncclwatch.probes.support._UPROBE_PMU", tmp_path / "none")
    with pytest.raises(UnsupportedError, match="no uprobes"):
        check_support(machine="x86_64", release="6.1.0", euid=0)


def test_images_are_kept_for_the_same_sources_only(tmp_path: Path) -> None:
    folder = tmp_path / "sources"
    (folder / "headers").mkdir(parents=True)
    source, header = folder / "x.bpf.c", folder / "headers/types.h"
    source.write_text("int x;")
    header.write_text("")
    first = digest(source, folder)
    assert digest(source, folder) == first
    header.write_text("typedef int u32;")
    assert digest(source, folder) != first
    cache = ImageCache(tmp_path / "cache")
    assert cache.load(first) is None
    cache.save(first, image_json())
    assert Image.from_json(cache.load(first)).programs == {"enter": CODE}
    assert list(cache.folder.iterdir()) == [cache.folder / f"{first}.json"]


def test_a_cache_that_others_can_write_is_not_trusted(tmp_path: Path) -> None:
    cache = ImageCache(tmp_path / "cache")
    cache.save("a", image_json())
    path = cache.folder / "a.json"
    path.chmod(0o666)
    assert cache.load("a") is None
    path.chmod(0o600)
    cache.folder.chmod(0o777)
    assert cache.load("a") is None
    cache.folder.chmod(0o700)
    path.write_text("{")
    assert cache.load("a") is None
    path.rename(cache.folder / "elsewhere")
    path.symlink_to(cache.folder / "elsewhere")
    assert cache.load("a") is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ImageCache(tmp_path / "file/cache").save("a", {})


def test_nothing_in_the_current_folder_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The compiler runs as root wherever the user happens to be."""
    trap = "import pathlib; pathlib.Path(__file__).with_suffix('.ran').touch()"
    (tmp_path / "bcc.py").write_text(trap)
    (tmp_path / "ncclwatch.py").write_text(trap)
    monkeypatch.chdir(tmp_path)
    # Without privileges or BCC it fails: all the same here.
    with contextlib.suppress(CompileError):
        Compilation(cache=ImageCache(tmp_path / "cache")).result()
    assert list(tmp_path.glob("*.ran")) == []
