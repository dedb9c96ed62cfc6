"""The committed manifest of NCCL releases, and how it is put together."""

from __future__ import annotations

import importlib.util
import lzma
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ncclwatch.model.state import VersionSource
from ncclwatch.target import manifest
from ncclwatch.target.layout import Layout, LayoutError, Member, Struct
from ncclwatch.target.machine import Machine
from ncclwatch.target.manifest import Entry, Manifest

CU11 = ("2.18.3", "2.19.3", "2.20.5", "2.21.5")
CU13 = ("2.27.7", "2.28.3", "2.28.7", "2.28.9", "2.29.2", "2.29.3", "2.29.7", "2.30.3", "2.30.4", "2.30.7", "2.31.2", "2.32.3")
CU12 = (
    *("2.18.1", *CU11, "2.22.3", "2.23.4", "2.24.3", "2.25.1", "2.25.1.post1", "2.26.2", "2.26.2.post1", "2.26.5"),
    *("2.27.3", "2.27.5", "2.27.6", *CU13),
)
ARM_CU12 = (
    *("2.20.3", "2.20.5", "2.23.4", "2.24.3", "2.25.1", "2.25.1.post1", "2.26.2", "2.26.2.post1", "2.26.5"),
    *("2.27.3", "2.27.5", "2.27.6", *CU13[:-1]),
)
"""What PyPI has wheels of for aarch64: no 2.21 and 2.22, and nothing for CUDA 11."""
ARM_CU13 = CU13[:-1]
ARM_PACKAGES = [f"nvidia-nccl-{cuda}=={v}" for cuda, versions in (("cu12", ARM_CU12), ("cu13", ARM_CU13)) for v in versions]
PACKAGES = [f"nvidia-nccl-{cuda}=={v}" for cuda, versions in (("cu11", CU11), ("cu12", CU12), ("cu13", CU13)) for v in versions]

# What every reader needs of every release, whatever else comes and goes.
ESSENTIAL = [
    "ncclComm.commHash",
    "ncclComm.rank",
    "ncclComm.nRanks",
    "ncclComm.cudaDev",
    "ncclComm.busId",
    "ncclComm.opCount",
    "ncclComm.peerInfo",
    "ncclComm.asyncResult",
    "ncclComm.abortFlag",
    "ncclComm.proxyState",
    "ncclComm.channels",
    "ncclChannel.ring.prev",
    "ncclChannel.peers",
    "ncclChannelPeer.send",
    "ncclConnector.conn.head",
    "ncclConnInfo.tail",
    "ncclProxyState.progressState",
    "ncclProxyProgressState.active",
    "ncclProxyProgressState.opsPool",
    "ncclProxyArgs.subs",
    "ncclProxyArgs.progress",
    "ncclProxyArgs.state",
    "ncclProxyArgs.next",
    "ncclProxyArgs.nextPeer",
    "ncclProxySubArgs.connection",
    "ncclProxySubArgs.base",
    "ncclProxySubArgs.posted",
    "ncclProxySubArgs.received",
    "ncclProxySubArgs.transmitted",
    "ncclProxySubArgs.done",
    "ncclProxySubArgs.nsteps",
    "ncclProxyOp.opCount",
    "ncclProxyOp.next",
    "ncclProxyOpsPool.ops",
    "ncclProxyOpsPool.nextOps",
    "ncclProxyConnection.transport",
    "ncclProxyConnection.transportResources",
    "sendNetResources.recvMem",
    "recvNetResources.netDev",
    "shmSendResources.hostMem",
    "shmRecvResources.hostMem",
    "ncclRecvMem.tail",
    "ncclSendMem.head",
    "ncclPeerInfo.hostHash",
    "ncclTransportComm.proxyProgress",
    "ncclNet_t.name",
]


@pytest.fixture(scope="module")
def known() -> Manifest:
    return manifest.load()


