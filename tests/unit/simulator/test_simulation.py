"""The compiled engine against the plain reference, and what every simulation keeps to."""

from contextlib import suppress
from dataclasses import replace
from math import isnan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_simulator import ReferenceConfig, reference_run
from simulated_cases import (
    ByChance,
    ByLength,
    InPython,
    ListedTrace,
    Requests,
    assert_decided_alike,
    assert_served_alike,
    engine_setup,
    ordered,
    reference_cases,
)

from rescheduler.batching.batch_formation import FORMATIONS
from rescheduler.routing import RoutingPolicy, create_policy
from rescheduler.routing.inputs import RoutingInputs
from rescheduler.routing.policy import kernel_of
from rescheduler.simulator.config.rules import service_rules
from rescheduler.simulator.config.simulation_config import (
    ArrivalsConfig,
    ClusterConfig,
    PrefillConfig,
    SimulationConfig,
    SLOConfig,
    TransferConfig,
    read_config,
)
from rescheduler.simulator.engine.routing_inputs import fill_routing_inputs
from rescheduler.simulator.forecasts.forecast_sources import (
    Binned,
    ForecastSource,
    Interval,
    KaplanMeier,
    Noisy,
    Oracle,
)
from rescheduler.simulator.results.metrics import RunResult, run_metrics, summarise
from rescheduler.simulator.results.report import markdown_report
from rescheduler.simulator.simulation import Simulation, run, run_setup

Case = tuple[ReferenceConfig, Requests]


JSQ_LOAD = create_policy("jsq_load")
POLICIES = ["fcfs", "jsq", "jsq_load", "br0", "round_robin"]


@given(reference_cases(), st.sampled_from(POLICIES))
def test_the_engine_agrees_with_the_reference(case: Case, name: str) -> None:
    config, requests = case
    policy = create_policy(name)
    expected = reference_run(config, requests, policy)
    result = run(engine_setup(config, requests), policy, seed=0)

    assert_served_alike(result, expected, rtol=1e-12)
    if config.clock == "barrier":
        assert result.imbalance == pytest.approx(expected.imbalance)
        assert result.max_minus_min == pytest.approx(expected.max_minus_min)
        assert result.idle_share == pytest.approx(expected.idle_share)
        assert result.series.load.tolist() == [step.loads for step in expected.steps]
        np.testing.assert_allclose(result.series.time, [step.time for step in expected.steps])


@given(reference_cases(drift=(1,)), st.sampled_from([*POLICIES, "overflow", "brh", "min_min"]))
def test_a_policy_decides_alike_in_python_and_in_the_engine(case: Case, name: str) -> None:
    config, requests = case
    policy = create_policy(name)
    compiled = run(engine_setup(config, requests), policy, seed=0)
    asked = run(engine_setup(config, requests), InPython(policy), seed=0)
    assert kernel_of(policy) is not None and kernel_of(InPython(policy)) is None
    assert_decided_alike(compiled, asked)


FORECASTS = [
    Oracle(),
    Noisy(sigma=0.5, interval=3),
    Binned(edges=[0, 2, 5, 9]),
    Interval(k=4),
    KaplanMeier(),
]


@given(
    reference_cases(drift=(1,)),
    st.sampled_from(FORECASTS),
    st.sampled_from(
        [create_policy("overflow", horizon=6), create_policy("bfio"), ByChance(), ByLength()]
    ),
    st.integers(0, 30),
)
def test_the_engine_has_the_inputs_of_its_view(
    case: Case, forecast: ForecastSource, policy: RoutingPolicy, at: int
) -> None:
    config, requests = case
    simulation = Simulation(engine_setup(config, requests, forecast), policy, seed=3)
    simulation.advance(until=at / 4)
    parts = simulation.engine
    waiting = parts.cluster.scalars[0]["waiting"]
    shown = fill_routing_inputs(
        parts.rules, parts.policy_state, parts.cluster, parts.arrivals, waiting
    )
    view = simulation.view()
    expected = policy.inputs(view)
    for name in RoutingInputs._fields:
        values = getattr(shown, name)
        if name in ("size", "survival", "remaining", "waited"):  # with room for a longer pool
            values = values[: view.n_waiting]
        np.testing.assert_allclose(
            values, getattr(expected, name), rtol=1e-12, atol=1e-9, err_msg=name
        )


