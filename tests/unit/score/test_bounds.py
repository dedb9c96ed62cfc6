"""What a set of judgements comes to, with exact bounds."""

from __future__ import annotations

from score import bounds
from score.scoring import Result


def judged(
    case: str,
    score_class: str,
    *,
    right: bool = True,
    visible: bool | None = None,
    innocents: tuple[int, ...] = (),
    how: str = "live",
) -> Result:
    return Result(
        case, score_class, "ncclwatch", right, right, right, None, None, bool(innocents) and score_class == "clean", 1.0, 1.0,
        "stopped", [1], "s", f"2.27.5 socket {how} seed 1 try 0", innocents=innocents, visible=visible,
    )  # fmt: skip


def test_each_question_has_its_share_and_a_job_counts_once_for_its_innocents() -> None:
    results = [
        judged("a", "H1"),
        judged("a", "H1", right=False, innocents=(3,), how="post-hang"),
        judged("b", "S1", visible=True),
        judged("c", "S2", right=False, visible=False),
        judged("d", "S2", right=False, visible=True),
        judged("e", "clean"),
        judged("f", "clean", innocents=(2,)),
    ]
    found = {what: (one.count, one.of) for what, one in bounds.shares(results).items()}
    assert found == {
        "hangs: right class and place": (1, 2),
        "slow jobs whose fault shows: right": (1, 2),
        "slow jobs, all: right": (1, 3),
        "healthy jobs: silent": (1, 2),
        "jobs in which an innocent rank was named at any moment": (2, 6),
    }
    text = bounds.table(results, markdown=True)
    assert "| hangs: right class and place | 1 | 2 | 50.0% | 1.3% to 98.7% |" in text
    assert bounds.as_json(results)["healthy jobs: silent"]["of"] == 2


def test_what_was_not_judged_is_not_told() -> None:
    assert set(bounds.shares([judged("a", "H1")])) == {
        "hangs: right class and place",
        "jobs in which an innocent rank was named at any moment",
    }
