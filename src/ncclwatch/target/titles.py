"""Ranks that processes give themselves by their title (``setproctitle``): workers of inference servers, Ray actors.

==========================================  =========================================================================
``VLLM::Worker_DP0_PP0_TP1_EP1``            vLLM (``set_process_title``, vllm/utils): sizes of one are left out
``sglang::scheduler_DP0_PP0_TP1_EP1``       SGLang (``run_scheduler_process``, srt/managers/scheduler.py), the same
``ray::Trainer_rank_3.train``               a Ray actor that its program has named so
==========================================  =========================================================================
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_SERVER = re.compile(r"(?:VLLM::Worker|sglang::scheduler)((?:_[A-Z]{2,4}\d{1,7})+)\Z")
_PLACE = re.compile(r"_([A-Z]+)(\d+)")
_ACTOR = re.compile(r"ray::.{0,256}?rank\W?_?(\d{1,7})(?!\d)", re.IGNORECASE)
ALONGSIDE = frozenset({"EP", "DCP"})
"""Groups of the ranks that tensor parallelism has already numbered."""


def rank_of_title(command: Sequence[str]) -> int | None:
    """The rank in the job by the title; ``None`` where it says none, or places in several groups, whose sizes are not in it."""
    title = command[0].strip() if command else ""
    if (server := _SERVER.match(title)) is not None:
        places = {kind: int(number) for kind, number in _PLACE.findall(server[1]) if kind not in ALONGSIDE}
        # With one kind of parallelism its rank is the job's; vLLM writes a first stage or replica out where there are more.
        return next(iter(places.values())) if len(places) == 1 and "DP" not in places else None
    actor = _ACTOR.match(title)
    return int(actor[1]) if actor is not None else None
