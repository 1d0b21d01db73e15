"""How much of a length can be known: the bound, and how far a forecast is on the way to it."""

import numpy as np
import pytest

from benchmarks.predictability import STEP, Prefixes, Scores, bound, figures_of

CAP = 200


@pytest.mark.parametrize("n", [2, 4, 16])
def test_few_continuations_do_not_move_the_bound(n: int) -> None:
    generator = np.random.default_rng(0)
    chance = generator.uniform(0.05, 0.95, 20_000)
    longer = generator.random((20_000, n, 1)) < chance[:, None, None]

    found = bound(longer)[:, 0]

    error = found.std() / len(found) ** 0.5
    assert found.mean() == pytest.approx((chance * (1 - chance)).mean(), abs=4 * error)


def test_one_length_tells_nothing_of_its_spread() -> None:
    assert np.isnan(bound(np.ones((3, 1, 2), dtype=bool))).all()


def _measured(n: int = 3) -> dict[str, float]:
    """Return the figures of prefixes whose lengths are geometric, each with a mean of its own."""
    generator = np.random.default_rng(1)
    means = generator.uniform(10, 150, 600)
    rests = np.minimum(generator.geometric(1 / means[:, None], (600, n)), CAP)
    horizons = np.arange(1, CAP, STEP)
    longer = rests[:, :, None] > horizons
    truth = (1 - 1 / means[:, None]) ** horizons
    shared = np.tile(truth.mean(axis=0), (600, 1))
    said = {"ours": truth, "kaplan_meier": shared, "prompt": (truth + shared) / 2}
    scores = {
        name: Scores(((curve[:, None] - longer) ** 2).mean(axis=1), curve.sum(axis=1))
        for name, curve in said.items()
    }
    scores = {"bound": Scores(bound(longer), rests.mean(axis=1))} | scores
    rows = np.arange(600)
    prefixes = Prefixes(80, rows, rows, np.full(600, CAP), rests[:, 0], rows < 300)
    return figures_of(prefixes, rests, scores, rows, "80")


def test_who_says_the_truth_is_at_the_bound_and_who_says_half_of_it_between() -> None:
    figures = _measured()

    assert figures["way_ours_80"] == pytest.approx(100, abs=figures["way_ours_80_half_interval"])
    assert 55 < figures["way_prompt_80"] < 90  # of a squared error a half takes three quarters
    assert "way_kaplan_meier_80" not in figures
    assert figures["continuations_80"] == 2
    assert figures["prefixes_80"] == 600


def test_the_best_rank_correlation_is_that_of_the_true_means() -> None:
    figures = _measured()

    near = 1.5 * figures["rank_correlation_bound_80_half_interval"]
    assert figures["rank_correlation_ours_80"] == pytest.approx(
        figures["rank_correlation_bound_80"], abs=near
    )


def test_a_part_of_the_prefixes_has_figures_of_its_own() -> None:
    rests = np.array([[5, 5], [90, 90], [5, 90]])
    longer = rests[:, :, None] > np.arange(1, 100, STEP)
    half = Scores(np.full((3, longer.shape[2]), 0.25), np.full(3, 50.0))
    scores = {"bound": Scores(bound(longer), rests.mean(axis=1)), "kaplan_meier": half}
    rows = np.arange(3)
    prefixes = Prefixes(0, rows, rows, np.full(3, 100), rests[:, 0], rows == 2)

    same = figures_of(prefixes, rests, scores, np.array([0, 1]), "0_cool")
    other = figures_of(prefixes, rests, scores, np.array([2]), "0_warm")

    assert same["ibs_bound_0_cool"] == 0
    assert other["ibs_bound_0_warm"] > 0.3
    assert other["prefixes_0_warm"] == 1
