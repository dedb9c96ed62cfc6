"""The inference of topology on simulated jobs: exact or unsure, never wrong; and where in an iteration calls stand."""

from __future__ import annotations

import numpy as np
import pytest

from ncclwatch.engine.topology.model import Role
from ncclwatch.engine.topology.namer import StageNamer
from ncclwatch.model.events import Function, Kind
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
    namer, placed = feed(records)
    events, places, learned = placed[-1]
    assert learned is not None
    assert learned.confirmed
    at = int(np.flatnonzero(places.rank == places.rank[-1])[-1])
    event = events[places.event[at]]
    step = learned.patterns[int(places.pattern[at])].steps[int(places.position[at])]
    latest = namer.stage_of("", int(event["pid"]))
    assert latest is not None
    assert (latest.phase, latest.role) == (step.phase, step.role)
    following = namer.stage_of("", int(event["pid"]), calls_ago=-1)
    pattern = learned.patterns[int(places.pattern[at])]
    after = pattern.steps[(int(places.position[at]) + 1) % len(pattern)]
    assert following is not None
    assert (following.role, following.micro_batch) == (after.role, after.micro_batch)


def test_calls_of_processes_that_are_not_known_and_records_without_meaning_teach_nothing() -> None:
    trial = next(t for t in trials() if t.scenario.name == "layout-2" and t.condition == "clean")
    _, records = play(trial.scenario)
    namer, _ = feed(records)
    before = namer.learned
    strange = np.concatenate([*records.calls.values()])[:50].copy()
    strange["pid"] = 7
    assert len(namer.observe(strange)) == 0
    strange["pid"], strange["comm"] = 10_000, 0xDEAD
    assert len(namer.observe(strange)) == 0
    strange["kind"] = Kind.LEAVE
    strange["function"] = Function.COMM_INIT_RANK
    assert len(namer.observe(strange)) == 0
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
    place = namer.place_of(process.host, process.pid)
    assert place is not None
    assert place.pipeline_stage == 0
    namer.observe(events[few:])
    assert not namer.by_counts
    assert namer.learned.confirmed
