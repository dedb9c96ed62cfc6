"""The inference of topology on simulated jobs: exact or unsure, never wrong; and where in an iteration calls stand."""

from __future__ import annotations

import numpy as np
import pytest

from ncclwatch.engine.topology.namer import StageNamer
from ncclwatch.model.events import Function, Kind
from ncclwatch.model.topology import Role
from score.topology import Trial, feed, play, run, trials

CHOSEN = (2, 8, 12, 24, 36, 42, 48, 63)
"""Of the generated layouts: every dimension, every schedule, with and without sequence parallelism; jobs of at most 16 ranks."""


def chosen() -> list[Trial]:
    names = {f"layout-{number}" for number in CHOSEN}
    return [trial for trial in trials() if trial.scenario.name in names and trial.scenario.layout.world <= 16]


@pytest.mark.parametrize("trial", chosen(), ids=lambda trial: f"{trial.scenario.name}-{trial.condition.replace(' ', '-')}")
def test_layouts_are_exact_and_places_are_right(trial: Trial) -> None:
    outcome = run(trial)
    assert outcome.said != "wrong", outcome.why
    # Lost records and missing nodes may leave doubts; whole records may not.
    assert outcome.said == "right" or trial.condition != "clean", outcome.why
    right, wrong, silent = outcome.stages
    assert wrong <= 0.01 * (right + wrong + silent)


def test_a_process_is_told_its_place_by_its_latest_call_and_by_the_one_it_has_yet_to_make() -> None:
    trial = next(t for t in trials() if t.scenario.name == "layout-48" and t.condition == "clean")
    _, records = play(trial.scenario)
    events = np.concatenate([*records.calls.values()])
    events = events[np.argsort(events["time_ns"], kind="stable")]
    namer = StageNamer()
    namer.note_samples([series[-1] for series in records.samples if series])
    for part in np.array_split(events[:-400], 12):
        namer.observe(part)
    assert namer.learned is not None
    assert namer.learned.confirmed
    pid = int(events["pid"][-1])
    places = set()
    for event in np.split(events[-400:], 400):
        before, coming = namer.stage_of("", pid), namer.stage_of("", pid, calls_ago=-1)
        namer.observe(event)
        latest = namer.stage_of("", pid)
        if event["pid"][0] == pid and event["kind"][0] == Kind.ENTER and event["function"][0] < Function.GROUP_START:
            # The parts of a grouped exchange are one operation.
            again = latest == before and latest is not None and latest.function == "AllToAll"
            assert latest == coming or again
            places.add(latest)
    assert len(places) > 5


def test_calls_of_processes_that_are_not_known_and_records_without_meaning_teach_nothing() -> None:
    trial = next(t for t in trials() if t.scenario.name == "layout-2" and t.condition == "clean")
    _, records = play(trial.scenario)
    namer, _ = feed(records)
    before = namer.learned
    strange = np.concatenate([*records.calls.values()])[:50].copy()
    strange["pid"] = 7
    namer.observe(strange)
    strange["pid"], strange["comm"] = 10_000, 0xDEAD
    namer.observe(strange)
    strange["kind"] = Kind.LEAVE
    strange["function"] = Function.COMM_INIT_RANK
    namer.observe(strange)
    assert namer.learned is before


@pytest.mark.parametrize("trial", chosen(), ids=lambda trial: f"{trial.scenario.name}-{trial.condition.replace(' ', '-')}")
def test_counts_alone_are_never_wrong(trial: Trial) -> None:
    outcome = run(trial, calls=False)
    assert outcome.said != "wrong", outcome.why


def test_counts_alone_tell_a_pipeline_of_tensor_groups() -> None:
    trial = next(t for t in trials() if t.scenario.name == "layout-108" and t.condition == "clean")
    outcome = run(trial, calls=False)
    assert outcome.said == "right", outcome.why


def test_where_no_call_is_seen_groups_of_one_kind_alone_are_listed_and_nothing_is_claimed() -> None:
    trial = next(t for t in trials() if t.scenario.name == "layout-80" and t.condition == "clean")
    _, records = play(trial.scenario)
    namer = StageNamer()
    ((learned, members),) = namer.everything([series[-1] for series in records.samples if series])
    assert len(members) == trial.scenario.layout.world
    assert set(learned.topology.by_role) <= {Role.UNSURE, Role.UNUSED}
    assert not learned.topology.layout.known
    assert learned.topology.unsure


def test_what_counts_told_gives_way_to_what_calls_tell() -> None:
    trial = next(t for t in trials() if t.scenario.name == "layout-108" and t.condition == "clean")
    _, records = play(trial.scenario)
    samples = [series[-1] for series in records.samples if series]
    events = np.concatenate([*records.calls.values()])
    events = events[np.argsort(events["time_ns"], kind="stable")]
    namer = StageNamer()
    namer.note_samples(samples)
    few = len(samples)
    namer.observe(events[:few])
    assert namer.learned is None, "too few calls tell nothing"
    namer.fall_back(samples)
    assert namer.by_counts
    assert namer.learned is not None
    assert namer.learned.topology.layout.tp == trial.scenario.layout.tp
    process = samples[0].process
    place = namer.place_of(process.host, process.pid, None)
    assert place is not None
    assert place.pipeline_stage == 0
    namer.observe(events[few:])
    assert not namer.by_counts
    assert namer.learned.confirmed
