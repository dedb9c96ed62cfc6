"""The picture of paths: who is drawn where, what is red, what is dashed, and what does not fit is counted."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

import pytest

from ncclwatch.dashboard.paths_page import paths_text
from ncclwatch.model.network import FlowRecord, SocketFacts
from ncclwatch.model.paths import Load, SeenPath
from ncclwatch.paths.measured_plan import as_planned, plan
from ncclwatch.report.paths_svg import BLUE, GREY, RED, paths
from ncclwatch.text import width
from ncclwatch.view.frame import FlowRow, Frame, View
from ncclwatch.view.paths import MAX_NODES, picture, picture_of_view
from unit.paths.test_flow_map import SEND
from unit.paths.test_measured import FLOWS, LEAF, LIVE, OWN, A, B, flow, probe

RATED = [replace(one, rate=5e6, from_name="node1 eth0", to_name="node2 eth0") for one in FLOWS]


def strokes(drawn: str) -> list[tuple[str, float, bool]]:
    """(colour, thickness, dashed) of each line."""
    tree = ET.fromstring(drawn[drawn.index("<svg") : drawn.index("</svg>") + 6])  # noqa: S314
    return [
        (one.attrib["stroke"], float(one.attrib["stroke-width"]), "stroke-dasharray" in one.attrib)
        for one in tree.iter("{http://www.w3.org/2000/svg}path")
    ]


def test_where_flows_crowd_lines_are_red_and_the_empty_way_is_grey() -> None:
    made = picture(RATED, [probe(*OWN, *LIVE)])
    assert made.headings == ("sends", "leaf", "spine", "leaf", "receives")
    assert made.places == ((A,), (LEAF,), ("10.8.0.2", "10.8.1.2"), ("10.7.0.1", "10.7.1.1"), (B,))
    red = {(a[1], b[1]) for (a, b), edge in made.edges.items() if edge.crowded}
    assert red == {(LEAF, "10.8.0.2"), ("10.8.0.2", "10.7.0.1")}
    assert made.edges[(1, LEAF), (2, "10.8.0.2")].rate == 1e7 and not made.edges[(1, LEAF), (2, "10.8.1.2")].flows
    lines = strokes(paths(made))
    assert sorted(colour for colour, _, _ in lines) == sorted([RED] * 2 + [BLUE] * 2 + [GREY] * 3) and not any(
        d for *_, d in lines
    )


def test_as_planned_nothing_is_red_and_thickness_is_by_rate() -> None:
    probes = [probe(*OWN, *LIVE)]
    made = picture(as_planned(RATED, plan(RATED, probes, floor=0.05)), probes)
    assert not made.crowded and not any(edge.crowded for edge in made.edges.values())
    thick = [width_ for _, width_, _ in strokes(paths(made))]
    assert max(thick) == 11.0 and sorted(set(thick)) == [6.2, 11.0]


def test_without_probes_flows_go_from_host_to_host() -> None:
    made = picture(RATED, [])
    assert made.places == ((A,), (B,)) and not made.crowded and not made.followed
    assert "was not asked" in paths(made)


def test_a_flow_that_was_not_followed_is_dashed() -> None:
    made = picture(RATED, [probe(*OWN, LIVE[0])])
    assert [dashed for _, _, dashed in strokes(paths(made))].count(True) == 1


def test_by_queues_the_place_between_is_what_they_told() -> None:
    told = [SeenPath(26000, 700 + n, load=load, load_confidence=0.99) for n, load in enumerate([Load.QUEUED, Load.EMPTY])]
    made = picture([replace(one, waits=(9e4, 1e2)) for one in RATED], [probe(*told)])
    assert made.places[1] == ("queued paths",) and all(edge.crowded for edge in made.edges.values())


def test_what_does_not_fit_is_counted_and_said() -> None:
    many = [replace(flow(0, 500), source=f"10.1.0.{n}", destination=f"10.2.0.{n}") for n in range(MAX_NODES + 5)]
    made = picture(many, [])
    assert made.hidden == 5 and len(made.places[0]) == MAX_NODES and "5 more flows are not drawn" in paths(made)


def test_hostile_names_are_harmless() -> None:
    bad = replace(RATED[0], from_name="</text><script>x</script>\x1b[2J", to_name="&")
    drawn = paths(picture([bad], []))
    strokes(drawn)
    assert "<script" not in drawn and "\x1b" not in drawn


def view(*records: FlowRecord) -> View:
    return View(Frame(0.0, 1, (), flows=tuple(FlowRow("node1", one) for one in records)))


RECORDS = [
    replace(SEND, socket=SocketFacts(1, "10.0.0.1:500", "10.0.1.1:40000")),
    replace(SEND, channel=1, socket=SocketFacts(1, "10.0.0.1:501", "10.0.1.1:40001")),
]


@pytest.mark.parametrize("cells", [60, 80, 120, 200])
def test_the_dashboard_says_the_same_in_lines_that_fit(cells: int) -> None:
    lines = ["".join(text for text, _ in line) for line in paths_text([probe(*OWN, *LIVE)], view(*RECORDS), cells)]
    text = "\n".join(lines)
    assert all(width(line) <= cells for line in lines), lines
    assert "CROWDED" in text and text.count("━!━") == 2 and "╌╌╌" in text and "2 flows: rank 8 → 1, channel 0-1" in text


def test_the_dashboard_says_what_is_missing() -> None:
    for probes, shown, words in (
        ([], None, "no connection"),
        ([], view(), "no connection"),
        ([], view(*RECORDS), "was not asked"),
    ):
        assert words in "\n".join("".join(text for text, _ in line) for line in paths_text(probes, shown, 80))
    assert picture_of_view(view(replace(SEND, socket=None)), []).edges == {}
