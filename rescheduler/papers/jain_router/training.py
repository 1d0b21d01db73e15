"""Training routers: episodes of simulated clusters, one of three rewards, resumable."""

import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from math import exp
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.utils.tensorboard import SummaryWriter

from data_collection.files import replace_file
from data_collection.versions import source_commit
from rescheduler.cluster.registry import COUNT, POSITIVE, Checked
from rescheduler.commands.event_loop import held_interrupts
from rescheduler.papers.jain_router.agent import AgentConfig, DoubleDQN, Episode
from rescheduler.papers.jain_router.environment import (
    RouterConfig,
    RouterEnvironment,
    Shaping,
    router_environments,
)
from rescheduler.routing.learned.rl import LearnedRouter, RouterCheckpoint, state_size
from rescheduler.simulator.config.simulation_config import SimulationConfig
from rescheduler.simulator.experiments.workers import available_cores, run_locally
from rescheduler.simulator.simulation import run, run_setup

Variant = Literal["baseline", "aware", "guided"]

VARIANTS: tuple[Variant, ...] = ("baseline", "aware", "guided")
"""Rewards of the paper: equation 3's first two sums; plus r_mixing; plus h, fading."""

_OWN_REQUESTS = 1_000_000
_VALIDATION_REQUESTS = 500_000
"""First seeds of the requests of training and of validation; figures are of seeds from 0."""


@dataclass(frozen=True)
class TrainingConfig(
    Checked,
    episodes=COUNT,
    simulations=COUNT,
    least_exploration="[0, 1]",
    updates=COUNT,
    guidance_decay=POSITIVE,
    validation=COUNT,
    seeds=COUNT,
):
    r"""How long a router is trained, and how it explores.

    Attributes:
        episodes: rounds of ``simulations`` episodes.
        simulations: clusters simulated at once, each with requests of its own.
        exploration_episodes: in which the share of random actions falls from 1 to
            ``least_exploration``, linearly.
        least_exploration: share of random actions from then on (C.10.2: none after 20 episodes;
            but without any, nothing shows any more what the other actions would do).
        updates: of the network after each round.
        guidance_decay: :math:`\beta_d` of guided training.
        validation: runs by whose mean request latency the episode is chosen that is kept; so many
            of each simulation where several are trained on, whose means' geometric mean counts.
        seeds: trainings of each variant, with seeds 0, 1, ...
    """

    episodes: int = 30
    simulations: int = 8
    exploration_episodes: int = 6
    least_exploration: float = 0.03
    updates: int = 1200
    guidance_decay: float = 0.5
    validation: int = 6
    seeds: int = 3

    def _section(self) -> str:
        return "training."

    def exploration(self, episode: int) -> float:
        """Return the share of random actions in an episode, counted from 0."""
        last = max(self.exploration_episodes - 1, 1)
        return 1.0 - (1.0 - self.least_exploration) * min(episode / last, 1.0)


class Job(NamedTuple):
    """One training.

    Attributes:
        configs: of the simulations: cluster, requests, forecasts. Each round of episodes has all.
        router: the task.
        agent: how the network learns.
        training: how long.
        variant: of the reward.
        seed: of the network, of exploration and of the requests.
        out: folder of the state to resume from, and of logs for TensorBoard.
    """

    configs: tuple[SimulationConfig, ...]
    router: RouterConfig
    agent: AgentConfig
    training: TrainingConfig
    variant: Variant
    seed: int
    out: Path

    @property
    def saved(self) -> Path:
        """The file of its state."""
        return self.out / "training.pt"

    @property
    def title(self) -> str:
        """What progress and errors call it."""
        return f"{self.variant}, seed {self.seed}"

    def settings(self) -> dict[str, str]:
        """Return all that it depends on, which is not what its router is compared with."""
        own = [replace(config, policies="round_robin", seeds=1) for config in self.configs]
        described = {
            "simulations": own,
            "router": self.router,
            "agent": self.agent,
            "training": replace(self.training, seeds=1),
            "reward": self.variant,
            "seed": self.seed,
        }
        return {name: repr(value) for name, value in described.items()}


class Trained(NamedTuple):
    """A trained router, and how it came about.

    Attributes:
        checkpoint: of the episode with the best validation.
        episode: which that was, from 0.
        rewards: mean reward of each episode.
        latencies: validation of each episode, mean seconds from a request's arrival to its end.
        commits: of the source, with which it was trained; several if it was interrupted.
        seconds: that it took.
    """

    checkpoint: RouterCheckpoint
    episode: int
    rewards: list[float]
    latencies: list[float]
    commits: list[str]
    seconds: float


