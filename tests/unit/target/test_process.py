"""What /proc says about a process: on a fake tree for the odd cases, on real processes for the rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ncclwatch.errors import TargetGoneError
from ncclwatch.target import process
from ncclwatch.target.namespaces import container_id, namespace_id, open_below
from ncclwatch.target.process import Ranks, ranks_from_environ
from unit.fake_proc import FakeProcess, write_proc

ID = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4


def test_stat_with_a_name_that_looks_like_fields(tmp_path: Path) -> None:
    proc = write_proc(tmp_path, [FakeProcess(7, name="a) R 1 (b", parent=3, state="T"), FakeProcess(8, kernel_thread=True)])
    stat = process.read_stat(7, proc)
    assert (stat.name, stat.state, stat.parent, stat.start_time, stat.threads) == ("a) R 1 (b", "T", 3, 4711, 12)
    assert stat.cpu_time_ns == 200 * 1_000_000_000 // os.sysconf("SC_CLK_TCK")
    assert not stat.is_kernel_thread and process.read_stat(8, proc).is_kernel_thread
    assert process.run_state(7, proc) == "T" and process.run_state(9, proc) == process.GONE


def test_status_names_the_pid_in_every_namespace(tmp_path: Path) -> None:
    proc = write_proc(tmp_path, [FakeProcess(7, pids=(7, 31, 1), uid=1234)])
    status = process.read_status(7, proc)
    assert (status.uid, status.pids, status.tracer) == (1234, (7, 31, 1), 0)


def test_damaged_files_mean_the_process_is_gone(tmp_path: Path) -> None:
    proc = write_proc(tmp_path, [FakeProcess(7)])
    for name in ("stat", "status"):
        (proc / "7" / name).write_text("")
    with pytest.raises(TargetGoneError):
        process.read_stat(7, proc)
    with pytest.raises(TargetGoneError):
        process.read_status(7, proc)


def test_own_process() -> None:
    stat, status = process.read_stat(os.getpid()), process.read_status(os.getpid())
    assert stat.parent == os.getppid() and stat.start_time > 0
    assert status.uid == os.geteuid() and status.pids[0] == os.getpid()
    assert process.read_command(os.getpid())[0] == Path("/proc/self/cmdline").read_text().split("\0")[0]
    assert len(process.boot_id()) == 36
    switches = process.context_switches(os.getpid())
    assert switches is not None and switches > 0


def test_run_queue_wait_is_summed_over_threads(tmp_path: Path) -> None:
    for tid, text in ((7, "1000 250 3"), (8, "900 50 2"), (9, "0 0 0"), (10, "no numbers")):
        (tmp_path / "7" / "task" / str(tid)).mkdir(parents=True)
        (tmp_path / "7" / "task" / str(tid) / "schedstat").write_text(text + "\n")
    assert process.run_queue_wait_ns(7, tmp_path) == 300
    assert process.run_queue_wait_ns(8, tmp_path) is None
    # A kernel without CONFIG_SCHED_INFO shows zeros: nothing is known, which is not "never waited".
    for tid in (7, 8):
        (tmp_path / "7" / "task" / str(tid) / "schedstat").write_text("0 0 0\n")
    assert process.run_queue_wait_ns(7, tmp_path) is None


def test_run_state_follows_a_real_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        child.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 120
        while process.run_state(child.pid) != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.run_state(child.pid) == "T"
    finally:
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process.run_state(child.pid) == "Z"
        child.wait()
    assert process.run_state(child.pid) == process.GONE
    assert process.read_command(child.pid) == () and process.context_switches(child.pid) is None


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}, (5, 1, 8, "RANK")),
        (
            {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"},
            (3, 3, 4, "OMPI_COMM_WORLD_RANK"),
        ),
        ({"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_NTASKS": "16"}, (9, 1, 16, "SLURM_PROCID")),
        ({"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NTASKS": "16"}, (1, None, 2, "SLURM_PROCID")),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0"}, (2, 0, 4, "PMI_RANK")),
        ({"PMIX_RANK": "2", "SLURM_LOCALID": "0", "SLURM_NTASKS": "4"}, (2, 0, 4, "PMIX_RANK")),
        ({"MV2_COMM_WORLD_RANK": "1", "MV2_COMM_WORLD_SIZE": "2"}, (1, None, 2, "MV2_COMM_WORLD_RANK")),
        # torchrun under srun: one task a node, many ranks a task.
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3"}, (11, 3, 16, "RANK")),
        ({"LOCAL_RANK": "3"}, (None, 3, None, "")),
        ({}, (None, None, None, "")),
        # Nonsense is not believed, and the next source is asked.
        ({"RANK": "8", "WORLD_SIZE": "8"}, (None, None, None, "")),
        ({"RANK": "8", "WORLD_SIZE": "8", "SLURM_PROCID": "3", "SLURM_NTASKS": "4"}, (3, None, 4, "SLURM_PROCID")),
        ({"RANK": "-1"}, (None, None, None, "")),
        ({"RANK": "zero"}, (None, None, None, "")),
        ({"RANK": "٣"}, (None, None, None, "")),
        ({"RANK": "99999999999999999999"}, (None, None, None, "")),
        ({"RANK": " 0 "}, (0, None, None, "RANK")),
    ],
)
def test_ranks(environ: dict[str, str], expected: tuple[int | None, int | None, int | None, str]) -> None:
    ranks = ranks_from_environ(environ)
    assert (ranks.rank, ranks.local_rank, ranks.world_size, ranks.source) == expected


def test_jobs_are_told_apart() -> None:
    first = ranks_from_environ({"RANK": "0", "MASTER_PORT": "29500"})
    assert first != ranks_from_environ({"RANK": "0", "MASTER_PORT": "29501"})
    assert first == Ranks(0, None, None, "RANK", first.job)


def test_environ_of_a_real_process() -> None:
    child = subprocess.Popen(["sleep", "60"], env={"RANK": "6", "ODD": "a=b\nc", "EMPTY": ""})
    try:
        deadline = time.monotonic() + 120
        while process.read_command(child.pid)[:1] != ("sleep",) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert process.read_environ(child.pid) == {"RANK": "6", "ODD": "a=b\nc", "EMPTY": ""}
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(
    ("cgroup", "mountinfo", "expected"),
    [
        (f"0::/system.slice/docker-{ID}.scope\n", "", ID),
        (f"12:cpu:/docker/{ID}\n1:name=systemd:/docker/{ID}\n", "", ID),
        (f"0::/kubepods.slice/kubepods-besteffort.slice/cri-containerd-{ID}.scope\n", "", ID),
        (f"0::/kubepods/burstable/pod{ID[:36]}/{ID}\n", "", ID),
        (f"0::/machine.slice/libpod-{ID}.scope/container\n", "", ID),
        (f"0::/docker/{OTHER}/docker/{ID}\n", "", ID),
        ("0::/lxc.payload.trainer/init.scope\n", "", "trainer"),
        ("0::/machine.slice/machine-trainer.scope/payload\n", "", "trainer"),
        ("0::/user.slice/user-1000.slice\n", "", ""),
        # A cgroup namespace hides the path; the engine's own mounts give it away.
        ("0::/\n", f"9 8 0:5 /var/lib/docker/containers/{ID}/hostname /etc/hostname rw - ext4 /dev/sda rw\n", ID),
        ("0::/\n", f"9 8 0:5 /run/containers/storage/overlay-containers/{ID}/userdata/hosts /etc/hosts rw - tmpfs x rw\n", ID),
        ("0::/\n", "9 8 0:5 / / rw - ext4 /dev/sda rw\n", ""),
        (f"0::/user/{ID}aa\n", "", ""),
    ],
)
def test_container_id(tmp_path: Path, cgroup: str, mountinfo: str, expected: str) -> None:
    proc = write_proc(tmp_path, [FakeProcess(7, cgroup=cgroup, mountinfo=mountinfo)])
    assert container_id(7, proc) == expected
    assert container_id(8, proc) == ""


def test_namespaces_of_own_process() -> None:
    assert namespace_id(os.getpid(), "mnt") == Path("/proc/self/ns/mnt").stat().st_ino
    assert namespace_id(os.getpid(), "nonsense") is None


def test_a_path_below_a_root_cannot_leave_it(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("outside")
    root = tmp_path / "root"
    (root / "lib").mkdir(parents=True)
    (root / "secret").write_text("inside")
    (root / "lib" / "absolute").symlink_to("/secret")
    (root / "lib" / "up").symlink_to("../../../../secret")
    (root / "lib" / "magic").symlink_to(f"/proc/self/fd/{os.open(tmp_path / 'secret', os.O_RDONLY)}")
    for name in ("/secret", "/lib/absolute", "/lib/up", "lib/../../secret"):
        fd = open_below(str(root), name)
        assert os.read(fd, 100) == b"inside"
        os.close(fd)
    with pytest.raises(OSError):
        open_below(str(root), "/lib/magic")