def test_a_guess_does_not_pass_for_certain() -> None:
    config = ReferenceConfig(instances=2, slots=2, capacity=100)
    for forecast in (Noisy(sigma=0.5), Binned(edges=[0, 2, 5, 9])):
        setup = engine_setup(config, [(None, 5, 5)], forecast)
        with pytest.raises(ValueError, match=f"headroom .* forecast.name {forecast.name} does not"):
            run(setup, create_policy("headroom"), seed=0)


@given(reference_cases(drift=(1,)), st.integers(0, 30))
def test_pausing_changes_nothing(case: Case, at: int) -> None:
    config, requests = case
    whole = run(engine_setup(config, requests), create_policy("jsq_load"), seed=0)
    simulation = Simulation(engine_setup(config, requests), create_policy("jsq_load"), seed=0)
    simulation.advance(until=at / 4)
    simulation.view()
    simulation.advance()
    paused = simulation.result("jsq_load")
    np.testing.assert_array_equal(paused.requests.end, whole.requests.end)
    assert paused.imbalance == whole.imbalance


def test_a_request_larger_than_any_instance_is_refused_by_number() -> None:
    requests: Requests = [(None, 5, 5), (None, 60, 50)]
    config = ReferenceConfig(instances=2, slots=2, capacity=100)
    with pytest.raises(ValueError, match=r"request 1 .* prompt of 60 .* 50 tokens.* holds 100"):
        run(engine_setup(config, requests), create_policy("fcfs"), seed=0)


def test_more_requests_than_rows_and_output_buffer() -> None:
    n = 90_000
    config = ReferenceConfig(instances=2, slots=4, dispatch="instant", a=1.0)
    requests: Requests = [(0.0, 1, 1)] * n
    setup = engine_setup(config, requests)
    object.__setattr__(setup, "trace", ListedTrace(requests, block=50_000))
    result = run(setup, create_policy("round_robin"), seed=0)
    assert sorted(result.requests.number.tolist()) == list(range(n))
    assert result.seconds == n / 8


def test_a_migrated_request_moves_with_its_context_and_loses_no_token() -> None:
    # Two requests on each of two instances; number 0 moves after its first step of 1 s. Its
    # context of 11 tokens then takes 1 s + 11 / 11 a second; it decodes again from 3 s on.
    config = ReferenceConfig(instances=2, slots=4, clock="independent")
    requests: Requests = [(0.0, 10, 6), (0.0, 10, 6), (0.0, 10, 6), (0.0, 10, 6)]
    setup = engine_setup(config, requests)
    transfer = TransferConfig(handshake_s=1.0, gigabits_per_second=11 * 8e-9, bytes_per_token=1.0)
    setup = replace(setup, config=replace(setup.config, transfer=transfer))
    simulation = Simulation(setup, create_policy("round_robin"), seed=0)
    simulation.advance(until=0.5)
    assert simulation.view().instance[simulation.running_numbers() == 0].tolist() == [0]
    simulation.migrate(0, 1)
    simulation.advance(until=2.5)
    view = simulation.view()
    assert view.instance[simulation.running_numbers() == 0].tolist() == [1]
    assert view.running.tolist() == [1, 3]
    assert not simulation.advance()
    result = simulation.result("round_robin")
    order = np.argsort(result.requests.number)
    assert result.requests.end[order].tolist() == [8.0, 6.0, 6.0, 6.0]
    assert result.requests.instance[order].tolist() == [1, 1, 0, 1]
    assert result.requests.migrations[order].tolist() == [1, 0, 0, 0]
    assert result.tokens == 24 and result.migrations == 1 and result.preemptions == 0


