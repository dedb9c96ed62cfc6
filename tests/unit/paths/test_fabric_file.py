from pathlib import Path

import pytest

from ncclwatch.errors import UsageError
from ncclwatch.paths import fabric_file
from ncclwatch.paths.fabric_file import parse, read

REGULAR = """
[regular]
hosts = 4
nics = 1
ports = 2
port_gbps = 200
leaves = 4
spines = 2
links = 2
uplink_gbps = 400.0
rails = false
"""
LISTED = """
[[uplink]]
leaf = "a"
spine = "s"
gbps = 400
links = 2
[[uplink]]
leaf = "b"
spine = "s"
gbps = 100
[[nic]]
host = "one"
name = "mlx5_0"
address = "10.0.0.1"
leaves = ["a", "b"]
gbps = 200
[[nic]]
host = "two"
name = "mlx5_0"
address = "fd00::2"
leaves = ["b"]
gbps = 50
"""


def test_numbers_and_what_changed(tmp_path: Path) -> None:
    path = tmp_path / "fabric.toml"
    path.write_text(
        REGULAR
        + '[[changed]]\nleaf = "leaf1"\nspine = "spine0"\nnumber = 1\ngbps = 0\n'
        + '[[changed]]\nhost = "host2"\nnic = "nic0"\nport = 1\ngbps = 50\n'
    )
    built = read(path)
    assert built.uplinks == 16 and built.ports == 8
    dead = built.uplinks_between(1, 0)[1]
    assert [built.capacity[first + dead] for first in (built.first_up, built.first_down)] == [0, 0]
    assert (built.capacity == 0).sum() == 2
    assert built.capacity[[5, built.ports + 5]].tolist() == [50, 50]


def test_every_nic_and_uplink() -> None:
    built = parse(LISTED)
    assert built.nics == (("one", "mlx5_0"), ("two", "mlx5_0"))
    assert built.addresses == ("10.0.0.1", "fd00::2")
    assert built.nic_ports.tolist() == [[0, 1], [2, -1]]
    assert built.capacity.tolist() == [200, 200, 50] * 2 + [400, 400, 100] * 2
    # By leaf a over two parallel uplinks, or straight on leaf b.
    assert built.alternatives(0, 1).tolist() == [[0, 6, 11, 5], [0, 7, 11, 5], [1, -1, -1, 5]]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "needs either"),
        ("x = ", "no TOML"),
        ("[other]", "no section other"),
        (REGULAR + LISTED, "needs either"),
        (REGULAR.replace("hosts = 4", 'hosts = "4"'), "hosts of .regular. is not a whole number"),
        (REGULAR.replace("hosts = 4", "hosts = true"), "not a whole number"),
        (REGULAR.replace("hosts = 4", ""), "lacks hosts"),
        (REGULAR.replace("200", "nan"), "port_gbps"),
        (REGULAR.replace("hosts = 4", "hosts = 99999999999"), "too large"),
        (REGULAR + "colour = 1", "no colour"),
        (REGULAR + '[[changed]]\nleaf = "leaf9"\nspine = "spine0"\ngbps = 0', "not there"),
        (REGULAR + '[[changed]]\nleaf = "leaf0"\nspine = "spine0"\nnumber = 7\ngbps = 0', "no such link"),
        (REGULAR + '[[changed]]\nhost = "host9"\nnic = "nic0"\ngbps = 0', "not there"),
        (LISTED.replace('"fd00::2"', '"10.0.0.1"'), "twice"),
        (LISTED.replace('"fd00::2"', '"two"'), "no IP address"),
        (LISTED.replace('["b"]', '["c"]'), "one or two that have"),
        (LISTED.replace('["b"]', "[[1]]"), "not texts"),
        (LISTED.replace("links = 2", "links = 9999999"), "links of"),
        ("nic = 1", "to be written"),
        ("[[changed]]\n", "needs either"),
    ],
)
def test_a_file_that_makes_no_sense_is_said_in_one_line(text: str, says: str) -> None:
    with pytest.raises(UsageError, match=says) as error:
        parse(text)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff")
    with pytest.raises(UsageError, match="UTF-8"):
        read(tmp_path / "binary")
    monkeypatch.setattr(fabric_file, "MAX_BYTES", 10)
    (tmp_path / "long").write_text(REGULAR)
    with pytest.raises(UsageError, match="too large"):
        read(tmp_path / "long")
