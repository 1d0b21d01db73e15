"""The environment: Gymnasium's contract, what a step is, and what it is rewarded with."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st
from measured_profiles import TRUE, profile_of
from reference_simulator import ReferenceConfig
from router_tasks import TASK, checkpoint, random_layers, small_setup
from simulated_cases import engine_setup

from rescheduler.papers.jain_router.environment import (
    RouterConfig,
    RouterEnvironment,
    Shaping,
    router_environments,
)
from rescheduler.papers.jain_router.workload_impact import (
    ImpactRules,
    decode_impact,
    guidance,
    mixing,
    prompt_impact,
)
from rescheduler.routing import LearnedRouter
from rescheduler.routing.inputs import routing_inputs
from rescheduler.routing.learned.rl import (
    action_values,
    network_parameters,
    router_state,
    state_size,
)
from rescheduler.simulator.engine.engine_state import FIRST_POOL
from rescheduler.simulator.simulation import run
from rescheduler.step_time.profile import write_profile

FAST = {"kind": "poisson", "rate": 2000.0}

few = settings(max_examples=settings.default.max_examples // 2)  # an episode each


@pytest.mark.filterwarnings("ignore:.*A Box observation space:UserWarning")
def test_gymnasium_finds_nothing_wrong() -> None:
    check_env(RouterEnvironment(small_setup(), TASK), skip_render_check=True)


def lone_request() -> RouterEnvironment:
    """One request of 10 prompt and 3 output tokens at 0.1 s; a step takes 0.25 s."""
    config = ReferenceConfig(
        instances=2,
        slots=4,
        capacity=100,
        clock="independent",
        dispatch="instant",
        prefill="chunked",
        a=0.25,
    )
    task = RouterConfig(interval=0.25, edges=(0, 2), prompt_seconds=0.01, token_seconds=0.1)
    return RouterEnvironment(engine_setup(config, [(0.1, 10, 3)]), task)


def test_rewards_and_work_of_a_lone_request_are_those_computed_by_hand() -> None:
    environment = lone_request()
    environment.reset(seed=0)
    alone = 10 * 0.01 + 3 * 0.1  # T̂
    # At 0.25 s it waits; at 0.5 s it has its first token, its second at 0.75 s, and has ended at 1.
    _, rewards, ended, _, infos = zip(
        *(environment.step(np.int64(1)) for _ in range(4)), strict=True
    )
    assert rewards == pytest.approx([-1 / alone, -2 / 3 / alone, -1 / 3 / alone, 60.0])
    assert ended == (False, False, False, True)
    assert [info["routable"] for info in infos] == [True, False, False, False]
    # New in the step in which it came, and then no more.
    expected = [
        [1 / alone, 1.0, 1 / alone, 1.0],
        [2 / 3 / alone, 2 / 3, 0.0, 0.0],
        [1 / 3 / alone, 1 / 3, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.0],
    ]
    np.testing.assert_allclose([info["work"] for info in infos], expected)
    result = environment.simulation.result("agent")
    assert result.requests.instance.tolist() == [1]
    assert result.requests.placed.tolist() == [0.25]


def test_states_of_a_lone_request_are_those_computed_by_hand() -> None:
    environment = lone_request()
    first, _ = environment.reset(seed=0)
    waiting = environment.step(np.int64(0))[0]
    deciding = environment.step(np.int64(1))[0]
    # Queue; then of each instance: prompt phase, two buckets, free share, first to end.
    assert first.tolist() == [0, 0, 0, *([0, 0, 0, 5, 0] * 2)]
    queue = [1 / 32, 10 / 200, 1]
    np.testing.assert_allclose(waiting, [*queue, *([0, 0, 0, 5, 0] * 2)], rtol=1e-6)
    # 11 of 100 tokens are taken, a free share of 0.2 is shown as 1; 2 more tokens take 0.2 s of
    # the 2 s that are.
    there = [0, 0, 1 / 32, 0.89 / 0.2, 0.1]
    np.testing.assert_allclose(deciding, [0, 0, 0, 0, 0, 0, 5, 0, *there], rtol=1e-6)


def test_waiting_lets_a_request_wait_and_is_no_mixing() -> None:
    environment = lone_request()
    environment.reset(seed=0)
    environment.step(np.int64(0))
    observation, _, _, _, info = environment.step(np.int64(2))
    assert observation[0] > 0 and info["routable"]
    assert info["mixing"] == info["guidance"] == 0.0
    *_, info = environment.step(np.int64(0))
    assert info["mixing"] == pytest.approx(0.5 * 1.0 - 0.5 * 3.3e-5 * 13)
    assert info["guidance"] == 0.0


def test_all_who_wait_count_however_many_they_are() -> None:
    n = 2 * FIRST_POOL + 1
    trace = {"name": "lognormal", "requests": n, "prompt_max": 400, "output_max": 500}
    setup = small_setup(pool={"limit": 4}, trace=trace, arrivals=FAST)
    environment = RouterEnvironment(setup, TASK)
    environment.reset(seed=0)
    new = 0.0
    for _ in range(60):
        *_, info = environment.step(np.int64(2))
        new += info["work"][3]
    assert new == info["work"][1] == n


def played(
    environment: RouterEnvironment, seed: int
) -> tuple[list[npt.NDArray[np.float64]], list[float]]:
    """States and rewards of an episode of random actions."""
    states, rewards = [environment.reset(seed=seed)[0]], []
    ended = False
    for action in np.random.default_rng(seed).integers(0, 3, 3000):
        state, reward, ended, _, _ = environment.step(action)
        states.append(state)
        rewards.append(reward)
        if ended:
            break
    assert ended
    return states, rewards


@few
@given(st.integers(0, 10_000))
def test_an_episode_is_the_same_again_and_serves_everybody(seed: int) -> None:
    environment = RouterEnvironment(small_setup(), TASK)
    states, rewards = played(environment, seed)
    requests = environment.simulation.result("agent").requests
    assert sorted(requests.number.tolist()) == list(range(40))
    assert (requests.placed >= requests.arrival).all()
    for state in states:
        assert environment.observation_space.contains(state)
    again_states, again_rewards = played(environment, seed)
    np.testing.assert_array_equal(np.array(states), np.array(again_states))
    assert rewards == again_rewards


@few
@given(st.integers(0, 10_000))
def test_rewards_sum_to_completions_less_unfinished_work(seed: int) -> None:
    # With the truth for a forecast the unfinished work follows from the requests' own times.
    environment = RouterEnvironment(small_setup(forecast={"name": "oracle"}), TASK)
    _, rewards = played(environment, seed)
    requests = environment.simulation.result("agent").requests
    ticks = np.arange(1, len(rewards) + 1) * TASK.interval
    bound = 0.0
    for arrival, end, prompt, output in zip(
        requests.arrival, requests.end, requests.prompt, requests.output, strict=True
    ):
        alone = prompt * TASK.prompt_seconds + output * TASK.token_seconds
        bound += np.count_nonzero((ticks >= arrival) & (ticks < end)) / alone
    assert 60.0 * 40 - bound <= sum(rewards) < 60.0 * 40


def test_setups_take_turns() -> None:
    busy = small_setup(arrivals={"kind": "poisson", "rate": 30.0})
    environments = router_environments([small_setup(), busy], TASK, 3)
    rewards = [played(environment, 11)[1] for environment in environments]
    assert rewards[0] == rewards[2] != rewards[1]


def test_an_episode_is_cut_at_its_longest() -> None:
    environment = RouterEnvironment(small_setup(), RouterConfig(max_seconds=0.1))
    environment.reset(seed=0)
    outcomes = [environment.step(np.int64(2))[2:4] for _ in range(5)]
    assert outcomes == [(False, False)] * 4 + [(False, True)]


def test_shaping_adds_the_terms_that_info_has() -> None:
    plain, shaped = (RouterEnvironment(small_setup(), TASK) for _ in range(2))
    shaped.shaping = Shaping(2.0, 3.0)
    plain.reset(seed=4)
    shaped.reset(seed=4)
    for action in np.random.default_rng(4).integers(0, 3, 200):
        _, base, _, _, info = plain.step(action)
        _, reward, _, _, _ = shaped.step(action)
        assert reward == pytest.approx(base + 2.0 * info["mixing"] + 3.0 * info["guidance"])
        assert info["guidance"] <= 0.0


@pytest.mark.parametrize("seed", range(3))
def test_a_router_does_in_a_simulation_what_it_does_in_the_environment(seed: int) -> None:
    setup = small_setup()
    layers = random_layers(2, seed=seed)
    parameters = network_parameters(layers)
    environment = RouterEnvironment(setup, TASK)
    observed, info = environment.reset(seed=seed)
    ended = False
    states, view_states = [], []
    for _ in range(2000):
        if info["routable"]:
            states.append(observed)
            view_states.append(state_of_view(environment))
        values = action_values(parameters, observed)
        empty = environment.simulation.view().running.sum() == 0
        action = values[:2].argmax() if empty else values.argmax()
        observed, _, ended, _, info = environment.step(action)
        if ended:
            break
    np.testing.assert_allclose(np.array(states), np.array(view_states))
    assert ended
    stepped = environment.simulation.result("agent").requests
    routed = run(setup, LearnedRouter(checkpoint(layers)), seed).requests
    for name in ("number", "instance", "placed", "end"):
        np.testing.assert_array_equal(getattr(stepped, name), getattr(routed, name))


def state_of_view(environment: RouterEnvironment) -> npt.NDArray[np.float64]:
    """The state as a live router would compute it, from a view of the cluster."""
    view = environment.simulation.view()
    edges = np.array(TASK.edges, dtype=np.int64)
    inputs = routing_inputs(view, np.empty(0, dtype=np.int64), False, True, edges)
    state = np.zeros(state_size(2, len(TASK.edges)))
    router_state(inputs, TASK.scales(16), np.zeros(2, dtype=np.int64), state)
    return state


def test_the_page_routes_all_its_requests() -> None:
    page = (Path(__file__).parents[3] / "docs/papers/jain.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, Any] = {}
    exec(block, names)
    assert sorted(names["requests"].number.tolist()) == list(range(20))


def test_a_task_that_means_nothing_is_refused() -> None:
    for options, match in (
        ({"interval": 0.0}, "router.interval must be above 0"),
        ({"edges": (1, 2)}, "router.edges must ascend from 0"),
        ({"balance": 2.0}, "router.balance must be at least 0 and at most 1, not 2.0"),
    ):
        with pytest.raises(ValueError, match=match):
            RouterConfig(**options)  # type: ignore[arg-type]
    environment = RouterEnvironment(small_setup(), TASK)
    environment.reset(seed=0)
    for action in (3, -1):
        with pytest.raises(ValueError, match=r"an action is in 0 \.\. 2, not"):
            environment.step(np.int64(action))


V100 = ImpactRules(prompt_gradient=3.2e-4, decode_gradient=3.3e-5, balance=0.5, tolerance=2.0)


def test_impacts_are_those_computed_by_hand() -> None:
    # T = 3.2e-4 · (50² + 1000) = 1.12 s is tolerated; 3.2e-4 · (50² + 10000) = 4 s is twice ε.
    assert prompt_impact(V100, 1000.0, 50.0) == 1.0
    assert prompt_impact(V100, 10_000.0, 50.0) == pytest.approx(-1.0)
    # −3.3e-5 · (10000 + 50 + 200)
    assert decode_impact(V100, 10_000.0, 50.0, 200.0) == pytest.approx(-0.33825)
    assert mixing(V100, 10_000.0, 50.0, 200.0) == pytest.approx(0.5 * -1.0 + 0.5 * -0.33825)
    prompt_only = V100._replace(balance=1.0)
    assert mixing(prompt_only, 10_000.0, 50.0, 200.0) == pytest.approx(-1.0)


def test_guidance_is_how_much_worse_than_the_least_impact() -> None:
    load = np.array([10_000, 1000])
    # mixing is −0.669125 on the first, 0.5 · 1 − 0.5 · 3.3e-5 · 1250 = 0.479375 on the second
    assert guidance(V100, load, 50.0, 200.0, 0) == pytest.approx(-1.1485)
    assert guidance(V100, load, 50.0, 200.0, 1) == 0.0
    assert guidance(V100, load, 50.0, 200.0, -1) == pytest.approx(-1.1485), "waiting is the worst"


@given(
    st.lists(st.integers(0, 40_000), min_size=1, max_size=8),
    st.integers(1, 1000),
    st.floats(1, 4000),
)
def test_guidance_is_zero_exactly_for_the_least_impact_and_never_above(
    load: list[int], prompt: int, output: float
) -> None:
    values = [guidance(V100, np.array(load), float(prompt), output, g) for g in range(len(load))]
    assert max(values) == 0.0
    assert values[int(np.argmin(load))] == 0.0


def test_gradients_come_from_a_profile(tmp_path: Path) -> None:
    profile = profile_of(TRUE)
    write_profile(profile, tmp_path / "profile.yaml")
    config = RouterConfig(profile=tmp_path / "profile.yaml", balance=0.25, tolerance_s=3.0)
    gradients = profile.gradients
    rewards = config.rewards()
    assert rewards.impact == ImpactRules(gradients.prompt, gradients.decode, 0.25, 3.0)
    assert rewards.guide == rewards.impact._replace(tolerance=0.05)
    assert rewards[1:3] == (gradients.prompt, profile.batch.seconds(1, 0))
    with pytest.raises(ValueError, match="no profile of an engine"):
        RouterConfig(profile=tmp_path / "missing.yaml").rewards()