@given(reference_cases(drift=(1,)), st.data())
def test_migrations_at_any_time_lose_nothing(case: Case, data: st.DataObject) -> None:
    config, requests = case
    setup = engine_setup(config, requests)
    transfer = TransferConfig(handshake_s=0.3, gigabits_per_second=1.0, bytes_per_token=1e7)
    setup = replace(setup, config=replace(setup.config, transfer=transfer))
    simulation = Simulation(setup, create_policy("jsq_load"), seed=0)
    at = 0.0
    while simulation.advance(until=at):
        numbers = simulation.running_numbers()
        if len(numbers):
            which = data.draw(st.integers(0, len(numbers) - 1))
            target = data.draw(st.integers(0, config.instances - 1))
            with suppress(ValueError):  # it does not decode just now, or is there already
                simulation.migrate(int(numbers[which]), target)
        at += 0.5
    result = simulation.result("jsq_load")
    assert sorted(result.requests.number.tolist()) == list(range(len(requests)))
    assert result.tokens == sum(output for _, _, output in requests)
    assert result.series.load.max(initial=0) <= config.capacity


def test_migrations_that_cannot_be_are_refused() -> None:
    config = ReferenceConfig(instances=2, slots=1)
    simulation = Simulation(engine_setup(config, [(None, 5, 5)]), create_policy("fcfs"), seed=0)
    simulation.advance(until=0.5)
    with pytest.raises(ValueError, match="instance 2 is not one of 2"):
        simulation.migrate(0, 2)
    with pytest.raises(ValueError, match="no request 7 is decoding"):
        simulation.migrate(7, 1)
    with pytest.raises(ValueError, match="request 0 is on instance 0 already"):
        simulation.migrate(0, 0)


def served(
    folder: Path,
    requests: Requests,
    cluster: ClusterConfig,
    step_time: tuple[float, float],
    policy: RoutingPolicy = JSQ_LOAD,
    kind: Any = "none",
) -> RunResult:
    """Serve requests of unknown lengths, with steps of a + b · new seconds."""
    rows = "".join(f"{arrival},{prompt},{output}\n" for arrival, prompt, output in requests)
    (folder / "trace.csv").write_text("arrival_s,input_tokens,output_tokens\n" + rows)
    config = SimulationConfig(
        cluster=cluster,
        clock="independent",
        prefill=PrefillConfig(kind),
        step_time={"name": "batch", "a": step_time[0], "b": step_time[1], "c": 0.0},
        trace={"path": str(folder / "trace.csv"), "requests": len(requests)},
        arrivals=ArrivalsConfig("trace"),
        forecast={"name": "none"},
    )
    return run(run_setup(config), policy, 0)


@pytest.mark.parametrize("kind", ["none", "chunked"])
def test_prefix_caching_spares_a_preempted_request_what_was_not_overwritten(
    kind: str, tmp_path: Path
) -> None:
    """Two requests of 40 + 30 tokens in a cache of 100, and a second for each token computed.

    With 51 tokens each the cache is full, and the second is preempted. The first goes on from 11
    generated tokens to 30, of which the last is never written: 18 tokens overwrite the second's
    last ones, and it computes as many again in place of 51.
    """
    ends = []
    for prefix_caching in (False, True):
        cluster = ClusterConfig(1, 4, 100, prefix_caching=prefix_caching)
        result = served(tmp_path, [(0.0, 40, 30)] * 2, cluster, (0.0, 1.0), kind=kind)
        assert result.requests.preemptions.tolist() == [0, 1]
        ends.append(result.requests.end)
    assert ends[0][0] == ends[1][0]
    assert ends[0][1] - ends[1][1] == pytest.approx(51 - 18)


def test_half_a_block_is_lost_to_each_request(tmp_path: Path) -> None:
    """Two requests that grow by nine tokens each in a cache of 100, in blocks of 8.

    40 + 40 tokens become 98, which fits; with the 4 tokens that are lost to each they do not.
    """
    preempted = {}
    for block, prompt in ((0, 40), (8, 40), (0, 45), (8, 45)):
        cluster = ClusterConfig(1, 4, 100, block_tokens=block)
        result = served(tmp_path, [(0.0, prompt, 10)] * 2, cluster, (0.0, 1.0))
        assert np.isfinite(result.requests.end).all()
        preempted[block, prompt] = int(result.requests.preemptions.sum())
    assert preempted == {(0, 40): 0, (8, 40): 1, (0, 45): 1, (8, 45): 1}


