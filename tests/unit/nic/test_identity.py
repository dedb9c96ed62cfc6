"""Drivers of RDMA devices and members of bonds, out of a made-up sysfs."""

from __future__ import annotations

from pathlib import Path

from ncclwatch.nic.identity import Bond, bond_of, rdma_driver


def test_drivers(tmp_path: Path) -> None:
    devices = tmp_path / "class/infiniband"
    (tmp_path / "bus/pci/drivers/mlx5_core").mkdir(parents=True)
    (devices / "mlx5_0/device").mkdir(parents=True)
    (devices / "mlx5_0/device/driver").symlink_to(tmp_path / "bus/pci/drivers/mlx5_core")
    (devices / "rxe0").mkdir()
    (devices / "rxe0/parent").write_text("eth0\n")
    (devices / "siw0").mkdir()
    assert [rdma_driver(name, tmp_path) for name in ("mlx5_0", "rxe0", "siw0", "gone")] == ["mlx5_core", "rxe", "", ""]


def test_bonds(tmp_path: Path) -> None:
    for name, slaves, active in (
        ("bond0", "eth0 eth1\n", "eth1\n"),
        ("bond1", "eth2 eth3", "\n"),
        ("bond2", "a\x1b[2J eth4", "gone"),
    ):
        folder = tmp_path / "class/net" / name / "bonding"
        folder.mkdir(parents=True)
        (folder / "slaves").write_text(slaves)
        (folder / "active_slave").write_text(active)
    assert bond_of("bond0", tmp_path) == Bond(("eth0", "eth1"), "eth1")
    assert bond_of("bond1", tmp_path) == Bond(("eth2", "eth3"))
    assert bond_of("bond2", tmp_path) == Bond(("eth4",))
    assert bond_of("eth9", tmp_path) == bond_of("", tmp_path) == bond_of("../bond0", tmp_path) == Bond()