def guided(discount: float, decay: float, episode: int) -> tuple[float, float]:
    r"""Return the discount of training and the weight of h, in an episode counted from 1.

    .. math:: \lambda_k = e^{-\beta_d k}, \qquad \tilde\gamma_k = (1 - \lambda_k)\gamma, \qquad
              \tilde r = r + (\gamma - \tilde\gamma_k) h = r + \lambda_k \gamma h

    The heuristic is followed at first, over a short horizon; as :math:`\lambda_k` vanishes the task
    becomes the original one. The paper prints :math:`\tilde\gamma_k = \lambda_k\gamma` beside
    equation 3, which would do the reverse, and §5 the one above; equation 3 *subtracts* the term,
    although h is at most 0, which would reward the greatest impact. Both are as in what it builds
    on, Heuristic-Guided RL (Cheng et al. 2021), up to the name of 1 − λ.

    Arguments: γ, β_d and k.
    """
    fading = exp(-decay * episode)
    return (1.0 - fading) * discount, fading * discount


def train_router(job: Job) -> Trained:
    """Train a router, or resume an interrupted training; report each episode on standard error.

    Raises:
        ValueError: the folder has the state of another training, or a damaged one.
        KeyboardInterrupt: Ctrl-C; run it again to resume after the last whole episode.
    """
    torch.set_num_threads(1)  # the network is too small for more
    made = Training(job)
    while made.episode < job.training.episodes:
        made.run_episode()
        said = f"reward {made.rewards[-1]:.1f} a step, latency {made.latencies[-1]:.1f} s"
        count = f"episode {made.episode} of {job.training.episodes}"
        print(f"{job.title}: {said}, {count}", file=sys.stderr, flush=True)
    return made.finished()


def train_all(jobs: Sequence[Job], workers: int | None = None) -> list[Trained]:
    """Train routers in processes of their own, or resume those that were interrupted.

    Args:
        jobs: the trainings.
        workers: processes at once; one per core when None.

    Raises:
        ValueError: a folder has the state of another training, or a damaged one.
        RuntimeError: a training failed; the others have kept what they trained.
        KeyboardInterrupt: Ctrl-C; what each has trained by then is kept.
    """
    found = {job.out: _finished_training(job) for job in jobs}
    left = [job for job in jobs if found[job.out] is None]
    if left:
        setups = [run_setup(config) for config in left[0].configs]
        router_environments(setups, left[0].router, left[0].training.simulations)  # or refuses
    with closing(run_locally(left, workers or available_cores(), train_router)) as outcomes:
        for job, trained in outcomes:
            if isinstance(trained, str):
                raise RuntimeError(f"{job.title}: {trained}")
            found[job.out] = trained
    return [trained for trained in found.values() if trained is not None]


def _finished_training(job: Job) -> Trained | None:
    """Return what a training yielded that ran to its end, or None."""
    if not job.saved.exists() or _state_of(job)["episode"] < job.training.episodes:
        return None
    return Training(job).finished()


_KEPT = ("episode", "rewards", "latencies", "best", "best_episode", "commits", "seconds")


