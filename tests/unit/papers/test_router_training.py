"""Routers that are trained, kept, loaded, and refused where they do not belong."""

import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from math import exp
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from router_tasks import (
    checkpoint,
    constant_layers,
    random_layers,
    small_config,
    small_setup,
)
from routing_views import cluster

from rescheduler.commands.command_parser import run_command
from rescheduler.papers.jain_router.agent import AgentConfig
from rescheduler.papers.jain_router.environment import RouterConfig, RouterEnvironment
from rescheduler.papers.jain_router.train_router import (
    competitors,
    play,
    study_table,
    train_routers,
)
from rescheduler.papers.jain_router.training import (
    Job,
    Training,
    TrainingConfig,
    guided,
    train_router,
)
from rescheduler.routing import LearnedRouter, create_policy
from rescheduler.routing.learned.rl import (
    Layers,
    action_values,
    load_router,
    network_parameters,
)
from rescheduler.simulator.simulation import RunSetup, run, run_setup

ROOT = Path(__file__).parents[3]
AGENT = AgentConfig(
    widths=(32, 32), batch_size=64, replay=20_000, discount=0.95, steps=1, average_rate=0.02
)
SHORT = TrainingConfig(episodes=4, simulations=4, exploration_episodes=3, updates=150, validation=1)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As in a training process: the network is too small for more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_guidance_fades_into_the_whole_discount_and_exploration_falls() -> None:
    discount, weight = guided(0.99, 0.5, 1)
    assert discount == pytest.approx((1 - exp(-0.5)) * 0.99)
    assert weight == pytest.approx(exp(-0.5) * 0.99)
    assert guided(0.99, 0.5, 60) == pytest.approx((0.99, 0.0), abs=1e-12)
    training = TrainingConfig(exploration_episodes=20, least_exploration=0.05)
    shares = [training.exploration(k) for k in (0, 19, 20, 29)]
    assert shares == pytest.approx([1.0, 0.05, 0.05, 0.05])


def test_a_checkpoint_gives_the_same_actions_when_it_is_loaded(tmp_path: Path) -> None:
    layers = random_layers(2, seed=1)
    checkpoint(layers).save(tmp_path / "router")
    loaded = load_router(tmp_path / "router")
    before, after = network_parameters(layers), network_parameters(loaded.layers)
    states = np.random.default_rng(0).random((200, layers[0][0].shape[1]))
    for state in states:
        np.testing.assert_array_equal(action_values(before, state), action_values(after, state))
    kept, given = LearnedRouter(tmp_path / "router"), LearnedRouter(checkpoint(layers))
    setup = small_setup(dispatch="pool")
    np.testing.assert_array_equal(
        run(setup, kept, 2).requests.placed, run(setup, given, 2).requests.placed
    )
    assert "Learned router for 2 instances" in (tmp_path / "router/README.md").read_text()


def test_values_are_those_of_the_layers() -> None:
    layers = random_layers(2, seed=2)
    state = np.random.default_rng(1).random(layers[0][0].shape[1])
    values = state
    for weight, bias in layers[:-1]:
        values = np.maximum(weight.astype(np.float64) @ values + bias, 0.0)
    expected = layers[-1][0].astype(np.float64) @ values + layers[-1][1]
    np.testing.assert_allclose(action_values(network_parameters(layers), state), expected)


def test_another_number_of_instances_is_refused() -> None:
    router = LearnedRouter(checkpoint(random_layers(2)))
    message = r"trained for 2 instances, this cluster has 3; .*--cluster.instances 3"
    with pytest.raises(ValueError, match=message):
        router.assign(cluster([[], [], []], [(10, 5.0)]))
    three = small_setup(cluster={"instances": 3, "slots": 16, "kv_capacity": 1000})
    with pytest.raises(ValueError, match=message):
        run(three, router, seed=0)


