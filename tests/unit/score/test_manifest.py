"""Lists of recordings that are not kept."""

from __future__ import annotations

from dataclasses import replace

from score.manifest import Entry, changes, commands

ONE = Entry("drawn-slow-1001-13-gc-pause", "2.21.5", "socket", "live", 1001, 0, True, (), "abc")


def test_what_changed_is_told() -> None:
    mended = replace(ONE, number=1, wrong=("silent",))
    assert changes([ONE, mended], [ONE, replace(mended, wrong=())])[0].startswith("MENDED")
    assert changes([ONE], [replace(ONE, wrong=("innocent",))])[0].startswith("WRONG")
    assert changes([ONE], [replace(ONE, timeline="abd")])[0].startswith("CHANGED")
    assert changes([], [ONE])[0].startswith("NEW")
    assert not changes([ONE], [ONE])


def test_the_commands_play_the_set_again() -> None:
    later = replace(ONE, scenario="drawn-slow-1001-110-proxy-sleeps")
    mixed = replace(ONE, scenario="drawn-801-5-killed", seed=801)
    filed = replace(ONE, scenario="quick-stop", seed=7)
    assert commands([ONE, later, mixed, filed]) == [
        "python -m score --real --drawn 111 --slow --seed 1001 --save FOLDER",
        "python -m score --real --drawn 6 --seed 801 --save FOLDER",
        "python -m score --real --set full --only quick-stop --nccl 2.21.5 --transport socket --seed 7 --save FOLDER",
    ]
