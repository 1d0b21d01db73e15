"""Profiles: fitted to steps, refused for another engine, kept up to date; and other models."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import example, given
from hypothesis import strategies as st
from measured_profiles import ENGINE, TRUE, profile_of, steps_of
from msgspec.structs import replace

from rescheduler.profiling.profile_command import drive, grid
from rescheduler.step_time.profile import (
    BatchTime,
    Recalibration,
    StepLog,
    fit_batch_time,
    fit_gradients,
    fit_quality,
    load_profile,
    read_engine,
    read_steps,
    typical_steps,
    write_profile,
)
from rescheduler.step_time.step_time import StepTime, create_step_time, step_seconds


@given(a=st.floats(1e-4, 0.1), b=st.floats(1e-6, 1e-2), c=st.floats(1e-8, 1e-4))
def test_a_linear_machine_is_found_exactly(a: float, b: float, c: float) -> None:
    found = fit_batch_time(steps_of(BatchTime(a, b, c)))
    for new, context in ((1, 1), (8, 7200), (500, 500)):
        assert found.seconds(new, context) == pytest.approx(a + b * new + c * context, rel=1e-6)


def test_one_pause_does_not_change_a_fit() -> None:
    steps = steps_of(TRUE)
    steps[3, 2] += 2.0
    assert fit_batch_time(typical_steps(steps)) == pytest.approx(TRUE, rel=1e-6)


def test_the_context_is_what_makes_an_estimate_good() -> None:
    steps = steps_of(BatchTime(0.02, 0.001, 2e-5), noise=0.01)
    quality = fit_quality(steps, fit_batch_time(steps))
    assert quality.error_p50 < 0.02 < quality.new_only_error_p50
    assert quality.r2 > 0.99


def test_gradients_are_the_slopes_of_prefill_and_decode() -> None:
    gradients = fit_gradients(steps_of(BatchTime(0.02, 0.0, 3e-6)), 8)
    assert gradients.decode == pytest.approx(3e-6, rel=1e-6)
    assert gradients.prompt == pytest.approx(3e-6, rel=1e-6)
    # A prompt token is computed and read.
    prompt = fit_gradients(steps_of(TRUE), 8).prompt
    assert prompt == pytest.approx(TRUE.per_new + TRUE.per_context, rel=1e-6)


@pytest.mark.parametrize("steps", [steps_of(TRUE)[:2], np.tile([1.0, 50.0, 0.1], (9, 1))])
def test_steps_that_are_all_alike_are_refused(steps: np.ndarray) -> None:
    with pytest.raises(ValueError, match="do not separate"):
        fit_batch_time(steps)


@pytest.mark.parametrize("name", ["model", "revision", "dtype", "machine"])
def test_a_profile_of_another_engine_is_refused(name: str) -> None:
    profile = profile_of(TRUE)
    profile.check(ENGINE)
    with pytest.raises(ValueError, match=rf"with {name} .*'other'.*headway profile"):
        profile.check(replace(ENGINE, **{name: "other"}))


@pytest.mark.parametrize(
    "text", ["", "[1]", "batch: {", "engine: {}", "\x00"], ids=["empty", "list", "yaml", "key", "0"]
)
def test_an_invalid_profile_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"profile\.yaml: no profile"):
        load_profile(path)


@pytest.mark.parametrize("batch", [[0, 0, 0], [-1, 0, 0.1], [float("inf"), 0, 0]])
def test_seconds_that_mean_nothing_are_refused(tmp_path: Path, batch: list[float]) -> None:
    path = tmp_path / "profile.yaml"
    write_profile(replace(profile_of(TRUE), batch=BatchTime(*batch)), path)
    with pytest.raises(ValueError, match="batch"):
        load_profile(path)


def test_a_log_is_read_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    log = StepLog(path, ENGINE)
    log.add(4, 800, 0.0312)
    assert read_engine(path) == ENGINE
    assert read_steps(path, 0).tolist() == [[4, 800, 0.0312]]
    size = path.stat().st_size
    log.add(12, 12, 0.25)
    log.close()
    with path.open("a") as file:
        file.write("3,60")  # a line that is being written
    assert read_steps(path, size).tolist() == [[12, 12, 0.25]]


def test_files_that_are_no_log_are_named(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    with pytest.raises(ValueError, match=r"steps\.csv: not a log"):
        read_steps(path)
    with pytest.raises(ValueError, match=r"steps\.csv\.engine\.json: does not say whose"):
        read_engine(path)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="no column 'new_tokens'; needs"):
        read_steps(path)


def test_the_grid_stays_within_what_an_engine_takes() -> None:
    cells = grid(ENGINE)
    assert {cell.requests for cell in cells} >= {1, ENGINE.max_num_seqs}
    for cell in cells:
        assert cell.requests + (cell.late_prompt_tokens > 0) <= ENGINE.max_num_seqs
        assert cell.prompt_tokens + cell.output_tokens <= ENGINE.max_model_len
        assert cell.late_prompt_tokens + 1 <= ENGINE.max_model_len


def served(recalibration: Recalibration, batch: BatchTime, steps: int) -> None:
    generator = np.random.default_rng(1)
    for _ in range(steps):
        new, context = int(generator.integers(1, 500)), int(generator.integers(500, 8000))
        recalibration.update(new, context, batch.seconds(new, context))


def test_a_machine_that_has_become_slower_is_followed() -> None:
    recalibration = Recalibration(TRUE)
    slower = BatchTime(*(1.5 * value for value in TRUE))
    served(recalibration, slower, 2000)
    assert recalibration.batch.seconds(100, 4000) == pytest.approx(
        slower.seconds(100, 4000), rel=0.02
    )


def test_steps_that_are_all_alike_leave_the_rest_where_it_was() -> None:
    recalibration = Recalibration(TRUE)
    for _ in range(2000):
        recalibration.update(4, 800, 2 * TRUE.seconds(4, 800))
    now = recalibration.batch
    assert now.seconds(4, 800) == pytest.approx(2 * TRUE.seconds(4, 800), rel=0.1)
    assert now.per_new == pytest.approx(TRUE.per_new, rel=0.3)


@given(seconds=st.floats(allow_nan=True, allow_infinity=True), before=st.integers(0, 200))
def test_one_step_cannot_poison_the_estimate(seconds: float, before: int) -> None:
    recalibration = Recalibration(TRUE)
    served(recalibration, TRUE, before)
    recalibration.update(64, 4000, seconds)
    served(recalibration, TRUE, 16)
    now, was = recalibration.batch, TRUE.seconds(64, 4000)
    assert now.seconds(64, 4000) == pytest.approx(was, rel=0.25)
    for value, profiled in zip(now, TRUE, strict=True):
        assert profiled / 4 <= value <= 4 * profiled


@pytest.mark.parametrize("models", [503, 200])
async def test_a_server_that_refuses_is_reported_in_one_error(models: int) -> None:
    async def list_models(http: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m"}]}, status=models)

    async def refused(http: web.Request) -> web.Response:
        return web.json_response({"error": "too long"}, status=400)

    app = web.Application()
    app.router.add_get("/v1/models", list_models)
    app.router.add_post("/v1/completions", refused)
    async with TestServer(app) as server:
        url = str(server.make_url("")).rstrip("/")
        with pytest.raises(ValueError, match="503" if models == 503 else "rejected a request: 400"):
            await anext(drive(url, grid(ENGINE), seed=0))
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:9: "):
        await anext(drive("http://127.0.0.1:9", grid(ENGINE), seed=0))


def test_bfio_is_the_papers_public_setting() -> None:
    model = create_step_time("bfio", slots=72)
    assert model.constant == pytest.approx((0.6e-3 * 72 + 35e-3) / 16)
    assert model.per_context == pytest.approx(1.5 * 2 * 576 * 61e-6 / 2**20)
    # 72 requests of 1,400 tokens: the 14 ms of Table 1.
    assert step_seconds(model, 72, 72 * 1400.0) == pytest.approx(0.01502, rel=1e-3)
    assert create_step_time("bfio", slots=8).constant < model.constant
    own = create_step_time("bfio", slots=72, constant=0.01, per_token=1e-6)
    assert step_seconds(own, 0, 1000.0) == pytest.approx(0.011)


def test_moe_leaves_half_of_the_time_to_the_mean_load_and_batch_counts_tokens() -> None:
    model = create_step_time("moe", slots=72, a=2e-7)
    assert model.per_mean_context == pytest.approx(1e-7)
    assert step_seconds(model, 64, 1e6) == pytest.approx(0.2)
    assert create_step_time("moe", slots=72, a=2e-7, b=0.0).per_mean_context == 0.0
    batch = create_step_time("batch", slots=72, a=0.01, b=1e-4, c=1e-7)
    assert step_seconds(batch, 100, 50_000.0) == pytest.approx(0.01 + 0.01 + 0.005)


def test_a_profile_is_the_batch_model_of_an_engine(tmp_path: Path) -> None:
    profile = profile_of(TRUE)
    write_profile(profile, tmp_path / "profile.yaml")
    assert load_profile(tmp_path / "profile.yaml") == profile
    model = create_step_time("profile", slots=8, path=tmp_path / "profile.yaml")
    assert step_seconds(model, 100, 4000.0) == pytest.approx(TRUE.seconds(100, 4000), rel=1e-6)
    with pytest.raises(ValueError, match=r"none\.yaml: no profile"):
        create_step_time("profile", slots=8, path=tmp_path / "none.yaml")


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
        ("new_tokens,context_tokens,seconds\n1,2,0.1\n1,two,0.1\n", "log.csv: .* line 3: "),
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