@given(seed=st.integers(0, 1000))
def test_how_instances_are_numbered_makes_no_difference(seed: int) -> None:
    generator = np.random.default_rng(seed)
    sizes = generator.integers(4, 400, (3, 3))
    assume(len(set(sizes.sum(axis=1).tolist())) == 3)
    there = [[(n, 10.0 + n) for n in row] for row in sizes.tolist()]
    router = LearnedRouter(checkpoint(random_layers(3, seed=seed), n_instances=3))
    order = generator.permutation(3)
    waiting, views = [(10, 5.0)], [there, [there[g] for g in order]]
    ((placed,), (other,)) = (
        router.assign(cluster(view, waiting, capacity=1200)).instance.tolist() for view in views
    )
    assert other == placed if placed < 0 else order[other] == placed


def test_an_invalid_router_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no router.json, so this is no router"):
        create_policy("rl", checkpoint=str(tmp_path))
    checkpoint(random_layers(2)).save(tmp_path / "router")
    config = tmp_path / "router/router.json"
    values = json.loads(config.read_text())
    config.write_text(json.dumps(values | {"instances": 5}))
    with pytest.raises(ValueError, match=r"reads 33 numbers and chooses among 6 actions"):
        load_router(tmp_path / "router")
    scales = values["scales"]
    for wrong, said in (
        ({"scales": scales | {"capacty": 0.2}}, "scales"),
        ({"scales": scales | {"slots": 0.0}}, "scales must be above 0"),
        ({"scales": scales | {"requests": "many"}}, "could not convert"),
        ({"scales": scales | {"slots": float("nan")}}, "scales must be above 0"),
        ({"scales": scales | {"slots": float("inf")}}, "scales must be above 0"),
        ({"scales": scales | {"slots": 10**400}}, "too large"),
        ({"interval": float("inf")}, "the interval must be above 0"),
        ({"edges": [0, float("nan")]}, "edges must ascend"),
        ({"interval": -1}, "the interval must be above 0"),
        ({"edges": [0, 256, 64]}, "edges must ascend"),
        ({"kind": "survival"}, "a checkpoint of kind 'survival'"),
    ):
        config.write_text(json.dumps(values | wrong))
        with pytest.raises(ValueError, match=f"no router that can be read: .*{said}"):
            load_router(tmp_path / "router")
    with pytest.raises(ValueError, match="no such folder"):
        load_router(tmp_path / "nothing")
    for text in ("{", '{"scales": ' + "[" * 100_000, "[]", "null"):
        config.write_text(text)
        with pytest.raises(ValueError, match="no router that can be read"):
            load_router(tmp_path / "router")


SLOW = RouterConfig(interval=0.5, edges=(0, 64, 256), max_seconds=120.0)
"""A decision every half a second, so that waiting in vain is dear."""


def total_reward(layers: Layers | None, setup: RunSetup) -> float:
    """Of four episodes that were not trained on, at random without a network."""
    environment = RouterEnvironment(setup, SLOW)
    generator = np.random.default_rng(0)
    parameters = None if layers is None else network_parameters(layers)
    total = 0.0
    for seed in range(900, 904):
        state, _ = environment.reset(seed=seed)
        ended = cut = False
        while not (ended or cut):
            if parameters is None:
                action = generator.integers(0, 3)
            else:
                action = action_values(parameters, state).argmax()
            state, reward, ended, cut, _ = environment.step(action)
            total += reward
    return total


@pytest.mark.slow
def test_training_is_better_than_random(tmp_path: Path) -> None:
    config = small_config(arrivals={"kind": "poisson", "rate": 1.5})
    setup = run_setup(config)
    longer = replace(SHORT, episodes=10, exploration_episodes=8)
    trained = train_router(Job((config,), SLOW, AGENT, longer, "guided", 0, tmp_path))
    assert total_reward(trained.checkpoint.layers, setup) > total_reward(None, setup)


