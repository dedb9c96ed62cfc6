"""Finding NCCL processes: on a fake /proc for jobs of many shapes, and on real processes of this user."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ncclwatch.errors import ExitStatus, TargetError, TargetGoneError
from ncclwatch.model.state import VersionSource
from ncclwatch.target import binary, discover
from ncclwatch.target.discover import examine, find_processes, inspect_process, layout_of, survey
from ncclwatch.target.elf import ElfFile
from ncclwatch.target.resolve import LayoutCache
from ncclwatch.target.version import NcclVersion, find_version
from unit.fake_proc import FakeProcess, write_proc
from unit.tiny_nccl import BUILD_ID, compile_tiny


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("built")


@pytest.fixture(scope="module")
def library(built: Path) -> Path:
    return compile_tiny(built)


@pytest.fixture(scope="module")
def program(built: Path) -> Path:
    """A program that carries NCCL itself, and sleeps."""
    return compile_tiny(built, "all_reduce_perf", bulk=True, program=True)


@pytest.fixture(scope="module")
def plugin(built: Path) -> Path:
    """A network plugin: named like NCCL, and not NCCL."""
    source = built / "plugin.c"
    source.write_text(
        'extern int ncclAllReduce(void); const char* name = "NCCL version 2.21.5"; int f(void) { return ncclAllReduce(); }'
    )
    output = built / "libnccl-net.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(output), str(source)], check=True)
    return output


def test_what_is_known_of_a_process(tmp_path: Path, library: Path) -> None:
    container = "ab" * 32
    rank = FakeProcess(
        412,
        name="pt_main_thread",
        command=("python", "train.py", ""),
        environ={"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"},
        libraries=[Path("/bin/sh").resolve(), library],
        pids=(412, 17),
        uid=1003,
        cgroup=f"0::/docker/{container}\n",
    )
    proc = write_proc(tmp_path / "proc", [rank])
    (info,) = find_processes(proc)
    assert (info.key.boot_id, info.pid, info.key.start_time) == ("6d1b0a0e-0000-4000-8000-123456789abc", 412, 4711)
    assert info.key.build_id == BUILD_ID
    assert (info.host, info.name, info.command) == (socket.gethostname(), "pt_main_thread", ("python", "train.py", ""))
    assert (info.library, info.version, info.version_source) == (str(library), (2, 21, 5), VersionSource.DEBUG_INFO)
    assert (info.rank, info.local_rank, info.world_size, info.rank_source) == (5, 1, 8, "RANK")
    assert (info.container_id, info.pid_in_target, info.uid, info.statically_linked) == (container, 17, 1003, False)
    assert inspect_process(412, proc) == info


def test_who_carries_nccl_and_who_does_not(tmp_path: Path, library: Path, program: Path, plugin: Path) -> None:
    renamed = tmp_path / "libnccl_pxn.so.2.21.5"
    renamed.write_bytes(library.read_bytes())
    fake_name = tmp_path / "libnccl.so.2"
    fake_name.write_text("this is no library at all")
    shell = Path("/bin/sh").resolve()
    processes = [
        FakeProcess(2, libraries=(), kernel_thread=True, name="kthreadd"),
        FakeProcess(10, libraries=[shell]),
        FakeProcess(11, libraries=[shell, library]),
        FakeProcess(12, libraries=[program]),
        FakeProcess(13, libraries=[plugin]),
        FakeProcess(14, libraries=[plugin, renamed]),
        FakeProcess(15, libraries=[fake_name]),
        FakeProcess(16, libraries=(), state="Z"),
    ]
    proc = write_proc(tmp_path / "proc", processes)
    found = {info.pid: info for info in find_processes(proc)}
    assert sorted(found) == [11, 12, 14]
    assert found[12].statically_linked and found[12].library == str(program) and found[12].version == (2, 21, 5)
    assert not found[14].statically_linked and found[14].library == str(renamed)


def test_stripped_builds_say_how_sure_their_layout_is(tmp_path: Path) -> None:
    known = compile_tiny(tmp_path / "a", strip=True, build_id="0x2e87d0e7f2a98a3fc40945c13c095f8b7e5ef72b")
    by_version = compile_tiny(tmp_path / "b", strip=True)
    unknown = compile_tiny(tmp_path / "c", strip=True, version="none")
    processes = [FakeProcess(pid, libraries=[path]) for pid, path in ((5, known), (6, by_version), (7, unknown))]
    proc = write_proc(tmp_path / "proc", processes)
    # The first has the build id of nvidia-nccl-cu12==2.21.5.
    assert [info.version_source for info in find_processes(proc)] == [
        VersionSource.BUILD_ID,
        VersionSource.VERSION,
        VersionSource.UNKNOWN,
    ]
    layout = layout_of(examine(5, proc), LayoutCache(tmp_path / "cache"))
    assert layout.source is VersionSource.BUILD_ID and layout.size("ncclComm") == 16288


def test_a_file_is_looked_into_once(tmp_path: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proc = write_proc(tmp_path / "proc", [FakeProcess(pid, libraries=[library]) for pid in range(100, 123)])
    looks: list[str] = []

    def counting(elf: ElfFile) -> NcclVersion | None:
        looks.append(elf.name)
        return find_version(elf)

    monkeypatch.setattr(binary, "find_version", counting)
    assert len(find_processes(proc)) == 23
    assert len(find_processes(proc)) == 23
    assert len(looks) == 1


def test_a_file_that_was_rebuilt_is_looked_into_again(tmp_path: Path) -> None:
    path = compile_tiny(tmp_path / "a")
    proc = write_proc(tmp_path / "proc", [FakeProcess(5, libraries=[path])])
    assert [info.version for info in find_processes(proc)] == [(2, 21, 5)]
    path.write_bytes(compile_tiny(tmp_path / "b", version="NCCL version 2.27.5+cuda12.9").read_bytes())
    assert [info.version for info in find_processes(proc)] == [(2, 27, 5)]


def test_processes_that_vanish_or_are_closed_do_not_end_the_survey(tmp_path: Path, library: Path) -> None:
    proc = write_proc(tmp_path / "proc", [FakeProcess(pid, libraries=[library]) for pid in (5, 6, 7, 8)])
    (proc / "5" / "maps").unlink()
    (proc / "6" / "stat").unlink()
    (proc / "7" / "environ").unlink()
    result = survey(proc)
    assert [found.info.pid for found in result.found] == [8]
    assert result.unreadable == 0


SLURM = {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "77"}


def ranks(proc: Path) -> dict[int, int | None]:
    return {info.pid: info.rank for info in find_processes(proc)}


def test_an_inherited_rank_is_nobodys(tmp_path: Path, library: Path) -> None:
    """mp.spawn under srun: one task a node spawns a process a GPU, and all have its SLURM_PROCID."""
    task = FakeProcess(50, environ=SLURM, libraries=[library], command=("python", "train.py"))
    spawned = [
        FakeProcess(pid, parent=50, environ=SLURM, libraries=[library], command=("python", "-c", f"spawn_main({pid})"))
        for pid in range(51, 55)
    ]
    proc = write_proc(tmp_path / "proc", [task, *spawned])
    assert ranks(proc) == dict.fromkeys(range(50, 55))
    info = inspect_process(52, proc)
    assert (info.rank, info.local_rank, info.world_size, info.rank_source) == (None, None, None, "")


def test_workers_of_a_daemon_do_not_have_its_rank(tmp_path: Path, library: Path) -> None:
    """Ray under srun: the daemon carries no NCCL, its workers all have its SLURM_PROCID."""
    workers = [FakeProcess(pid, parent=50, environ=SLURM, libraries=[library], command=("ray::worker",)) for pid in (51, 52)]
    proc = write_proc(tmp_path / "proc", [FakeProcess(50, environ=SLURM), *workers])
    assert ranks(proc) == {51: None, 52: None} and inspect_process(51, proc).rank is None


def test_workers_of_an_inference_server_have_the_rank_of_their_title(tmp_path: Path, library: Path) -> None:
    """SGLang under srun, one task a node: SLURM_PROCID is the node's, and in the environment of all."""
    titles = {51: "sglang::scheduler_TP0_EP0", 52: "sglang::scheduler_TP1_EP1"}
    workers = [FakeProcess(pid, parent=50, environ=SLURM, libraries=[library], command=(title,)) for pid, title in titles.items()]
    proc = write_proc(tmp_path / "proc", [FakeProcess(50, environ=SLURM), *workers])
    assert ranks(proc) == {51: 0, 52: 1}
    info = inspect_process(52, proc)
    assert (info.rank, info.world_size, info.rank_source) == (1, None, "title")


