"""Which network plugin a process uses: by its mapped files and its environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclwatch.target.maps import parse_maps
from ncclwatch.wire.plugins import net_plugin


def plugin_of(tmp_path: Path, files: list[str], environment: bytes | None) -> tuple[tuple[str, ...], str | None, str]:
    (tmp_path / "7").mkdir()
    if environment is not None:
        (tmp_path / "7/environ").write_bytes(environment)
    lines = [f"7f00000{n}0000-7f00000{n}1000 r-xp 00000000 08:01 {n + 1}    {file}\n" for n, file in enumerate(files)]
    found = net_plugin(7, parse_maps("".join(lines).encode()), tmp_path)
    assert found.is_external == bool(found.files)
    return found.files, found.variable, str(found)


@pytest.mark.parametrize(
    ("files", "environment", "expected"),
    [
        (["/usr/lib/libnccl.so.2"], b"PATH=/bin\0", ((), None)),
        (["/opt/aws/libnccl-net.so", "/opt/aws/libnccl-net.so"], b"", (("/opt/aws/libnccl-net.so",), None)),
        (["/opt/hpcx/libnccl-net-ucx.so.0"], b"NCCL_NET_PLUGIN=ucx\0", (("/opt/hpcx/libnccl-net-ucx.so.0",), "ucx")),
        (["/opt/x/libfoo.so"], b"A=1\0NCCL_NET_PLUGIN=libfoo.so\0", (("/opt/x/libfoo.so",), "libfoo.so")),
        (["/opt/x/libfoo.so"], b"NCCL_NET_PLUGIN=foo\0", ((), "foo")),
        (["/opt/x/libnccl-network-tools.txt", "/usr/lib/libnccl-tuner.so"], None, ((), None)),
        ([], b"NCCL_NET_PLUGIN=none\0", ((), "none")),
    ],
)
def test_plugins(tmp_path: Path, files: list[str], environment: bytes | None, expected: tuple[object, object]) -> None:
    assert plugin_of(tmp_path, files, environment)[:2] == expected


def test_names_from_the_target_cannot_steer_a_terminal(tmp_path: Path) -> None:
    text = plugin_of(tmp_path, ["/x/libnccl-net-\x1b[2J.so"], b"NCCL_NET_PLUGIN=\x1b]0;x\x07y\0")[2]
    assert "\x1b" not in text and "\x07" not in text
