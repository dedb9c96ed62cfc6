"""Records of one moment (an answer of RAS, logs as they were copied): they do not show whether the job moves.

Somebody looks at them because a job hangs, so they are taken as of one that stands still; every verdict says so.
"""

from __future__ import annotations

STANDSTILL_S = 60
"""For how long the job is taken to have stood still: longer than the engine's patience."""
UNTOLD = "whether the job moves: these records are of one moment, taken as of a job that stands still"
CONFIDENCE = 0.6
"""Chosen: at most so sure is what such records say. Ranks of a job that runs differ by a call as well."""
