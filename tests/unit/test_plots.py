"""What figures of forecasts, clusters and plans show."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.container import ErrorbarContainer
from matplotlib.text import Text
from migration_views import view
from routing_views import cluster

from predictor import ForecastError, PointForecast, SurvivalForecast
from rescheduler.cluster.cluster_view import ClusterView
from rescheduler.migration import Migration, Plan

PLAN = Plan([Migration(1, 0, 1, 0.6), Migration(0, 0, 1, 0.1)], "of $2 requests the best, $1 each")


@pytest.fixture(autouse=True)
def no_figures_left() -> Any:
    yield
    pyplot.close("all")


@pytest.fixture
def seen() -> ClusterView:
    return view([(300, 40), (200, 80)], [(100, 9)], [], capacity=1000)


def bars(axes: Axes) -> list[tuple[float, float, float]]:
    """Row, left end and length of the bars."""
    found = [
        (bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width())  # type: ignore[attr-defined]
        for bar in axes.patches
        if hasattr(bar, "get_width")
    ]
    return sorted((round(row, 6), left, width) for row, left, width in found)


def texts(axes: Axes) -> list[str]:
    return [text.get_text() for text in axes.texts if text.get_text()]


def expected_marks(axes: Axes) -> list[tuple[float, float]]:
    """Load and row of the marks of what is ahead."""
    (marks,) = [found for found in axes.containers if isinstance(found, ErrorbarContainer)]
    line = marks.lines[0]
    return [tuple(point) for point in line.get_xydata().tolist()]


def test_a_forecast_is_drawn_with_its_median_and_interval() -> None:
    forecast = SurvivalForecast.new([0, 100, 200], [[1, 0.5, 0], [1, 0.1, 0]])
    axes = forecast.plot()
    curve, dot, _, other = axes.lines
    tokens, survival = np.asarray(curve.get_data())
    np.testing.assert_allclose(survival, forecast.at(tokens)[0])
    assert tokens[0] == 0
    assert dot.get_xydata().tolist() == [[100, 0.5]]
    assert other.get_xydata().tolist() == [[np.ceil(forecast.median()[1]), 0.5]]
    legend = axes.get_legend()
    assert legend.get_texts()[0].get_text() == "median 100, 80% between 20 and 180"
    shade = axes.collections[0].get_paths()[0].get_extents()
    assert (shade.x0, shade.x1) == pytest.approx((20, 180), abs=1)


def test_a_forecast_that_is_cut_falls_at_its_limit() -> None:
    forecast = SurvivalForecast.new([0, 1000], [[1, 0]], limit=50)
    tokens, survival = np.asarray(forecast.plot().lines[0].get_data())
    assert survival[tokens == 49] > 0.9
    assert survival[tokens == 50] == 0


def test_a_point_forecast_is_a_step() -> None:
    tokens, survival = np.asarray(PointForecast.new([30]).plot().lines[0].get_data())
    assert (survival == (tokens < 30)).all()


@pytest.mark.parametrize("n", [0, 9])
def test_more_curves_than_can_be_told_apart_are_refused(n: int) -> None:
    with pytest.raises(ForecastError, match=rf"1 to 8 requests, not {n}: .*select"):
        PointForecast.new(np.ones(n)).plot()
    assert not pyplot.get_fignums()


def test_a_view_is_drawn_as_a_bar_of_requests_an_instance(seen: ClusterView) -> None:
    axes = seen.plot(steps=50)
    assert bars(axes) == [(0, 0, 300), (0, 300, 200), (1, 0, 100)]
    # Of the requests, only the second outlives 50 steps.
    assert expected_marks(axes) == [(250, 0), (0, 1), (0, 2)]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "instance 0", "instance 1", "instance 2",
    ]  # fmt: skip
    assert axes.yaxis_inverted()
    capacities = [segment[0][0] for segment in axes.collections[0].get_segments()]  # type: ignore[attr-defined]
    assert capacities == [1000] * 3


def test_a_view_without_forecasts_limits_or_requests_is_drawn() -> None:
    axes = replace(view([(300, 40)], []), forecast=None).plot()
    assert bars(axes) == [(0, 0, 300)]
    assert not [found for found in axes.containers if isinstance(found, ErrorbarContainer)]
    assert bars(cluster([[], []], []).plot()) == []


def test_a_plan_is_drawn_as_arrows_between_the_bars(seen: ClusterView) -> None:
    axes = PLAN.plot(seen)
    arrows = [text.arrow_patch for text in axes.texts if getattr(text, "arrow_patch", None)]
    assert len(arrows) == 2
    # Where the two are, and where they will be, one behind the other.
    drawn = bars(axes)
    for moved in ((0, 300, 200), (1, 100, 200), (0, 0, 300), (1, 300, 300)):
        assert moved in drawn
    assert texts(axes) == [
        "request 1, about 80 tokens to come",
        "request 0, about 40 tokens to come",
    ]


def test_a_plan_gives_its_reason_letter_by_letter(seen: ClusterView) -> None:
    (title,) = [
        text
        for text in PLAN.plot(seen).get_children()
        if isinstance(text, Text) and text.get_text() == PLAN.reason
    ]
    assert not title.get_parse_math()  # or $...$ would be set as mathematics, or refused


def test_a_plan_without_moves_shows_the_cluster_and_why(seen: ClusterView) -> None:
    axes = Plan([], "all is well").plot(seen)
    assert axes.get_title(loc="left") == "all is well"
    assert bars(axes) == bars(seen.plot())
    assert not texts(axes)


def test_a_plan_of_another_cluster_leaves_no_figure(seen: ClusterView) -> None:
    with pytest.raises(IndexError):
        Plan([Migration(3, 0, 1, 0.5)], "of another").plot(seen)
    assert not pyplot.get_fignums()


def test_figures_are_drawn_on_the_axes_that_they_are_given(seen: ClusterView) -> None:
    _, given = pyplot.subplots(1, 3)
    drawn = [PointForecast.new([9]).plot(given[0]), seen.plot(given[1]), PLAN.plot(seen, given[2])]
    assert drawn == list(given)
    assert len(pyplot.get_fignums()) == 1


def test_new_figures_have_no_background_and_leave_the_style_as_it_was(seen: ClusterView) -> None:
    before = dict(pyplot.rcParams)
    axes = PLAN.plot(seen)
    for patch in (axes.patch, axes.figure.patch):  # type: ignore[union-attr]
        assert patch.get_facecolor()[3] == 0
    colours = {axes.xaxis.label.get_color(), *(text.get_color() for text in axes.texts)}
    assert colours <= {"#737d87", "737d87"} and dict(pyplot.rcParams) == before


def test_objects_say_in_a_line_what_they_are(seen: ClusterView) -> None:
    curve = SurvivalForecast.new([0, 100, 200], [[1, 0.5, 0]])
    assert repr(curve) == "<SurvivalForecast: median 100 tokens, 80% between 20 and 180>"
    assert repr(seen.forecast) == "<PointForecast: 3 requests, medians from 9 to 80 tokens>"
    assert repr(PointForecast.new([])) == "<PointForecast: no requests>"
    assert repr(seen) == (
        "<ClusterView: 3 instances with 500, 100, 0 context tokens, 3 requests running, 0 waiting>"
    )
