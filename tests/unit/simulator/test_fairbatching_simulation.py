"""FairBatching in the simulator: against the plain reference, by hand, and what is refused."""

from dataclasses import replace
from math import isnan
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from reference_simulator import ReferenceConfig, reference_run
from simulated_cases import Requests, assert_served_alike, engine_setup, ordered, reference_cases

from rescheduler.batching.batch_formation import FORMATIONS
from rescheduler.routing import create_policy
from rescheduler.simulator.config.service_rules import service_rules
from rescheduler.simulator.config.simulation_config import SLOConfig, read_config
from rescheduler.simulator.results.metrics import RunResult, run_metrics, summarise
from rescheduler.simulator.results.report import markdown_report
from rescheduler.simulator.simulation import Simulation, run, run_setup

Case = tuple[ReferenceConfig, Requests]


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
def test_the_engine_agrees_with_the_reference(case: Case, name: str, reading: str) -> None:
    agree(case, name, reading)


@given(
    fair_cases(dispatch="instant", b=0.125),
    st.sampled_from(["jsq_load", "pab"]),
    st.booleans(),
)
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clock": "barrier"}, "prefill.formation: fairbatching needs clock: independent"),
        ({"batching": "bin_packing"}, "needs batching: fcfs"),
        ({"migration": {"planners": ["star"]}}, "not simulated with migration"),
        ({"prefill": {"kind": "none", "formation": "fairbatching"}}, "of prefill.kind chunked"),
        ({"prefill": BASE["prefill"] | {"token_budget": 9}}, "fairbatching has none"),
        ({"prefill": BASE["prefill"] | {"expected_context": 9}}, "of .* fairbatching_tokens"),
        ({"slo": None}, "prefill.formation: fairbatching needs slo"),
        ({"step_time": {"name": "moe", "a": 1e-6}}, "step_time: {name: batch, a, b, c}"),
        ({"admission": {"pab": True}, "dispatch": "pool"}, "admission.pab: of dispatch instant"),
        (
            {"admission": {"pab": True}, "prefill": {"kind": "none"}},
            "admission.pab needs prefill.kind: chunked",
        ),
    ],
)
def test_what_is_not_simulated_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run_setup(read_config(BASE | changes))


def test_a_policy_that_goes_by_budgets_needs_objectives() -> None:
    config = read_config(BASE | {"slo": None, "prefill": {"kind": "chunked"}})
    with pytest.raises(ValueError, match="a policy that goes by prefill budgets needs slo"):
        run(run_setup(config), create_policy("pab"), seed=0)


def test_a_request_cannot_be_moved_where_decodes_sit_out() -> None:
    simulation = Simulation(run_setup(read_config(BASE)), create_policy("jsq"), seed=0)
    with pytest.raises(ValueError, match="migration is not simulated"):
        simulation.migrate(0, 1)