class Training:
    """A training as it is after so many episodes; what `_KEPT` names is in its file."""

    def __init__(self, job: Job) -> None:
        self.job, self.setups = job, [run_setup(config) for config in job.configs]
        instances = job.configs[0].cluster.instances
        n_state = state_size(instances, len(job.router.edges))
        self.agent = DoubleDQN(n_state, instances + 1, job.agent, job.seed)
        self.environments = router_environments(self.setups, job.router, job.training.simulations)
        self.generator = np.random.default_rng((job.seed, _OWN_REQUESTS))
        self.episode = 0
        self.best_episode = 0
        self.seconds = 0.0
        self.rewards: list[float] = []
        self.latencies: list[float] = []
        self.best: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.commits: list[str] = []
        self._commit = source_commit()
        job.out.mkdir(parents=True, exist_ok=True)
        if job.saved.exists():
            state = _state_of(job)
            for name in _KEPT:
                setattr(self, name, state[name])
            self.generator.bit_generator.state = state["exploring"]
            self.agent.load_state_dict(state["agent"])

    def run_episode(self) -> None:
        """Train for one round of episodes, validate, and keep the state."""
        began = time.monotonic()
        reward = self._explore()
        latency = self._validate()
        self.rewards.append(reward)
        self.latencies.append(latency)
        if latency <= min(self.latencies):
            self.best_episode = self.episode
            self.best = [
                (torch.from_numpy(weight), torch.from_numpy(bias))
                for weight, bias in self.agent.layers()
            ]
        with SummaryWriter(str(self.job.out / "logs")) as log:
            log.add_scalar("reward", reward, self.episode)
            log.add_scalar("request_latency_s", latency, self.episode)
            exploration = self.job.training.exploration(self.episode)
            log.add_scalar("exploration", exploration, self.episode)
        self.episode += 1
        self.seconds += time.monotonic() - began
        if self._commit not in self.commits:
            self.commits.append(self._commit)
        with held_interrupts():
            self._save()

    def finished(self) -> Trained:
        """Return the best episode's router."""
        layers = [(weight.numpy(), bias.numpy()) for weight, bias in self.best]
        checkpoint, history = self._checkpoint(layers), (self.rewards, self.latencies)
        return Trained(checkpoint, self.best_episode, *history, self.commits, self.seconds)

    def _explore(self) -> float:
        agent, training, variant = self.agent, self.job.training, self.job.variant
        discount = agent.config.discount
        shaping = Shaping(mixing=1.0) if variant == "aware" else Shaping()
        if variant == "guided":
            discount, weight = guided(discount, training.guidance_decay, self.episode + 1)
            shaping = Shaping(guidance=weight)
        for environment in self.environments:
            environment.shaping = shaping
        exploration = training.exploration(self.episode)
        first = _OWN_REQUESTS * (1 + self.job.seed) + self.episode * training.simulations
        episodes = _play(self.environments, agent, exploration, self.generator, first)
        for episode in episodes:
            agent.remember(episode, discount)
        for _ in range(training.updates):
            agent.learn(self.episode / training.episodes)
        return float(np.concatenate([episode.rewards for episode in episodes]).mean())

    def _validate(self) -> float:
        """Return the geometric mean, over the configurations, of mean request latencies."""
        policy = LearnedRouter(self._checkpoint(self.agent.layers()))
        latencies = []
        for setup in self.setups:
            runs = [
                run(setup, policy, _VALIDATION_REQUESTS + i).requests
                for i in range(self.job.training.validation)
            ]
            latencies.append(np.mean([(each.end - each.arrival).mean() for each in runs]))
        return float(np.exp(np.mean(np.log(latencies))))

    def _checkpoint(self, layers: Sequence[tuple[Any, Any]]) -> RouterCheckpoint:
        cluster, router = self.job.configs[0].cluster, self.job.router
        return RouterCheckpoint(
            variant=self.job.variant,
            n_instances=cluster.instances,
            edges=router.edges,
            interval=router.interval,
            scales=router.scales(cluster.slots),
            layers=layers,
        )

    def _save(self) -> None:
        state = {name: getattr(self, name) for name in _KEPT} | {
            "what": self.job.settings(),
            "exploring": self.generator.bit_generator.state,
            "agent": self.agent.state_dict(),
        }
        with replace_file(self.job.saved) as temporary:
            torch.save(state, temporary)


def _state_of(job: Job) -> dict[str, Any]:
    try:
        state: dict[str, Any] = torch.load(job.saved, weights_only=True)
        other = [name for name, value in job.settings().items() if state["what"][name] != value]
    except (RuntimeError, EOFError, UnpicklingError, KeyError, TypeError) as error:
        raise ValueError(f"{job.saved}: damaged; remove it to train anew ({error})") from error
    if other:
        settings = ", ".join(other)
        raise ValueError(
            f"{job.saved}: of a training with other settings ({settings}); choose another folder"
        )
    return state


def _play(
    environments: Sequence[RouterEnvironment],
    agent: DoubleDQN,
    exploration: float,
    generator: np.random.Generator,
    first: int,
) -> list[Episode]:
    """Return an episode of each environment; ``first`` is the seed of the first one's requests."""
    now = [each.reset(seed=first + b) for b, each in enumerate(environments)]
    steps: list[list[tuple[Any, ...]]] = [[] for _ in environments]
    ended, going = [False] * len(now), list(range(len(now)))
    while going:
        actions = agent.act(np.array([state for state, _ in now]), exploration, generator)
        for b in list(going):
            state, info = now[b]
            following, reward, ended[b], cut, following_info = environments[b].step(actions[b])
            steps[b].append((state, actions[b], reward, info["routable"], info["work"]))
            now[b] = following, following_info
            if ended[b] or cut:
                going.remove(b)
    episodes = []
    for (state, info), taken, end in zip(now, steps, ended, strict=True):
        before, chosen, gained, could, left = zip(*taken, strict=True)
        columns = (*before, state), chosen, gained, could, (*left, info["work"])
        states, actions, rewards, routable, work = map(np.array, columns)
        episodes.append(Episode(states, actions, rewards, routable, work, end))
    return episodes
