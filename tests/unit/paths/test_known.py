"""What a file says of the fabric, and what is seen: agreement, each contradiction, and what is too little to be one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclwatch.errors import UsageError
from ncclwatch.model.paths import Load, Probe, SeenPath
from ncclwatch.paths.known import Known, contradictions, known_of
from ncclwatch.paths.learned import By, edges
from ncclwatch.paths.measured import MeasuredFlow, where_now
from ncclwatch.paths.suspects import Suspect
from unit.paths.test_measured import LEAF, LIVE, OWN, A, B, flow, probe, seen

FILE = f"""
[[uplink]]
leaf = "near"
spine = "s0"
gbps = 100
[[uplink]]
leaf = "near"
spine = "s1"
gbps = 100
[[uplink]]
leaf = "far"
spine = "s0"
gbps = 100
[[uplink]]
leaf = "far"
spine = "s1"
gbps = 100
[[nic]]
host = "a"
name = "eth0"
address = "{A}"
leaves = ["near"]
gbps = 100
[[nic]]
host = "b"
name = "eth0"
address = "{B}"
leaves = ["far"]
gbps = 100
[[router]]
name = "near"
addresses = ["{LEAF}"]
[[router]]
name = "s0"
addresses = ["10.8.0.2"]
[[router]]
name = "s1"
addresses = ["10.8.1.2"]
[[router]]
name = "far"
addresses = ["10.7.0.1", "10.7.1.1"]
"""
TWICE = (*OWN, *(replace(one, source_port=one.source_port + 8) for one in OWN))


def told(known: str | Known, one: Probe, flows: list[MeasuredFlow] | None = None, *suspects: Suspect) -> list[str]:
    flows = flows or []
    learned = edges([one], flows, where_now(flows, [one]), suspects)
    return [each.text for each in contradictions(known_of(known) if isinstance(known, str) else known, [one], learned)[0]]


def spine(number: int, count: int = 16) -> list[SeenPath]:
    return [seen(700 + n, number) for n in range(count)]


def test_what_is_seen_as_the_file_says_is_no_contradiction() -> None:
    assert told(FILE, probe(*TWICE, wrong=0.03, nic="eth0", switch="near")) == []
    assert told(FILE + '[hash]\nfields = "five-tuple"\n', probe(*TWICE, wrong=0.03)) == []


@pytest.mark.parametrize(
    ("change", "what", "says"),
    [
        ((B, "10.9.9.9"), probe(*TWICE), f"{B} is probed, and no [[nic]]"),
        (("", ""), probe(*TWICE, nic="eth1"), "is eth1 of a; by the file eth0 of a"),
        (("", ""), probe(*TWICE, switch="far"), "plugged into far (LLDP); by the file into near"),
        (('leaves = ["far"]', 'leaves = ["near"]'), probe(*TWICE), "passes 3 routers; by the file 1"),
        (("", ""), probe(*spine(0)), "the source port changes nothing; by the file there are 2 ways"),
        (("", ""), probe(*spine(0)), "no source port goes by s1; by the file its links live"),
        (("gbps = 100", "gbps = 0"), probe(*TWICE), "by the file there is no living path"),
        (('addresses = ["10.8.1.2"]', 'addresses = ["10.8.1.9"]'), probe(*TWICE, seen(799, 2)), "3 ways were seen; by the file"),
    ],
)
def test_each_contradiction_is_told(change: tuple[str, str], what: Probe, says: str) -> None:
    text = FILE.replace(*change) if change[0] else FILE
    assert any(says in line for line in told(text, what)), told(text, what)


def test_the_hash_is_compared() -> None:
    addresses, ports = (FILE + f'[hash]\nfields = "{fields}"\n' for fields in ("addresses", "five-tuple"))
    assert ["changes the way (2 were seen)" in line for line in told(addresses, probe(*TWICE))] == [True]
    assert told(addresses, probe(*spine(0))) == []
    uneven = probe(*spine(0, 31), seen(799, 1))
    assert any("31 of 32 source ports take one of 2 ways" in line for line in told(ports, uneven))


def test_links_speeds_and_verdicts_are_compared() -> None:
    parts = FILE.split("[[uplink]]")
    dead = "[[uplink]]".join([*parts[:2], parts[2].replace("gbps = 100", "gbps = 0"), *parts[3:]])
    assert any("by the file it is dead" in line for line in told(dead, probe(*TWICE)))
    apart = FILE.replace('leaf = "near"\nspine = "s1"', 'leaf = "far"\nspine = "s1"')
    assert any("by the file these two are not joined" in line for line in told(apart, probe(*TWICE)))
    fast = [flow(0, 500, rate=20e9)]
    assert any("carries 160 Gb/s; by the file at most 100" in line for line in told(FILE, probe(*TWICE, LIVE[0]), fast))
    slow = [flow(0, 500, rate=5e9, waits=(60_000.0, 100.0))]
    assert any("is full with 40 Gb/s; by the file it has 100" in line for line in told(FILE, probe(*TWICE, LIVE[0]), slow))
    assert not told(FILE, probe(*TWICE, LIVE[0]), [replace(slow[0], waits=(100.0, 100.0))])
    gone = Suspect((LEAF, "10.8.0.2"), 0.0, 0.97, "it is dead")
    assert told(FILE, probe(*TWICE), None, gone) == ["it is dead; by the file it lives"]


def test_few_source_ports_contradict_nothing() -> None:
    assert told(FILE, probe(*spine(0, 2), wrong=0.03)) == []


def test_what_cannot_be_compared_is_said() -> None:
    words = ("hosts = 2", "nics = 1", "ports = 1", "port_gbps = 1", "leaves = 2", "spines = 2", "links = 1", "uplink_gbps = 1")
    regular = "\n".join(("[regular]", *words, "rails = false"))
    found, notes = contradictions(known_of(regular), [probe(*OWN)], [])
    assert not found and "names none of the probed addresses" in notes[0]
    unnamed = FILE[: FILE.index("[[router]]")]
    assert "numbers alone" in contradictions(known_of(unnamed), [probe(*OWN)], [])[1][0]


@pytest.mark.parametrize(
    "wrong",
    ['[hash]\nfields = "all"\n', "[hash]\nx = 1\n", '[[router]]\nname = "none"\naddresses = ["10.0.0.9"]\n',
     '[[router]]\nname = "s0"\naddresses = ["x"]\n', "router = 1\n"],
)  # fmt: skip
def test_a_file_that_makes_no_sense_is_refused(wrong: str) -> None:
    with pytest.raises(UsageError):
        known_of(wrong + FILE if wrong.startswith("router") else FILE + wrong)


def test_confidence_of_edges() -> None:
    one = {edge.link: edge for edge in edges([probe(*OWN, seen(799, 2), wrong=0.1, nic="eth0", switch="near", switch_port="p1")])}
    assert one[LEAF, "10.8.2.2"].confidence == pytest.approx(0.9) and one[LEAF, "10.8.2.2"].ports == 1
    assert one[LEAF, "10.8.0.2"].confidence > 0.999 and one[LEAF, "10.8.0.2"].ports == 4
    assert one[f"{A} (eth0)", "near p1"].by is By.LLDP
    unsteady = [replace(path, steady=False) for path in OWN]
    assert edges([probe(*unsteady)]) == [], "a path that changes from look to look shows no link"
    quiet = SeenPath(26000, 700, load=Load.EMPTY, load_confidence=0.97)
    (queue,) = edges([probe(quiet)])
    assert queue.by is By.QUEUES and queue.confidence == pytest.approx(0.97)
    dead = Suspect((LEAF, "10.8.9.2"), 0.0, 0.8, "dead")
    assert {edge.link: edge for edge in edges([probe(*OWN)], suspects=[dead])}[dead.link].state is dead