def test_replicas_with_equal_titles_are_told_apart_by_their_communicators(tmp_path: Path, library: Path) -> None:
    workers = [FakeProcess(pid, parent=50, libraries=[library], command=("VLLM::Worker_TP0",)) for pid in (51, 52)]
    proc = write_proc(tmp_path / "proc", [FakeProcess(50), *workers])
    assert ranks(proc) == {51: None, 52: None}


def test_what_torchrun_says_comes_before_a_title(tmp_path: Path, library: Path) -> None:
    environ = {"RANK": "3", "WORLD_SIZE": "4"}
    worker = FakeProcess(51, environ=environ, libraries=[library], command=("ray::Trainer_rank_7.train",))
    assert ranks(write_proc(tmp_path / "proc", [worker])) == {51: 3}


def test_forked_helpers_leave_their_parent_its_rank(tmp_path: Path, library: Path) -> None:
    rank = FakeProcess(50, environ=SLURM, libraries=[library], command=("python", "train.py"))
    workers = [FakeProcess(pid, parent=50, environ=SLURM, libraries=[library], command=rank.command) for pid in (51, 52)]
    helper = FakeProcess(53, parent=51, environ=SLURM, libraries=[library], command=rank.command)
    proc = write_proc(tmp_path / "proc", [rank, *workers, helper])
    assert ranks(proc)[50] == 1
    assert inspect_process(50, proc).rank == 1


