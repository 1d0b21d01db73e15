"""Whether an engine has failed, and whether it still has a request, whatever signs there are."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rescheduler.placement.evidence import (
    LONGEST_WAIT,
    EngineEvidence,
    EngineHealth,
    RequestEvidence,
    allowance,
)
from rescheduler.placement.instance_state import BreakerState, CircuitBreaker
from rescheduler.transfer.control_messages import RequestStatus

SILENT, REPORTS, LONGEST_STEP = 60.0, 2.0, 30.0


def new(now: float = 0.0) -> EngineEvidence:
    return EngineEvidence(SILENT, REPORTS, 7.0, now)


@dataclass
class Engine:
    """A process that lives, is stopped, hangs, or has ended, and what can be seen of it.

    Attributes:
        stopped_until: its process is stopped until then.
        hangs: it makes no step any more.
        ended: it has ended.
    """

    stopped_until: float = 0.0
    hangs: bool = False
    ended: bool = False
    steps: int = 0
    signs: list[tuple[str, float, int]] = field(default_factory=list)

    def look(self, now: float) -> None:
        """Make the signs that a probe at this time gets."""
        if self.ended:
            self.signs.append(("refused", now, 0))
        elif now >= self.stopped_until:
            self.steps += not self.hangs
            self.signs.append(("http", now, 0))
            self.signs.append(("control", now, self.steps))
            self.signs.append(("telemetry", now, 0))


def tell(evidence: EngineEvidence, sign: tuple[str, float, int]) -> None:
    kind, at, steps = sign
    if kind == "refused":
        evidence.refused(at)
    elif kind == "http":
        evidence.answered(at)
    elif kind == "telemetry":
        evidence.heard(at)
    else:
        evidence.reported(at, "a", steps, True)


CHANNELS = ("http", "control", "telemetry")


@given(
    stops=st.lists(st.tuples(st.integers(0, 30), st.floats(5.0, 40.0)), max_size=4),
    lost=st.lists(st.tuples(st.integers(0, 300), st.sampled_from(CHANNELS)), max_size=80),
    delays=st.lists(st.integers(0, 4), min_size=7, max_size=7),
    doubled=st.sets(st.integers(0, 300), max_size=40),
)
@settings(max_examples=150)
def test_no_living_engine_leaves_service(
    stops: list[tuple[int, float]],
    lost: list[tuple[int, str]],
    delays: list[int],
    doubled: set[int],
) -> None:
    """However often it is stopped for up to 40 s, and its signs are late, doubled or lost.

    At least one sign of each channel in 15 s comes through while it is not stopped.
    """
    engine, evidence, late = Engine(), new(), dict[int, list[tuple[str, float, int]]]()
    starts = dict(stops)
    dropped = {one for one in lost if one[0] % 5}
    for round in range(300):
        now = round * REPORTS
        if round % 40 in starts and now >= engine.stopped_until + 10.0:
            engine.stopped_until = now + starts.pop(round % 40)
        engine.signs.clear()
        engine.look(now)
        for sign in engine.signs:
            if (round, sign[0]) not in dropped:
                at = round + (delays[round % len(delays)] if sign[0] != "control" else 0)
                late.setdefault(at, []).append(sign)
                if round in doubled:
                    late.setdefault(at + 3, []).append(sign)
        for sign in reversed(late.pop(round, [])):
            tell(evidence, sign)
        assert not evidence.look(now, LONGEST_STEP), evidence.why
    assert evidence.health(300 * REPORTS) is not EngineHealth.FAILED


@given(
    fault=st.sampled_from(["ended", "vanished", "hangs"]),
    at=st.integers(1, 50),
    doubled=st.sets(st.integers(0, 200), max_size=20),
)
def test_no_dead_engine_stays_longer_than_its_bound(fault: str, at: int, doubled: set[int]) -> None:
    engine, evidence = Engine(), new()
    bound = {"ended": REPORTS, "vanished": SILENT, "hangs": LONGEST_STEP}[fault] + 2 * REPORTS
    for round in range(200):
        now = round * REPORTS
        if round == at:
            engine.ended, engine.hangs = fault == "ended", fault == "hangs"
            if fault == "vanished":
                engine.stopped_until = 1e9
        engine.signs.clear()
        engine.look(now)
        for sign in engine.signs:
            tell(evidence, sign)
            if round in doubled:
                tell(evidence, sign)
        evidence.look(now, LONGEST_STEP)
        if evidence.why:
            break
    assert round >= at
    assert (round - at) * REPORTS <= bound


def test_a_refusal_from_before_it_came_back_proves_nothing() -> None:
    evidence = new()
    evidence.answered(10.0)
    assert not evidence.refused(9.0)
    assert evidence.refused(10.5)
    assert evidence.why == "nothing listens on its port"
    evidence.returned(12.0)
    assert evidence.health(12.0) is EngineHealth.SERVES


def test_a_pause_of_the_proxy_is_no_silence_of_its_engines() -> None:
    evidence = new()
    for now in range(0, 10, 2):
        evidence.answered(float(now))
        assert not evidence.look(float(now), LONGEST_STEP)
    assert not evidence.look(500.0, LONGEST_STEP)
    assert not evidence.look(502.0, LONGEST_STEP)


def test_an_engine_that_was_stopped_has_not_hung() -> None:
    evidence = new()
    evidence.reported(0.0, "a", 7, True)
    evidence.reported(2.0, "a", 7, True)
    evidence.reported(45.0, "a", 7, True)  # the first after a stop
    assert not evidence.look(45.0, LONGEST_STEP)
    for now in range(47, 80, 2):
        evidence.reported(float(now), "a", 7, True)
    assert evidence.look(79.0, LONGEST_STEP)
    assert "no step" in evidence.why


def test_one_that_has_nothing_to_do_has_not_hung() -> None:
    evidence = new()
    for now in range(0, 200, 2):
        evidence.answered(float(now))
        evidence.reported(float(now), "a", 7, False)
        assert not evidence.look(float(now), LONGEST_STEP)


def test_a_request_waits_while_its_engine_has_it() -> None:
    request = RequestEvidence(0.0, 30.0)
    assert not request.is_due(14.0) and request.is_due(16.0)
    for now in range(16, 3000, 16):
        assert request.told(float(now), RequestStatus.WAITING, now, True, 30.0) == ""
    assert "no token" in request.told(LONGEST_WAIT + 1, RequestStatus.RUNNING, 9, True, 30.0)


def test_a_request_fails_once_its_engine_has_it_no_more() -> None:
    request = RequestEvidence(0.0, 30.0)
    request.progressed(1.0, 30.0)
    assert request.told(16.0, RequestStatus.UNKNOWN, 1, True, 30.0) == ""
    assert request.is_due(22.0), "asked again soon"
    assert "does not know" in request.told(22.0, RequestStatus.UNKNOWN, 1, True, 30.0)


def test_what_an_engine_has_not_handed_on_yet_is_not_lost() -> None:
    request = RequestEvidence(0.0, 30.0)
    request.progressed(1.0, 30.0)
    for now in range(16, 200, 5):
        assert request.told(float(now), RequestStatus.UNKNOWN, 1, False, 30.0) == ""


def test_a_request_that_was_never_there_may_be_on_its_way() -> None:
    allowed = allowance(60.0, 2, 100_000)
    assert allowed == 60.0 * 3 + 1000.0
    request = RequestEvidence(0.0, 60.0)
    assert request.told(31.0, RequestStatus.UNKNOWN, 1, True, allowed) == ""
    assert request.told(600.0, RequestStatus.UNKNOWN, 1, True, allowed) == ""
    assert "no token within 1180 s" in request.told(1181.0, RequestStatus.UNKNOWN, 1, True, allowed)


@pytest.mark.parametrize(
    ("status", "steps", "why"),
    [
        (RequestStatus.WAITING, 9, "no room within 10 s"),
        (RequestStatus.RUNNING, 5, "no step within 10 s"),
        (RequestStatus.RUNNING, 9, ""),
    ],
)
def test_a_moved_request_goes_back_if_it_does_not_run(
    status: RequestStatus, steps: int, why: str
) -> None:
    request = RequestEvidence(0.0, 10.0, lands=True)
    assert request.told(5.5, status, 5, True, 10.0) == ""
    assert request.told(11.0, status, steps, True, 10.0) == why


def test_time_in_which_a_client_did_not_read_does_not_count() -> None:
    request = RequestEvidence(0.0, 30.0)
    request.held(100.0)
    assert not request.is_due(110.0) and request.is_due(116.0)
    assert request.overdue(120.0, 30.0) == ""
    assert request.overdue(131.0, 30.0) == "no token within 30 s"


def test_an_engine_of_which_only_the_http_server_answers_fails() -> None:
    """As where the engine's process is stopped, but not that of its API."""
    evidence = new()
    evidence.reported(0.0, "a", 7, True)
    for now in range(0, 60, 2):
        evidence.answered(float(now))
        assert not evidence.look(float(now), LONGEST_STEP)
    evidence.answered(62.0)
    assert evidence.look(62.0, LONGEST_STEP)
    assert evidence.why == "only its HTTP server answers, for 60 s" and evidence.hangs
    evidence.returned(70.0)
    for now in range(70, 200, 2):
        evidence.answered(float(now))
        assert not evidence.look(float(now), LONGEST_STEP), "it has no control socket any more"


def test_tokens_are_signs_of_an_engine_whose_control_socket_is_silent() -> None:
    evidence = new()
    evidence.reported(0.0, "a", 7, True)
    for now in range(0, 600, 2):
        evidence.stepped(float(now))
        assert not evidence.look(float(now), LONGEST_STEP)


def test_a_moved_request_goes_back_from_an_engine_that_says_nothing_of_it() -> None:
    """Whether the target has vanished, or the request never comes there."""
    for waits in (
        lambda request, now: request.overdue(now, LONGEST_WAIT),
        lambda request, now: request.told(now, RequestStatus.UNKNOWN, 5, True, 1000.0),
    ):
        request = RequestEvidence(0.0, 10.0, lands=True)
        assert waits(request, 5.5) == ""
        assert waits(request, 11.0) == "no token within 10 s"


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
def test_it_is_closed_until_enough_failures_follow_a_success(events: list[str]) -> None:
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
