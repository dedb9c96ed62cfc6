import struct
import zlib
from dataclasses import replace

import numpy as np
import pytest

from ncclwatch.paths.ecmp import Bond, Hashing, bond_hash, crc32, mispredicted, paths_by_hash, source_ports
from ncclwatch.paths.fabric import NO_PATHS
from ncclwatch.paths.fluid import demands
from ncclwatch.paths.placing import place
from unit.paths.fabrics import fabric, pairs


def test_crc_is_that_of_zlib() -> None:
    words = np.array([0x0A000001, 0xFFFFFFFF, 7], np.uint32)
    assert crc32([words, words]).tolist() == [zlib.crc32(struct.pack(">II", int(w), int(w))) for w in words]


def test_bond_hash_of_a_packet() -> None:
    # 10.0.0.1:0xC000 to 10.0.0.2:4791, worked out by hand: the words as a little-endian host reads them.
    ports = int.from_bytes(struct.pack(">HH", 0xC000, 4791), "little")
    value = ports ^ int.from_bytes(bytes([10, 0, 0, 1]), "little") ^ int.from_bytes(bytes([10, 0, 0, 2]), "little")
    value ^= value >> 16
    value ^= value >> 8
    words = (np.array([0x0A000001], np.uint32), np.array([0x0A000002], np.uint32))
    assert bond_hash(*words, np.array([0xC000]), np.array([4791])).tolist() == [value >> 1]


def test_a_flow_takes_one_live_path_and_keeps_it() -> None:
    built = fabric().with_uplinks([0, 9])
    flows = pairs(built)
    paths = paths_by_hash(built, flows, Hashing(3))
    assert built.is_path(paths).all()
    assert (paths == paths_by_hash(built, flows, Hashing(3))).all()
    assert (paths != paths_by_hash(built, flows, Hashing(4))).any()
    ends = zip(flows.source, flows.destination, paths, strict=True)
    assert all((built.alternatives(int(s), int(d)) == path).all(axis=1).any() for s, d, path in ends)


def test_hashes_spread_evenly_over_uplinks() -> None:
    built = fabric()
    flows = pairs(built, queue_pairs=500)
    up = paths_by_hash(built, flows, Hashing(5))[:, 1]
    counts = np.bincount(up - built.first_up)
    # Mean 250 a link: six standard deviations.
    assert abs(counts - 250).max() < 6 * 250**0.5


def test_switches_with_one_seed_repeat_their_choice() -> None:
    built = fabric(spines=2)
    flows = pairs(built, queue_pairs=200)
    taken = [len(np.unique(paths_by_hash(built, flows, Hashing(5, alike=alike))[:, 2])) for alike in (False, True)]
    # Of two ways down from each of two spines to each block, half are never taken.
    assert taken == [8, 4]


def test_queue_pairs_in_turns_use_both_ports_alike() -> None:
    built = fabric()
    flows = pairs(built)
    out = paths_by_hash(built, flows, Hashing(5, bond=Bond.TURNS))[:, 0]
    assert np.bincount(out, minlength=built.ports).max() == 1


def test_a_source_port_is_found_for_each_path_planned() -> None:
    built = fabric()
    flows = pairs(built)
    wanted = place(built, flows, demands(built, flows), NO_PATHS, 1.0)
    ports = source_ports(built, flows, wanted, Hashing(6), 512)
    assert (ports >= 0xC000).all()
    # The port of the bond is set apart; the rest of the path is where the hashes send that source port.
    hashed = paths_by_hash(built, replace(flows, source_port=ports), Hashing(6))
    same_port = hashed[:, 0] == wanted[:, 0]
    assert same_port.any() and (hashed[same_port] == wanted[same_port]).all()


@pytest.mark.parametrize(("wrong", "low", "high"), [(0.0, 0, 0), (1.0, 0.6, 1)])
def test_paths_predicted_wrong_are_elsewhere(wrong: float, low: float, high: float) -> None:
    built = fabric()
    flows = pairs(built, queue_pairs=20)
    paths = paths_by_hash(built, flows, Hashing(7))
    found = mispredicted(built, flows, paths, np.full(len(flows), wrong), np.random.default_rng(1))
    assert (found[:, 0] == paths[:, 0]).all()
    assert low <= (found != paths).any(axis=1).mean() <= high