def test_a_stopped_training_goes_on_where_it_was(tmp_path: Path) -> None:
    config = small_config(arrivals={"kind": "poisson", "rate": 1.5})
    brief = replace(SHORT, simulations=2, updates=20)
    whole = train_router(Job((config,), SLOW, AGENT, brief, "guided", 0, tmp_path / "whole"))

    folder = tmp_path / "stopped"
    stopped = Training(Job((config,), SLOW, AGENT, brief, "guided", 0, folder))
    for _ in range(2):
        stopped.run_episode()
    resumed = train_router(Job((config,), SLOW, AGENT, brief, "guided", 0, folder))
    assert resumed.rewards == whole.rewards
    assert resumed.latencies == whole.latencies
    for (own, _), (other, _) in zip(
        resumed.checkpoint.layers, whole.checkpoint.layers, strict=True
    ):
        np.testing.assert_array_equal(own, other)
    assert resumed.commits == whole.commits and resumed.seconds > 0
    with pytest.raises(ValueError, match="of a training with other settings"):
        train_router(Job((config,), SLOW, AGENT, brief, "aware", 0, folder))
    for size in (100_000, 0):
        with (folder / "training.pt").open("r+b") as state:
            state.truncate(size)
        with pytest.raises(ValueError, match=r"training.pt: damaged; remove it to train anew"):
            train_router(Job((config,), SLOW, AGENT, brief, "guided", 0, folder))


def test_a_round_has_every_simulation_that_is_trained_on(tmp_path: Path) -> None:
    slow, fast = (small_config(arrivals={"kind": "poisson", "rate": rate}) for rate in (1.5, 6.0))
    few = replace(SHORT, episodes=1, simulations=2, validation=1)
    alone, both = (
        train_router(Job(configs, SLOW, AGENT, few, "baseline", 0, tmp_path / str(len(configs))))
        for configs in ((slow,), (slow, fast))
    )
    assert alone.rewards != both.rewards
    policy = LearnedRouter(both.checkpoint)
    requests = [run(run_setup(c), policy, 500_000).requests for c in (slow, fast)]
    first, second = ((each.end - each.arrival).mean() for each in requests)
    assert both.latencies == [pytest.approx(np.sqrt(first * second))]
    with pytest.raises(ValueError, match="of a training with other settings"):
        train_router(Job((fast,), SLOW, AGENT, few, "baseline", 0, tmp_path / "1"))


def test_competitors_play_the_same_episodes() -> None:
    config = small_config(policies="round_robin,jsq_load", seeds=2)
    case = play(config, competitors(config, {}, ["jsq_load"]), "small")
    assert case.gains["round_robin"] == {"latency": (0.0, 0.0), "end_to_end": (0.0, 0.0)}
    router = case.summaries["jsq_load"].mean
    assert router["router_wait"] > 0 and router["instance_wait"] == pytest.approx(0.0, abs=0.1)
    assert case.summaries["round_robin"].mean["router_wait"] == pytest.approx(0.0)
    table = study_table({"small": case}, {"jsq_load": 1.5})
    assert "| jsq_load |" in "\n".join(table) and "1.50%" in table[-2]
    with pytest.raises(ValueError, match="pooled: unknown label 'fcfs'; known:"):
        competitors(config, {}, ["fcfs"])


def test_a_pooled_router_fills_no_queue_of_an_instance(tmp_path: Path) -> None:
    checkpoint(constant_layers(2, action=1)).save(tmp_path)  # always the fuller one
    config = small_config(policies="round_robin")
    given = {"queues": [str(tmp_path)], "pooled": [str(tmp_path)]}
    case = play(config, competitors(config, given, ["pooled"]), "small")
    queues, pooled = (case.summaries[label].mean for label in ("queues", "pooled"))
    assert queues["instance_wait"] > 10 * pooled["instance_wait"]
    assert pooled["latency"] < queues["latency"]


