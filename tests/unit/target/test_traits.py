"""Traits of a process and its node, from trees of files."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclwatch.model.traits import Traits
from ncclwatch.target.traits import MAX_SETTINGS, MAX_VALUE, cpu_group, settings, traits, with_cpus_now
from unit.fake_proc import FakeProcess, write_proc


def _tree(tmp_path: Path, **more: object) -> tuple[Path, Path]:
    proc, sys = tmp_path / "proc", tmp_path / "sys"
    proc.mkdir()
    write_proc(proc, [FakeProcess(7, **more)])  # type: ignore[arg-type]
    with (proc / "7/status").open("a") as file:
        file.write("Cpus_allowed_list:\t0-3,8\n")
    gpu = proc / "driver/nvidia/gpus/0000:07:00.0"
    gpu.mkdir(parents=True)
    (gpu / "information").write_text("Model: \t\t NVIDIA H100\nIRQ:   \t\t 12\nGPU UUID: \t GPU-1234\n")
    (proc / "driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu\nGCC version: x\n"
    )
    nic = sys / "class/infiniband/mlx5_0"
    (nic / "ports/1").mkdir(parents=True)
    (nic / "device").mkdir()
    (nic / "ports/1/rate").write_text("400 Gb/sec (4X NDR)\n")
    (nic / "fw_ver").write_text("28.39.1002\n")
    (nic / "device/current_link_width").write_text("16\n")
    (nic / "device/current_link_speed").write_text("32.0 GT/s PCIe\n")
    return proc, sys


def test_what_a_node_and_a_process_have(tmp_path: Path) -> None:
    proc, sys = _tree(tmp_path, cgroup="0::/system.slice/slurmstepd.scope/job_4711/step_0\n")
    found = traits(7, {"NCCL_CROSS_NIC": "1", "SLURMD_NODENAME": "gpu17", "HOME": "/root"}, proc, sys)
    assert (found.node, found.job, found.cpus, found.driver) == ("gpu17", "4711", "0-3,8", "570.86.15")
    assert found.settings == (("NCCL_CROSS_NIC", "1"),)
    assert isinstance(hash(found), int)
    assert [(gpu.bus_id, gpu.model, gpu.uuid) for gpu in found.gpus] == [("0000:07:00.0", "NVIDIA H100", "GPU-1234")]
    (nic,) = found.nics
    assert (nic.name, nic.rate, nic.firmware, nic.link) == (
        "mlx5_0", "400 Gb/sec (4X NDR)", "28.39.1002", "16 lanes at 32.0 GT/s PCIe",
    )  # fmt: skip


def test_a_pod_is_named_by_its_environment_or_its_group(tmp_path: Path) -> None:
    uid = "0a1b2c3d_1111_2222_3333_444455556666"
    proc, sys = _tree(tmp_path, cgroup=f"0::/kubepods.slice/kubepods-pod{uid}.slice/cri-containerd-x.scope\n")
    assert traits(7, {"HOSTNAME": "train-3", "POD_NAMESPACE": "ml"}, proc, sys).pod == "train-3"
    assert traits(7, {}, proc, sys).pod == uid
    assert traits(7, {"SLURM_JOB_ID": "x; reboot"}, proc, sys).job == ""


def test_what_is_not_there_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    found = traits(7, {}, tmp_path / "proc", tmp_path / "sys")
    assert (found.gpus, found.nics, found.cpus, found.cpu_quota, found.pod) == ((), (), "", None, "")


def _grouped(tmp_path: Path, sets: dict[str, str], name: str, groups: str, mount: str) -> Path:
    proc, _ = _tree(tmp_path, cgroup=groups)
    for folder, text in sets.items():
        (tmp_path / "cg" / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / "cg" / folder / name).write_text(text)
    (proc / "self").mkdir()
    (proc / "self/mountinfo").write_text(mount.replace("CG", str(tmp_path / "cg")))
    return proc


def test_the_set_of_the_control_group_is_the_nearest_one(tmp_path: Path) -> None:
    sets = {"": "0-63\n", "pod": "0,2,4,6-7\n", "pod/ctr/below": "\n"}
    unified = "30 1 0:26 / CG rw - cgroup2 cgroup2 rw\n"
    proc = _grouped(tmp_path, sets, "cpuset.cpus.effective", "0::/pod/ctr/below\n", unified)
    assert traits(7, {}, proc, tmp_path / "sys").cpu_group == "0,2,4,6-7"
    (tmp_path / "cg/pod/cpuset.cpus.effective").write_text("a lie\n")
    assert cpu_group(7, proc) == "0-63"


def test_the_older_interface_has_a_hierarchy_of_sets(tmp_path: Path) -> None:
    mount = "31 1 0:27 / /nowhere rw - cgroup cgroup rw,cpu\n32 1 0:28 /docker CG rw - cgroup cgroup rw,cpuset\n"
    proc = _grouped(tmp_path, {"abc": "0-1\n"}, "cpuset.effective_cpus", "5:cpu:/\n4:cpuset:/docker/abc\n0::/\n", mount)
    assert cpu_group(7, proc) == "0-1"


def test_cpus_that_change_while_a_process_lives_are_seen(tmp_path: Path) -> None:
    proc, sys = _tree(tmp_path)
    known = traits(7, {"NCCL_ALGO": "Ring"}, proc, sys)
    assert with_cpus_now(known, 7, proc) == known
    status = (proc / "7/status").read_text()
    (proc / "7/status").write_text(status.replace("0-3,8", "2"))
    now = with_cpus_now(known, 7, proc)
    assert (now.cpus, now.settings, now.gpus) == ("2", known.settings, known.gpus)
    (proc / "7/status").unlink()
    assert with_cpus_now(now, 7, proc) is now, "of a process that is gone the last is kept"


def test_settings_are_bounded_cleaned_and_hold_no_secret() -> None:
    environ = {f"NCCL_X{n}": "v" * 1000 for n in range(1000)} | {"NCCL_AUTH_TOKEN": "s3cret"}
    found = settings(environ)
    assert len(found) <= MAX_SETTINGS
    assert all(len(value) <= MAX_VALUE for _, value in found)
    assert settings({"NCCL_AUTH_TOKEN": "s3cret", "NCCL_A": "\x1b[31m1"}) == (("NCCL_A", "1"),)


@pytest.mark.parametrize(
    ("text", "on"),
    [("1", True), ("0x1f", True), (" 2x", True), ("010", True), ("-1", True), ("0", False), ("0x0", False), ("08", False),
     ("-2", False), ("", False), ("yes", False)],
)  # fmt: skip
def test_adaptive_routing_is_read_as_nccl_reads_numbers(text: str, on: bool) -> None:
    assert Traits(settings=settings({"NCCL_IB_ADAPTIVE_ROUTING": text})).adaptive_routing is on
    assert not Traits(settings=settings({})).adaptive_routing