def test_every_release_is_there_once(known: Manifest) -> None:
    for machine, packages, builds in ((Machine.X86_64, PACKAGES, 44), (Machine.AARCH64, ARM_PACKAGES, 34)):
        found = [build for build in known.builds if build.machine is machine]
        assert sorted(package for build in found for package in build.packages) == sorted(packages)
        assert len(found) == builds
    assert len({build.build_id for build in known.builds}) == len(known.builds)
    for build in known.builds:
        assert build.packages[0].partition("==")[2].startswith(".".join(map(str, build.version)))
        assert build.cuda.split(".")[0] == build.packages[0][len("nvidia-nccl-cu") :][:2]


def test_data_file_is_small() -> None:
    data = resources.files("ncclwatch.target").joinpath("data").joinpath(manifest.FILE_NAME).read_bytes()
    assert len(data) < 100_000
    assert lzma.decompress(data).startswith(b"{")


@pytest.mark.parametrize(
    ("machine", "package"),
    [(m, package) for m, names in ((Machine.X86_64, PACKAGES), (Machine.AARCH64, ARM_PACKAGES)) for package in names],
)
def test_every_build_has_what_is_needed_to_read_it(known: Manifest, machine: Machine, package: str) -> None:
    (build,) = [build for build in known.builds if package in build.packages and build.machine is machine]
    layout = known.by_build_id(build.build_id)
    assert layout is not None and layout.source is VersionSource.BUILD_ID and layout.version == build.version
    assert [path for path in ESSENTIAL if not layout.has(path)] == []
    has_magics = layout.has("ncclComm.startMagic") and layout.has("ncclComm.endMagic")
    assert has_magics == (build.version >= (2, 21, 0))
    if has_magics:
        assert layout.member("ncclComm.startMagic").offset == 0
        assert layout.member("ncclComm.endMagic").end == layout.size("ncclComm")
    assert layout.has("ncclComm.seqNumber") == (build.version >= (2, 23, 0)), "counters by collective"
    assert ("ncclComms" in layout.symbols) == (build.version >= (2, 24, 0)), "the list that RAS keeps"
    assert {"net.cc:sendProxyProgress", "net.cc:recvProxyProgress", "coll_net.cc:sendProxyProgress"} <= set(layout.symbols)
    assert layout.symbols["net.cc:sendProxyProgress"] != layout.symbols["coll_net.cc:sendProxyProgress"]
    assert layout.enums["ncclProxyOpState"] == {0: "ncclProxyOpNone", 1: "ncclProxyOpReady", 2: "ncclProxyOpProgress"}
    assert layout.enum_name("ncclFunc_t", 4) == "ncclFuncAllReduce"
    assert layout.member("ncclComm.channels").stride == layout.size("ncclChannel")
    assert layout.member("ncclProxyArgs.subs").stride == layout.size("ncclProxySubArgs")


@pytest.mark.parametrize(
    ("package", "size"),
    [("nvidia-nccl-cu12==2.21.5", 16288), ("nvidia-nccl-cu12==2.27.5", 1080320), ("nvidia-nccl-cu12==2.32.3", 1196536)],
)
def test_known_sizes(known: Manifest, package: str, size: int) -> None:
    # Measured with drgn on the wheels, apart from the code that made the manifest.
    (build,) = [build for build in known.builds if package in build.packages and build.machine is Machine.X86_64]
    layout = known.by_build_id(build.build_id)
    assert layout is not None and layout.size("ncclComm") == size


def test_structures_of_aarch64_are_their_own(known: Manifest) -> None:
    """The C library's mutex takes 48 bytes there, 40 on x86-64."""
    ours, theirs = known.by_version((2, 29, 2), "12.9"), known.by_version((2, 29, 2), "12.9", Machine.AARCH64)
    assert ours is not None and theirs is not None
    assert (ours.size("ncclComm"), theirs.size("ncclComm")) == (1084808, 1084816)
    assert (ours.size("ibv_qp"), theirs.size("ibv_qp")) == (160, 168)


def test_version_match_prefers_the_same_cuda(known: Manifest) -> None:
    old, new = known.by_version((2, 21, 5), "11.0"), known.by_version((2, 21, 5), "12.4")
    assert old is not None and new is not None
    assert old.size("ncclComm") != new.size("ncclComm"), "NVLS came with CUDA 12.1"
    assert new.source is VersionSource.VERSION and new.symbols == {} and new.build_id == ""
    near = known.by_version((2, 21, 5), "12.6")
    assert near is not None and near.size("ncclComm") == new.size("ncclComm")


