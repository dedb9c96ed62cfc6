"""What a training framework was told about its layout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ncclwatch.cli.stated_layout import Stated, compare, from_command, from_file, name_unsure
from ncclwatch.errors import UsageError
from ncclwatch.model.topology import Group, Layout, Role, Topology


def topology(*groups: Group, layout: Layout | None = None) -> Topology:
    unknown = np.full(8, -1, np.int32)
    return Topology(8, groups, layout or Layout(), unknown, unknown)


def test_a_configuration_confirms_contradicts_and_names() -> None:
    stated = from_command(
        ["python", "train.py", "--tensor-model-parallel-size", "2", "--pipeline_model_parallel_size=4", "--lr", "1"]
    )
    assert stated.layout == Layout(tp=2, pp=4)
    lines = compare(stated, topology(layout=Layout(tp=2, pp=2)))
    assert lines == ["command line says PP 4, the calls show PP 2", "command line agrees: TP 2"]
    groups = [Group(i, i, Role.UNSURE, (2 * i, 2 * i + 1), evidence=("used alike",)) for i in range(4)]
    named = name_unsure(Stated(Layout(tp=2), "command line"), topology(*groups))
    assert {group.role for group in named.groups} == {Role.TENSOR}
    # Two dimensions of that size: which of them it is, is open.
    assert name_unsure(Stated(Layout(tp=2, cp=2), "command line"), topology(*groups)).by_role.keys() == {Role.UNSURE}


def test_a_configuration_file_that_says_nothing_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "layout.json"
    file.write_text('{"tp": 2, "context_parallel_size": "4", "pp": -1, "dp": true}')
    assert from_file(file).layout == Layout(tp=2, cp=4)
    for text in ("[]", "{", '{"tp": 0}', "\ud800".encode("utf-8", "surrogatepass").decode("latin-1")):
        file.write_text(text, "utf-8")
        with pytest.raises(UsageError):
            from_file(file)
