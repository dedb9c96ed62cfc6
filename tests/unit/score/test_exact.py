"""Exact bounds, against figures that are published or follow by hand."""

from __future__ import annotations

import math

import pytest

from score.exact import binomial_tail, poisson_head, rate_bound, share


@pytest.mark.parametrize(
    ("count", "of", "low", "high"),
    [
        (0, 10, 0.0, 1 - 0.025 ** (1 / 10)),
        (10, 10, 0.025 ** (1 / 10), 1.0),
        (1, 10, 0.0025, 0.4450),  # Clopper and Pearson's charts; R: binom.test(1, 10)
        (5, 10, 0.1871, 0.8129),
        (97, 100, 0.9148, 0.9938),
        (1, 2, 0.0126, 0.9874),
    ],
)
def test_clopper_pearson(count: int, of: int, low: float, high: float) -> None:
    found = share(count, of)
    assert found.low == pytest.approx(low, abs=6e-5) and found.high == pytest.approx(high, abs=6e-5)


def test_the_interval_is_where_the_tails_are_as_large_as_they_may_be() -> None:
    for count, of in ((3, 60), (59, 60), (370, 400), (2950, 3000)):
        found = share(count, of)
        assert binomial_tail(count, of, found.low) == pytest.approx(0.025, abs=1e-9)
        assert 1 - binomial_tail(count + 1, of, found.high) == pytest.approx(0.025, abs=1e-9)


def test_nothing_of_nothing_is_anything() -> None:
    assert (share(0, 0).low, share(0, 0).high) == (0.0, 1.0)
    with pytest.raises(ValueError, match="no share"):
        share(3, 2)


def test_rates() -> None:
    assert rate_bound(0, 1.0) == pytest.approx(-math.log(0.05))
    assert rate_bound(0, 3000.0) == pytest.approx(-math.log(0.05) / 3000)
    assert rate_bound(1, 1.0) == pytest.approx(4.7439, abs=1e-4)
    assert rate_bound(10, 2.0) == pytest.approx(16.9622 / 2, abs=1e-4)
    assert poisson_head(100, 100 * rate_bound(100, 100.0)) == pytest.approx(0.05)
    assert rate_bound(0, 0.0) == math.inf
