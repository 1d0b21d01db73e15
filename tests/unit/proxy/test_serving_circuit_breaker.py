"""The circuit breaker of an instance."""

from hypothesis import given
from hypothesis import strategies as st

from rescheduler.placement.instance_state import BreakerState, CircuitBreaker


def test_a_refused_connection_is_enough() -> None:
    breaker = CircuitBreaker(3, 1.0)
    assert breaker.failed(0.0, certain=True)
    assert not breaker.closed


def test_one_probe_is_due_after_the_wait_and_closes_it_when_it_succeeds() -> None:
    breaker = CircuitBreaker(1, 2.0)
    breaker.failed(10.0)
    assert not breaker.probe_due(11.9)
    assert breaker.seconds_to_probe(11.5) == 0.5
    assert breaker.probe_due(12.0)
    assert breaker.state is BreakerState.HALF_OPEN
    assert not breaker.probe_due(12.0)  # it is under way
    breaker.succeeded()
    assert breaker.closed


@given(st.integers(1, 12))
def test_the_wait_doubles_with_every_probe_that_fails_up_to_sixteen_times(probes: int) -> None:
    breaker, now = CircuitBreaker(1, 1.0), 0.0
    breaker.failed(now)
    for probe in range(probes):
        wait = min(2.0**probe, 16.0)
        assert breaker.seconds_to_probe(now) == wait
        now += wait
        assert breaker.probe_due(now)
        assert not breaker.failed(now)  # it was out of service before
    breaker.succeeded()
    breaker.failed(now)
    assert breaker.seconds_to_probe(now) == 1.0  # back to the first wait


@given(st.lists(st.sampled_from(["fail", "probe", "succeed"]), max_size=60))
def test_it_is_closed_until_enough_failures_follow_a_success(
    events: list[str],
) -> None:
    breaker, failures, now = CircuitBreaker(3, 1.0), 0, 0.0
    for event in events:
        now += 100.0
        if event == "fail":
            failures += 1
            was_closed = breaker.closed
            assert breaker.failed(now) == (was_closed and failures == 3)
        elif event == "succeed":
            breaker.succeeded()
            failures = 0
        else:
            breaker.probe_due(now)
        assert breaker.closed == (failures < 3)
