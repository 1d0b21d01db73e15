"""Seconds of a step: the papers' models, and tables fitted to a log."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from measured_profiles import TRUE, profile_of

from rescheduler.step_time.profile import write_profile
from rescheduler.step_time.step_time import StepTime, create_step_time, step_seconds


def test_bfio_is_the_papers_public_setting() -> None:
    model = create_step_time("bfio", slots=72)
    assert model.constant == pytest.approx((0.6e-3 * 72 + 35e-3) / 16)
    assert model.per_context == pytest.approx(1.5 * 2 * 576 * 61e-6 / 2**20)
    # 72 requests of 1,400 tokens: the 14 ms of Table 1.
    assert step_seconds(model, 72, 72 * 1400.0) == pytest.approx(0.01502, rel=1e-3)
    assert create_step_time("bfio", slots=8).constant < model.constant
    own = create_step_time("bfio", slots=72, constant=0.01, per_token=1e-6)
    assert step_seconds(own, 0, 1000.0) == pytest.approx(0.011)


def test_moe_leaves_half_of_the_time_to_the_mean_load() -> None:
    model = create_step_time("moe", slots=72, a=2e-7)
    assert model.per_mean_context == pytest.approx(1e-7)
    assert step_seconds(model, 64, 1e6) == pytest.approx(0.2)
    assert create_step_time("moe", slots=72, a=2e-7, b=0.0).per_mean_context == 0.0


def test_batch_counts_new_and_context_tokens() -> None:
    model = create_step_time("batch", slots=72, a=0.01, b=1e-4, c=1e-7)
    assert step_seconds(model, 100, 50_000.0) == pytest.approx(0.01 + 0.01 + 0.005)


def test_a_profile_is_the_batch_model_of_an_engine(tmp_path: Path) -> None:
    write_profile(profile_of(TRUE), tmp_path / "profile.yaml")
    model = create_step_time("profile", slots=8, path=tmp_path / "profile.yaml")
    assert step_seconds(model, 100, 4000.0) == pytest.approx(TRUE.seconds(100, 4000), rel=1e-6)
    with pytest.raises(ValueError, match=r"none\.yaml: no profile"):
        create_step_time("profile", slots=8, path=tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("roofline", {}, "no model 'roofline'; known: bfio, moe, batch, profile, table"),
        ("batch", {"a": 0.01}, "missing 2 required"),
        ("batch", {"a": 0.01, "b": -1e-4, "c": 0.0}, "must not be below 0"),
        ("batch", {"a": 0.0, "b": 0.0, "c": 0.0}, "not all 0"),
        ("batch", {"a": "fast", "b": 0.0, "c": 0.0}, "not supported between"),
        ("moe", {"a": float("nan")}, "must not be below 0"),
        ("bfio", {"speed": 2}, "unexpected keyword argument 'speed'"),
        ("table", {"path": "no such file.csv"}, "no such file.csv"),
        ("table", {"path": "x.csv", "knots": 1}, "knots must be at least 2"),
    ],
)
def test_refusals(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_step_time(name, slots=72, **options)


def write_log(path: Path, rows: list[tuple[float, float, float]]) -> StepTime:
    text = "new_tokens,context_tokens,seconds\n" + "".join(f"{a},{b},{c}\n" for a, b, c in rows)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return create_step_time("table", slots=72, path=str(path))


def test_a_table_interpolates_between_measured_steps(tmp_path: Path) -> None:
    rows = [(1, 0, 0.030), (1, 1000, 0.040), (3, 0, 0.050), (3, 1000, 0.080)]
    model = write_log(tmp_path / "log.csv", rows)
    for new, context, seconds in rows:
        assert step_seconds(model, new, context) == pytest.approx(seconds)
    assert step_seconds(model, 2, 500) == pytest.approx(0.050)
    # Beyond the log its trend goes on, 20 ms per 1,000 tokens; below it nothing gets faster.
    assert step_seconds(model, 1, 2000) == pytest.approx(0.060)
    assert step_seconds(model, 0, 0) == pytest.approx(0.030)


def test_a_table_takes_medians_and_never_falls(tmp_path: Path) -> None:
    slow_outlier = [(1, 0, 0.01), (1, 0, 0.01), (1, 0, 5.0), (1, 100, 0.02)]
    assert step_seconds(write_log(tmp_path / "a.csv.gz", slow_outlier), 1, 0) == 0.01
    falling = [(1, 0, 0.03), (1, 100, 0.01), (1, 200, 0.05)]
    model = write_log(tmp_path / "b.csv", falling)
    times = [step_seconds(model, 1, load) for load in range(0, 300, 10)]
    assert np.all(np.diff(times) >= 0)
    assert times[0] == pytest.approx(0.02), "between what was measured and what comes after"


def test_cells_without_steps_follow_the_linear_trend(tmp_path: Path) -> None:
    rows = [(n, c, 0.01 + 1e-3 * n + 1e-6 * c) for n, c in [(1, 0), (1, 1000), (9, 0)]]
    model = write_log(tmp_path / "log.csv", rows)
    assert step_seconds(model, 9, 1000) == pytest.approx(0.01 + 9e-3 + 1e-3, rel=1e-6)


@example([(0, 3, 0.5), (0, 4, 1.0), (1, 0, 1.0)])  # the plane through them is 0 at 0, 0
@given(
    st.lists(
        st.tuples(
            st.integers(0, 500), st.integers(0, 50_000), st.floats(1e-4, 1.0, allow_nan=False)
        ),
        min_size=1,
        max_size=60,
    )
)
def test_more_work_never_takes_less_time(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, float]]
) -> None:
    model = write_log(tmp_path_factory.mktemp("log") / "log.csv", rows)
    table = np.array(
        [
            [step_seconds(model, new, load) for load in range(0, 80_000, 8_000)]
            for new in range(0, 800, 100)
        ]
    )
    assert np.all(table > 0)
    assert np.all(np.diff(table, axis=0) >= -1e-9)
    assert np.all(np.diff(table, axis=1) >= -1e-9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("new_tokens,seconds\n1,0.1\n", "log.csv: .* no column 'context_tokens'; needs new_tokens"),
        ("", "no column 'new_tokens'"),
        ("new_tokens,context_tokens,seconds\n", "log.csv: no steps in it"),
        (
            "new_tokens,context_tokens,seconds\n1,2,0.1\n1,two,0.1\n",
            "log.csv: .* line 3: ",
        ),
        ("new_tokens,context_tokens,seconds\n1,2\n", "log.csv: .* line 2: .* numbers"),
        ("new_tokens,context_tokens,seconds\n1,2,0\n", "log.csv: .* line 2: .* not above 0"),
        ("new_tokens,context_tokens,seconds\n-1,2,0.1\n", "line 2: tokens below 0"),
        ("new_tokens,context_tokens,seconds\n1,nan,0.1\n", "line 2: tokens below 0"),
    ],
)
def test_a_broken_log_is_named_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        create_step_time("table", slots=72, path=tmp_path / "log.csv")
