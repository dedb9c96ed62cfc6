"""Order of a whole run: what needs a quiet machine comes last, when nothing runs beside it any more (`make test`)."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``quiet`` go to the end, otherwise in their order."""
    items.sort(key=lambda item: item.get_closest_marker("quiet") is not None)