@pytest.mark.parametrize("kind", ["none", "chunked"])
@pytest.mark.parametrize(
    ("slots", "first_tokens"),
    [
        (1, [1.25, 4.5, 11.25]),  # the second is placed as the first ends, at 3.25
        (2, [1.25, 2.25, 11.25]),
    ],
)
def test_a_placed_request_is_on_its_way_for_a_while(
    tmp_path: Path, kind: str, slots: int, first_tokens: list[float]
) -> None:
    requests: Requests = [(0.0, 5, 3), (0.5, 5, 3), (10.0, 5, 3)]
    cluster = ClusterConfig(1, slots, dispatch_s=0.25)
    result = served(tmp_path, requests, cluster, (1.0, 0.0), kind=kind)
    assert result.requests.first_token.tolist() == pytest.approx(first_tokens)


def test_a_request_on_its_way_is_waited_for_before_the_next_decision(tmp_path: Path) -> None:
    """The first ends between two decisions, of which the earlier held the second back."""
    cluster = ClusterConfig(1, 4, 100, dispatch_s=0.1)
    policy = create_policy("max_capacity", every=0.05)
    result = served(tmp_path, [(0.0, 60, 3)] * 2, cluster, (0.01, 0.0), policy)
    assert result.requests.end.tolist() == pytest.approx([0.13, 0.28])


@st.composite
def fair_cases(draw: st.DrawFn, /, **fixed: Any) -> Case:
    """Draw a cluster with objectives, whose times are sums of halves, so that none is rounded."""
    formation = draw(st.sampled_from(sorted(FORMATIONS)))
    own_budget = formation in ("fairbatching", "fairbatching_tokens")
    chosen = {
        "clock": "independent",
        "prefill": "chunked",
        "batching": "fcfs",
        "mean_context": 0.0,
        "formation": formation,
        "token_budget": None if own_budget else draw(st.sampled_from([None, 2, 5, 12])),
        "ttft": draw(st.sampled_from([0.5, 2.0, 8.0])),
        "tpot": draw(st.sampled_from([0.25, 0.5, 2.0])),
        "from_first": draw(st.booleans()),
    } | fixed
    return draw(reference_cases(**chosen))


def agree(case: Case, name: str, reading: Any) -> None:
    config, requests = case
    policy = create_policy(name)
    expected = reference_run(config, requests, policy)
    result = run(engine_setup(config, requests, tpot=reading), policy, seed=0)
    assert_served_alike(result, expected)
    worst = [one.worst if reading == "worst" else one.worst_since_due for one in expected.requests]
    np.testing.assert_array_equal(ordered(result, "tpot_worst"), worst)
    assert result.most_held == max((max(step.loads) for step in expected.steps), default=0)


@given(
    fair_cases(),
    st.sampled_from(["jsq_load", "round_robin"]),
    st.sampled_from(["worst", "deadline"]),
)
def test_fair_batches_agree_with_the_reference(case: Case, name: str, reading: str) -> None:
    agree(case, name, reading)


@given(fair_cases(dispatch="instant", b=0.125), st.sampled_from(["jsq_load", "pab"]), st.booleans())
def test_budgets_and_admission_agree_with_the_reference(
    case: Case, name: str, whole_steps: bool
) -> None:
    config, requests = case
    turning = replace(config, turns_away=True, whole_steps=whole_steps)
    agree((turning, requests), name, "worst")


@given(fair_cases())
def test_time_between_tokens_is_counted_over_steps_sat_out(case: Case) -> None:
    config, requests = case
    result = run(engine_setup(config, requests), create_policy("jsq_load"), seed=0)
    assert result.itl_histogram.sum() == sum(output - 1 for _, _, output in requests)