def test_a_wrapper_without_nccl_does_not_matter(tmp_path: Path, library: Path) -> None:
    shell = FakeProcess(50, environ=SLURM, libraries=[Path("/bin/sh").resolve()])
    proc = write_proc(tmp_path / "proc", [shell, FakeProcess(51, parent=50, environ=SLURM, libraries=[library])])
    assert ranks(proc) == {51: 1} and inspect_process(51, proc).rank == 1


def test_two_jobs_may_have_the_same_ranks(tmp_path: Path, library: Path) -> None:
    jobs = [{"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": port} for port in ("29500", "29501")]
    processes = [FakeProcess(60 + number, environ=environ, libraries=[library]) for number, environ in enumerate(jobs)]
    assert ranks(write_proc(tmp_path / "proc", processes)) == {60: 0, 61: 0}


def test_unrelated_processes_may_claim_the_same_rank(tmp_path: Path, library: Path) -> None:
    """Two jobs that say nothing else of themselves, by two launchers; and two that init has adopted."""
    environ = {"RANK": "3", "WORLD_SIZE": "4"}
    parents = {60: 40, 61: 41, 62: 1, 63: 1}
    processes = [
        FakeProcess(pid, parent=parent, environ=environ, libraries=[library], command=("python", str(pid)))
        for pid, parent in parents.items()
    ]
    assert ranks(write_proc(tmp_path / "proc", processes)) == dict.fromkeys(parents, 3)


def test_two_nccls_in_one_process(tmp_path: Path, library: Path, program: Path) -> None:
    proc = write_proc(tmp_path / "proc", [FakeProcess(5, libraries=[program, library])])
    found = examine(5, proc)
    assert (found.binary.path, found.info.statically_linked) == (str(library), False), "the library comes first"
    assert [other.path for other in found.others] == [str(program)]


