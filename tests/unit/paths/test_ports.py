"""Predicted source ports: values worked out by hand from the kernel's formulas."""

from __future__ import annotations

import pytest

from ncclwatch.paths.ports import LOWEST, RULES, flow_label, label_of, label_to_port, of_both, of_local, predict, release, rule_of


@pytest.mark.parametrize(
    ("local", "remote", "label", "port"),
    [
        # 17 * 18 = 306 = 0x132: nothing to fold.
        (17, 18, 0x132, 0xC132),
        # 0x1000 * 0x1000 = 1 << 24; >> 20 = 0x10; low 20 bits 0x10.
        (0x1000, 0x1000, 0x10, 0xC010),
        # 0xffffff squared = 0xfffffe000001; ^ >> 20 (0xfffffe0) = 0xfffff1ffffe1; ^ >> 40 (0xff) = 0x...ffff1e; 20 bits: 0xfff1e.
        # Port: 0x3f1e ^ (0xfc000 >> 14 = 0x3f) = 0x3f21.
        (0xFFFFFF, 0xFFFFFF, 0xFFF1E, 0xFF21),
        # 0x123 * 0x456 = 0x4edc2; 0x4edc2 has no bits above 20; port: 0x2dc2 ^ (0x4c000 >> 14 = 0x13) = 0x2dd1.
        (0x123, 0x456, 0x4EDC2, 0xEDD1),
    ],
)
def test_both_queue_pairs(local: int, remote: int, label: int, port: int) -> None:
    assert flow_label(local, remote) == flow_label(remote, local) == label
    assert label_to_port(label) == of_both(local, remote) == port


@pytest.mark.parametrize("port", [LOWEST, LOWEST + 1, 50001, 65535])
def test_a_label_for_a_port(port: int) -> None:
    assert label_to_port(label_of(port)) == port and label_of(port) != 0


@pytest.mark.parametrize(
    ("local", "port"),
    [
        # 0x61c88647 >> 18 = 0x1872.
        (1, 0xC000 + 0x1872),
        # 17 * 0x61c88647 = 0x67e50eab7; 32 bits 0x7e50eab7; >> 18 = 0x1f94.
        (17, 0xC000 + 0x1F94),
    ],
)
def test_the_local_queue_pair_alone(local: int, port: int) -> None:
    assert of_local(local) == port


@pytest.mark.parametrize(
    ("driver", "kernel", "rule"),
    [
        ("mlx5_core", "5.15.0-91-generic", "both-queue-pairs"),
        ("mlx5_core", "6.18.44", "both-queue-pairs"),
        ("rxe", "5.16.0", "local-queue-pair"),
        ("rxe", "5.17.0-1-amd64", "both-queue-pairs"),
        ("rxe", "6.1.0-56-amd64", "both-queue-pairs"),
        ("ice", "5.17", "both-queue-pairs"),
        ("hns3", "6.6.0", "both-queue-pairs"),
    ],
)
def test_the_rule_is_chosen_by_driver_and_release(driver: str, kernel: str, rule: str) -> None:
    assert predict(driver, kernel, 17, 18).rule == rule


@pytest.mark.parametrize(
    ("driver", "kernel", "reason"),
    [
        ("bnxt_en", "6.1.0", "no rule is known for the driver bnxt_en"),
        ("", "6.1.0", "the driver of the NIC is not known"),
        ("mlx5_core", "", "the kernel's release is not known"),
        ("mlx5_core", "5.7.19", "mlx5_core chose the port otherwise before Linux 5.8"),
        ("rxe", "5.14.0-427.el9.x86_64", "has drivers of later releases"),
        ("mlx5_core", "4.18.0-513.el8.x86_64", "has drivers of later releases"),
    ],
)
def test_where_no_rule_is_known_nothing_is_predicted(driver: str, kernel: str, reason: str) -> None:
    answer = predict(driver, kernel, 17, 18)
    assert answer.port is None and reason in answer.reason


def test_a_red_hat_kernel_past_every_edge_is_like_any_other() -> None:
    assert predict("mlx5_core", "5.14.0-427.el9.x86_64", 17, 18).port == 0xC132


def test_without_the_other_end_only_the_local_rule_says_something() -> None:
    assert predict("rxe", "5.10.0", 17, None).port == 0xDF94
    assert "other end" in predict("rxe", "6.1.0", 17, None).reason


@pytest.mark.parametrize(("local", "remote"), [(0, 5), (1 << 24, 5), (5, 0), (5, -1), (5, 1 << 24)])
def test_numbers_that_no_queue_pair_has(local: int, remote: int) -> None:
    assert predict("mlx5_core", "6.1", local, remote).port is None


@pytest.mark.parametrize("text", ["", "x", "6", "6.", "linux 6.1", "6.1²"])
def test_odd_releases(text: str) -> None:
    assert release(text) in (None, (6, 1))


def test_every_port_is_a_dynamic_one_and_every_rule_has_its_source() -> None:
    assert all(LOWEST <= of_both(a, b) <= 0xFFFF for a in range(1, 4000, 37) for b in range(1, 1 << 24, 99991))
    assert all(rule.source and not isinstance(rule_of(rule.driver, ".".join(map(str, rule.since))), str) for rule in RULES)