def one_instance(
    formation: str, requests: Requests, reading: Any = "deadline", **changes: Any
) -> RunResult:
    """Run t = 1 + new/8 on one instance with TTFT 4 and TPOT 2."""
    config = ReferenceConfig(
        1, 4, dispatch="instant", clock="independent", prefill="chunked", formation=formation,
        b=0.125, ttft=4.0, tpot=2.0,
    )  # fmt: skip
    setup = engine_setup(replace(config, **changes), requests, tpot=reading)
    return run(setup, create_policy("jsq_load"), seed=0)


def test_a_prompt_beyond_the_budget_is_turned_away_and_counts_as_violated() -> None:
    # Within a TTFT of 4 s an instance computes (4 − 1) · 8 = 24 tokens. The first leaves 2 of them,
    # not enough for the second. The third is beyond it, too, but finds the instance empty.
    requests: Requests = [(0.0, 22, 1), (0.0, 4, 1), (20.0, 80, 1)]
    result = one_instance("fairbatching", requests, turns_away=True)
    assert [isnan(end) for end in ordered(result, "end")] == [False, True, False]
    assert ordered(result, "instance") == [0, 0, 0]
    assert ordered(result, "arrival") == [0.0, 0.0, 20.0]
    assert all(isnan(ordered(result, name)[1]) for name in ("placed", "start", "first_token"))
    figures = run_metrics(result, SLOConfig(4.0, 2.0, "deadline"))
    assert figures["rejected"] == 1
    assert figures["violated"] == pytest.approx(2 / 3)  # and the last took 11 s
    assert figures["goodput"] == pytest.approx(1 / result.seconds)
    assert figures["requests_per_s"] == pytest.approx(2 / result.seconds)
    assert figures["offered_per_s"] == pytest.approx(3 / 20)
    config = read_config({"trace": {"name": "geometric"}})
    report = markdown_report({"fair": summarise([figures])}, config)
    assert "| rejected |" in report and "violated, %" in report


def test_more_are_turned_away_than_the_output_buffer_holds() -> None:
    n = 30_000
    result = one_instance("sarathi", [(0.0, 20, 1)] * n, turns_away=True)
    assert ordered(result, "number") == list(range(n))
    assert sum(isnan(end) for end in result.requests.end) == n - 1


def test_the_worst_tpot_is_a_running_mean() -> None:
    # Tokens at 2 (prompt), 3.125, then a prompt of 16 makes the next step 3.125 s: 6.25, and 7.375.
    requests: Requests = [(0.0, 8, 4), (3.0, 16, 1)]
    result = one_instance("sarathi", requests, "worst")
    assert ordered(result, "tpot_worst")[0] == max(1.125, 4.25 / 2, 5.375 / 3)
    assert isnan(ordered(result, "tpot_worst")[1])
    since_due = one_instance("sarathi", requests, "deadline")
    assert ordered(since_due, "tpot_worst")[0] == (6.25 - 4) / 2


def test_a_budget_of_tokens_leaves_time_for_the_context_that_is_expected() -> None:
    chunked = {"kind": "chunked", "formation": "fairbatching_tokens", "expected_context": 20_000}
    for prefill, constant in ((chunked, 0.012), ({"kind": "chunked"}, 0.01)):
        config = read_config(BASE | {"prefill": prefill})
        rules = service_rules(config, run_setup(config).step_time)
        assert rules.batches.constant == pytest.approx(constant)


BASE: dict[str, Any] = {
    "clock": "independent",
    "dispatch": "instant",
    "prefill": {"kind": "chunked", "formation": "fairbatching"},
    "step_time": {"name": "batch", "a": 0.01, "b": 1e-4, "c": 1e-7},
    "trace": {"name": "geometric", "requests": 20},
    "arrivals": {"kind": "poisson", "rate": 5.0},
    "slo": {"ttft_s": 0.5, "tpot_s": 0.05},
}


def test_a_request_cannot_be_moved_where_decodes_sit_out() -> None:
    simulation = Simulation(run_setup(read_config(BASE)), create_policy("jsq"), seed=0)
    with pytest.raises(ValueError, match="migration is not simulated"):
        simulation.migrate(0, 1)