@pytest.mark.parametrize(
    ("process", "reason"),
    [
        (FakeProcess(5, libraries=[Path("/bin/sh").resolve()], name="bash"), r"process 5 \(bash\) has no NCCL loaded"),
        (FakeProcess(5, kernel_thread=True, name="kswapd0"), r"process 5 \(kswapd0\) is a kernel thread"),
        (FakeProcess(5, state="Z"), "is a zombie"),
    ],
)
def test_a_process_without_nccl_is_one_clear_error(tmp_path: Path, process: FakeProcess, reason: str) -> None:
    proc = write_proc(tmp_path / "proc", [process])
    with pytest.raises(TargetError, match=reason) as caught:
        inspect_process(5, proc)
    assert caught.value.status is ExitStatus.TARGET and "ncclwatch ps" in caught.value.hint
    for missing in (6, 0, -3):
        with pytest.raises(TargetGoneError, match=f"no process {missing}"):
            inspect_process(missing, proc)


# --- real processes ----------------------------------------------------------------------------------------------------------


@contextmanager
def running(*command: str, environ: dict[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    child = subprocess.Popen(command, env={**os.environ, **(environ or {})}, stdout=subprocess.PIPE)
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


LOAD = "import ctypes, sys, time; ctypes.CDLL(sys.argv[1]); print('loaded', flush=True); time.sleep(600)"


def test_a_real_process_is_found_and_its_code_is_where_we_say(library: Path, tmp_path: Path) -> None:
    with running(sys.executable, "-c", LOAD, str(library), environ={"RANK": "3", "WORLD_SIZE": "4"}) as child:
        assert child.stdout is not None and child.stdout.readline() == b"loaded\n"
        (info,) = [info for info in find_processes() if info.pid == child.pid]
        assert info.rank == 3 and info.library == str(library) and info.command[-1] == str(library)
        found = examine(child.pid)
        # Network interfaces of the node may come and go between the two.
        assert replace(found.info, traits=None) == replace(info, traits=None)
        layout = layout_of(found, LayoutCache(tmp_path / "cache"))
        assert layout.member("ncclComm.rank").offset == 320
        address, size = layout.symbols["ncclNIbDevs"]
        with Path(f"/proc/{child.pid}/mem").open("rb", buffering=0) as memory:
            memory.seek(address + found.binary.bias)
            assert memory.read(size) == (3).to_bytes(4, "little")
        assert found.binary.base <= address + found.binary.bias < found.binary.end
        with found.binary.open() as elf:
            assert elf.build_id == BUILD_ID
    with pytest.raises(TargetGoneError):
        examine(child.pid)
    with pytest.raises(TargetError):
        found.binary.open()


def test_a_real_program_that_carries_nccl_itself(program: Path, tmp_path: Path) -> None:
    with running(str(program)) as child:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline:
            if any(info.pid == child.pid for info in find_processes()):
                break
            time.sleep(0.02)
        found = examine(child.pid)
        assert found.info.statically_linked and found.info.version == (2, 21, 5)
        with ElfFile.open(program) as elf:
            marker = elf.exported("tinyMarker")
        assert marker is not None
        with Path(f"/proc/{child.pid}/mem").open("rb", buffering=0) as memory:
            memory.seek(marker.address + found.binary.bias)
            assert memory.read(marker.size) == b"tiny constant\0"


def test_a_replaced_file_is_not_taken_for_the_loaded_one(tmp_path: Path) -> None:
    path = compile_tiny(tmp_path / "a")
    with running(sys.executable, "-c", LOAD, str(path)) as child:
        assert child.stdout is not None and child.stdout.readline() == b"loaded\n"
        newer = compile_tiny(tmp_path / "b", build_id="0x" + "77" * 20)
        newer.rename(path)
        try:
            found = examine(child.pid)
        except TargetError as error:
            # Without CAP_SYS_ADMIN the loaded file is out of reach; then the new one must not stand in for it.
            assert "replaced" in error.message or "cannot be opened" in error.message
        else:
            assert found.info.key.build_id == BUILD_ID and found.binary.deleted


def test_a_real_process_without_nccl() -> None:
    with running("sleep", "60") as child, pytest.raises(TargetError, match="has no NCCL loaded"):
        discover.inspect_process(child.pid)
