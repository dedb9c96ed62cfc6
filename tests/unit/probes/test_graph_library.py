"""Which file of a process launches its CUDA graphs."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from ncclwatch.model.events import Function
from ncclwatch.probes.functions import FUNCTIONS, GRAPHS
from ncclwatch.probes.graph_library import graph_library
from ncclwatch.probes.map_layouts import SiteKind
from ncclwatch.probes.sites import find_sites
from ncclwatch.target.elf import ElfFile

SOURCE = """
int cuGraphLaunch(void *e, void *s) { return e == s; }
int cuGraphLaunch_ptsz(void *e, void *s) { return e != s; }
int cudaGraphLaunch(void *e, void *s) { return e < s; }
int cudaStreamEndCapture(void *s, void **g) { *g = s; return 0; }
int cudaGraphInstantiateWithFlags(void **e, void *g, unsigned long long f) { *e = g; return f != 0; }
int cudaGraphExecDestroy(void *e) { return e == 0; }
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is missing")
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "cuda.c").write_text(SOURCE)
    made = folder / "cuda.so"
    subprocess.run(["gcc", "-O1", "-fPIC", "-shared", str(folder / "cuda.c"), "-o", str(made)], check=True)
    return made


def process(tmp_path: Path, library: Path, *names: str) -> Path:
    """A /proc with one process, 7, that maps copies of the library under these names."""
    (tmp_path / "7").mkdir()
    (tmp_path / "7/root").symlink_to("/")
    lines = []
    for number, name in enumerate(names):
        copy = tmp_path / name
        shutil.copy(library, copy)
        status = copy.stat()
        begin = 0x10000 * (number + 1)
        lines.append(f"{begin:x}-{begin + 0x1000:x} r-xp 00000000 fe:01 {status.st_ino} {copy}\n")
    (tmp_path / "7/maps").write_text("".join(lines))
    return tmp_path


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["libcuda.so.1", "libcudart.so.12"], "libcudart.so.12"),
        (["libcuda.so.550.54", "libcudart-9d2bcf08.so.11.0"], "libcudart-9d2bcf08.so.11.0"),
        (["libcuda.so.550.54"], "libcuda.so.550.54"),
        (["libcudadebugger.so.1", "libcudnn.so.9"], None),
    ],
)
def test_the_shared_runtime_else_the_driver_so_that_a_launch_counts_once(
    tmp_path: Path, library: Path, names: list[str], chosen: str | None
) -> None:
    found = graph_library(7, process(tmp_path, library, *names))
    if chosen is None:
        assert found is None
        return
    assert found is not None
    assert Path(found[0]).resolve() == tmp_path / chosen
    assert found[1] == ((tmp_path / chosen).stat().st_dev, (tmp_path / chosen).stat().st_ino)


def test_functions_of_runtime_and_driver_are_found_with_what_they_make(library: Path) -> None:
    with ElfFile.open(library) as elf:
        found = {sites.symbol: sites for sites in find_sites(elf)}
    assert {name: sites.function for name, sites in found.items()} == {
        "cudaGraphLaunch": Function.GRAPH_LAUNCH,
        "cuGraphLaunch": Function.GRAPH_LAUNCH,
        "cuGraphLaunch_ptsz": Function.GRAPH_LAUNCH,
        "cudaStreamEndCapture": Function.STREAM_END_CAPTURE,
        "cudaGraphInstantiateWithFlags": Function.GRAPH_INSTANTIATE,
    }
    assert [site.kind for site in found["cudaStreamEndCapture"].returns] == [SiteKind.LEAVE]
    told = {function for function in GRAPHS if FUNCTIONS[function].tells_on_return}
    assert told == {Function.STREAM_END_CAPTURE, Function.GRAPH_INSTANTIATE}
    assert not any(FUNCTIONS[function].can_block for function in GRAPHS)
