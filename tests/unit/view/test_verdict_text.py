"""A verdict as text: harmless, and bounded."""

from __future__ import annotations

import shutil

from ncclwatch.model.verdict import Culprit, Verdict, VerdictClass
from ncclwatch.text import Style
from ncclwatch.view.verdict_text import verdict_lines


def test_text_from_a_target_cannot_reach_the_terminal_as_a_command() -> None:
    evil = "\x1b[2J\x1b]0;owned\x07\r\n"
    verdict = Verdict(
        VerdictClass.STOPPED,
        evil + "summary",
        culprits=(Culprit(1, 1, evil, 2, 3, stage=evil, reason=evil),),
        evidence=(evil,),
        unobserved=(evil,),
        next_steps=(evil,),
        stage=evil,
    )
    for line in verdict_lines(verdict, Style(enabled=False)):
        assert line.isprintable()


def test_long_lists_are_cut_and_say_so() -> None:
    culprits = tuple(Culprit(rank, rank, "h", rank, 0) for rank in range(500))
    lines = list(verdict_lines(Verdict(VerdictClass.STOPPED, "s", culprits, evidence=("e",) * 500), Style(enabled=False)))
    assert len(lines) < shutil.get_terminal_size().lines + 60
    assert any("484 more" in line for line in lines)
