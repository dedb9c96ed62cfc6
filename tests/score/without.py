"""A plugin of pytest: the hang diagnosis without one rule (``-p score.without``, the rule in ``NCCLWATCH_WITHOUT``)."""

from __future__ import annotations

import os

from ncclwatch.engine import diagnose as diagnosis
from ncclwatch.engine.rules import RULES

RULE = "NCCLWATCH_WITHOUT"
"""Variable of the environment that names the rule."""


def pytest_configure() -> None:
    """Take the rule out of the table that the diagnosis goes by; the table that is printed and checked stays."""
    for stratum in diagnosis._BY_STRATUM:
        chosen = (rule for rule in RULES if rule.stratum is stratum and rule.id != os.environ[RULE])
        diagnosis._BY_STRATUM[stratum] = tuple(chosen)
