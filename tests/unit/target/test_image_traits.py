"""Traits in snapshot files: kept, missing in old ones, and refused in a line where they are none."""

from __future__ import annotations

from dataclasses import asdict

import msgspec
import pytest

from ncclwatch.model.traits import GpuTrait, Traits
from ncclwatch.target import image
from unit.synthetic import process


def test_traits_come_back_as_they_were() -> None:
    traits = Traits(settings=(("NCCL_ALGO", "Ring"),), cpus="0-3", cpu_quota=1.5, gpus=(GpuTrait("0000:07:00.0", "H100"),))
    info = process(0, 2)
    written = msgspec.json.decode(msgspec.json.encode({**asdict(info), "traits": asdict(traits)}))
    assert image._info(written).traits == traits


def test_snapshots_of_earlier_releases_have_none() -> None:
    written = msgspec.json.decode(msgspec.json.encode(asdict(process(0, 2))))
    del written["traits"]
    assert image._info(written).traits is None


@pytest.mark.parametrize("traits", [1, "x", [], {"cpus": 7}, {"gpus": [{}]}, {"settings": {"a": "b"}}])
def test_what_is_no_traits_is_refused_as_a_damaged_file_is(traits: object) -> None:
    written = msgspec.json.decode(msgspec.json.encode(asdict(process(0, 2)))) | {"traits": traits}
    with pytest.raises(image._MEANINGLESS):
        image._info(written)