@pytest.mark.slow
def test_the_command_trains_compares_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "rl"
    words = (
        f"--config {ROOT}/configs/rl/quick.yaml --out {out} --training.episodes 2 "
        "--training.updates 20 --training.seeds 1 --trace.requests 30 --trace.name five_tasks "
        '--variants ["guided"] --seeds 2 --router.interval 0.1 --workers 2 --published'
    )
    arguments = [*words.split(), '{"rl guided": 11.4, "rl aware": 7.8}']
    assert run_command(train_routers, arguments, "train-router") == 0
    rows = json.loads((out / "study.json").read_text())["rows"]
    assert [row["policy"] for row in rows] == ["round_robin", "jsq_load", "rl guided"]
    assert all((out / name).is_file() for name in ("table.md", "episode.png", "training.png"))
    assert load_router(out / "router").variant == "guided"
    assert create_policy("rl", checkpoint=str(out / "router")).decide_every() == 0.1
    assert (out / "checkpoints/guided-0/model.safetensors").is_file()
    more = ["--policies", "round_robin,jsq", "--seeds", "1"]
    assert run_command(train_routers, [*arguments, *more], "train-router") == 0, (
        "a finished training is not repeated"
    )
    with pytest.raises(ValueError, match=r"other settings \(agent\); choose another folder"):
        run_command(train_routers, [*arguments, "--agent.lr", "0.5"], "train-router")

    study = json.loads((out / "study.json").read_text())["_about"]
    assert study["router"]["interval"] == 0.1 and study["variants"] == ["guided"]
    other = tmp_path / "compared"
    compared = [*arguments[:2], "--out", str(other), "--variants", "[]", "--seeds", "1"]
    shorter = ["--trace.name", "five_tasks", "--trace.requests", "30"]
    given = ["--checkpoints", json.dumps({"mine": [str(out / "router")]})]
    assert run_command(train_routers, [*compared, *shorter, *given], "train-router") == 0
    rows = json.loads((other / "study.json").read_text())["rows"]
    assert [row["policy"] for row in rows] == ["round_robin", "jsq_load", "mine"]
    assert not (other / "training.png").exists()
    (digest,) = json.loads((other / "study.json").read_text())["_about"]["checkpoints"][
        "mine"
    ].values()
    assert digest == sha256((out / "router/model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--checkpoints", '{"rl guided": ["ROUTER"]}'], "duplicate label 'rl guided'"),
        (["--checkpoints", '{"mine": []}'], "checkpoints.mine: at least one folder"),
        (["--cases", '{"fast": {"arrivals.rat": 3}}'], r"cases.fast: arrivals.rat = 3"),
        (["--train_on", '{"fast": {"arrivals.rat": 3}}'], r"train_on.fast: arrivals.rat = 3"),
        (["--train_on", '{"all": {"dispatch": "pool"}}'], "train_on.all: dispatch: instant"),
        (["--train_on", '{"big": {"cluster.slots": 3}, "as is": {}}'], "they must be alike"),
        (
            ["--train_on", '{"a": {}, "b": {}}', "--training.simulations", "1"],
            "at least 2 simulations at once, not 1",
        ),
        (["--cases", '{"big": {"cluster.instances": 3}}'], "cases.big: routers are trained for 2"),
        (["--cases", '{"one": {"policies": "jsq"}}'], "cases.one: policies are the same"),
        (["--published", '{"jsqq": 1.0}'], "published: unknown label 'jsqq'"),
        (["--dispatch", "pool"], "dispatch: instant"),
        (["--max_seconds", "3"], "max_seconds: an episode ends when"),
        (["--migration.planners", "star"], "migration.planners: routers do not learn"),
    ],
)
def test_what_would_fail_after_training_is_refused_before(
    tmp_path: Path, given: list[str], message: str
) -> None:
    checkpoint(random_layers(2)).save(tmp_path / "router")
    given = [word.replace("ROUTER", str(tmp_path / "router")) for word in given]
    quick = ["--config", str(ROOT / "configs/rl/quick.yaml"), "--out", str(tmp_path / "out")]
    with pytest.raises(ValueError, match=message):
        run_command(train_routers, [*quick, *given], "train-router")
    assert not (tmp_path / "out").exists()