def test_version_match_leaves_out_what_differs_between_builds(known: Manifest) -> None:
    unsure = known.by_version((2, 21, 5))
    assert unsure is not None
    assert not unsure.has("ncclComm") and not unsure.has("ncclTasks")
    assert unsure.has("ncclProxyArgs.subs") and unsure.has("sendNetResources.recvMem")


def test_unknown_builds(known: Manifest) -> None:
    assert known.by_version((2, 26, 3)) is None
    assert known.by_build_id("") is None and known.by_build_id("00" * 20) is None


def example(build_id: str, size: int) -> Layout:
    structs = {
        "ncclComm": Struct("ncclComm", size, {"rank": Member("rank", size - 4, 4, "int", "int", 1, 4)}),
        "ncclRing": Struct("ncclRing", 8, {"prev": Member("prev", 0, 4, "int", "int", 1, 4)}),
    }
    return Layout(build_id, (2, 99, 1), VersionSource.DEBUG_INFO, structs, {"e": {1: "one"}}, {"f": (size, 4)})


def test_equal_structures_are_kept_once() -> None:
    entries = [
        Entry(example("aa", 16), "12.1", "a==1"),
        Entry(example("bb", 24), "13.0", "b==1"),
        Entry(example("aa", 16), "12.1", "c==1"),
    ]
    data = manifest.build_manifest(entries)
    assert len(data["structs"]) == 3 and len(data["enums"]) == 1 and len(data["builds"]) == 2
    made = Manifest(data)
    assert made.builds[0].packages == ("a==1", "c==1")
    first, second = made.by_build_id("aa"), made.by_build_id("bb")
    assert first is not None and second is not None
    assert first.structs == example("aa", 16).structs and second.structs == example("bb", 24).structs
    assert second.symbols == {"f": (24, 4)} and second.enums == {"e": {1: "one"}}
    assert manifest.compress(data) == manifest.compress(manifest.build_manifest(entries)), "the same input, the same bytes"


def test_a_version_is_matched_for_its_architecture_only() -> None:
    """The C library's mutex is larger on aarch64, so nearly every structure differs."""
    entries = [Entry(example("aa", 16), "12.1", "a==1"), Entry(example("bb", 24), "12.1", "a==1", Machine.AARCH64)]
    made = Manifest(manifest.build_manifest(entries))
    ours, other = made.by_version((2, 99, 1), "12.1"), made.by_version((2, 99, 1), "12.1", Machine.AARCH64)
    assert ours is not None and other is not None
    assert (ours.size("ncclComm"), other.size("ncclComm")) == (16, 24)
    assert [entry.machine for entry in made.entries()] == [Machine.X86_64, Machine.AARCH64]


def test_a_build_without_identity_is_not_taken() -> None:
    with pytest.raises(LayoutError, match="no build id"):
        manifest.build_manifest([Entry(example("", 16), "12.1", "a==1")])


@pytest.mark.parametrize(
    "data", [None, [], {}, {"format": "other"}, {"format": manifest.FORMAT, "structs": [], "enums": [], "builds": [{}]}]
)
def test_damaged_data_is_a_layout_error(data: Any) -> None:
    with pytest.raises(LayoutError):
        Manifest(data)


@pytest.fixture(scope="module")
def script() -> ModuleType:
    path = Path(__file__).parents[3] / "scripts" / "make_layout_manifest.py"
    spec = importlib.util.spec_from_file_location("make_layout_manifest", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_script_orders_versions_as_released(script: ModuleType) -> None:
    versions = ["2.9.1", "2.18.1", "2.26.2.post1", "2.26.2", "2.26.5", "2.18.3", "2.32.3"]
    assert sorted(versions, key=script.numbers) == ["2.9.1", "2.18.1", "2.18.3", "2.26.2", "2.26.2.post1", "2.26.5", "2.32.3"]
    assert script.MEMBER.fullmatch("nvidia/nccl/lib/libnccl.so.2") and not script.MEMBER.fullmatch(
        "nvidia/nccl/lib/libnccl_static.a"
    )
