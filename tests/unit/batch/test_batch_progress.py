"""When a batch is expected to end."""

import numpy as np
import pytest

from rescheduler.batch.batch_progress import BatchProgress, Pace


def test_nothing_is_expected_before_there_is_anything_to_go_by() -> None:
    pace = Pace(100, [], 0.0)
    assert pace.finish(0, 1.0) is None
    for _ in range(4):
        pace.answered(10, 1.0)
    assert pace.finish(4, 2.0) is None
    pace.answered(10, 2.0)
    assert pace.finish(5, 2.0) is not None


def test_equal_answers_at_a_steady_rate() -> None:
    """50 answers of 10 tokens in 100 s, and 50 left: 100 s more, by the equation."""
    pace = Pace(100, [], 0.0)
    for i in range(50):
        pace.answered(10, 2.0 * (i + 1))
    finish = pace.finish(50, 100.0)
    assert finish.expected == pytest.approx(100.0)
    half = 1.2816 * 100.0 * np.sqrt(1 / 50)
    assert (finish.soonest, finish.latest) == pytest.approx((100.0 - half, 100.0 + half))
    assert pace.finish(100, 100.0) == (0.0, 0.0, 0.0)


def test_answers_of_earlier_runs_tell_lengths_but_no_rate() -> None:
    pace = Pace(100, [1000] * 45, 0.0)
    for i in range(5):
        pace.answered(1000, i + 1.0)
    finish = pace.finish(50, 5.0)
    assert finish.expected == pytest.approx(50.0)


def test_while_nothing_comes_the_end_recedes() -> None:
    pace = Pace(100, [], 0.0)
    for i in range(10):
        pace.answered(10, i + 1.0)
    now, later = pace.finish(10, 10.0), pace.finish(10, 20.0)
    assert later.expected == pytest.approx(2 * now.expected)


def test_four_of_five_batches_end_within_the_interval() -> None:
    """Answers with a heavy tail that end at random times, looked at after a third of them."""
    generator, held, batches, n = np.random.default_rng(3), 0, 300, 300
    for _ in range(batches):
        lengths = np.round(np.exp(5 + 0.8 * generator.standard_normal(n))).astype(int)
        times = np.cumsum(generator.exponential(size=n) * lengths / 100.0)
        pace = Pace(n, [], 0.0)
        for tokens, at in zip(lengths[: n // 3].tolist(), times.tolist(), strict=False):
            pace.answered(tokens, at)
        finish = pace.finish(n // 3, times[n // 3 - 1])
        held += finish.soonest <= times[-1] - times[n // 3 - 1] <= finish.latest
    assert 0.7 < held / batches < 0.92


def test_without_a_terminal_lines_are_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rescheduler.batch.batch_progress._LOG_SECONDS", 0.0)
    with BatchProgress(2_000, 0, []) as progress:
        for _ in range(6):
            progress.answered(100)
        progress.answered(None)
        progress.retrying("HTTP 503")
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("7 of 2,000 answered, 1 errors, ")
    assert "80%" in last
    assert last.endswith("sending again: HTTP 503")


def test_an_end_in_thousands_of_years_is_not_said(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No clock can show it."""
    monkeypatch.setattr("rescheduler.batch.batch_progress._LOG_SECONDS", 0.0)
    with BatchProgress(10**9, 1000, [10**9] * 1000) as progress:
        for _ in range(6):
            progress.answered(1)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "1,006 of 1,000,000,000 answered"
