"""``python -m fuzz.replay TARGET FILE…``: inputs once more, without instrumentation; exits with 1 when one does harm."""

from __future__ import annotations

import sys
from pathlib import Path

from fuzz.harness import Guard
from fuzz.targets import every


def main() -> int:
    """Try the files."""
    target, status = every()[sys.argv[1]], 0
    with Guard() as guard:
        for file in sys.argv[2:]:
            finding = guard.check(target, Path(file).read_bytes())
            if finding is not None:
                print(finding.trace)
                print(f"{finding.kind} in {finding.where}")
                status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
