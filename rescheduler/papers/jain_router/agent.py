"""Double DQN: the network, its replay buffer, its target network and its loss, by TorchRL."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
from torchrl.modules import MLP, QValueActor
from torchrl.objectives import DQNLoss, SoftUpdate, ValueEstimators

from predictor.compilation import compiled
from rescheduler.cluster.registry import COUNT, POSITIVE, Checked
from rescheduler.routing.learned.rl import action_values, network_parameters

FloatArray = npt.NDArray[np.float64]
Layers = list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]

_FINAL_LR = 0.1
"""Share of the learning rate at the end of training, reached linearly."""
_POTENTIAL = np.array([20.0, 60.0])
r"""κ of a potential :math:`-\sum_j \kappa_1 (1 - f_j) / \hat T_j + \kappa_2 (1 - o_j / d_j)`, by
whose discounted differences rewards are shaped: the sums of `StepArrays.work`, the second of true
lengths, which a simulation knows. It changes no choice that is best (Ng et al. 1999). What
requests take from it that arrive is given back: they come whatever the actions are (an
input-driven baseline, Mao et al. 2019), and what they cost varies by far more than what an action
does."""
_TARGET_RATE = 0.02
"""Share of the network that its target network takes over at each update."""
_REWARD_SCALE = 0.01
"""Rewards are learned times this."""
_CLIP = 10.0
"""Greatest norm of a gradient."""
_SAME_HORIZON = 0.1
"""By which share 1/(1 − γ) may have changed since what is replayed was added up with it."""

logging.getLogger("torchrl").setLevel(logging.WARNING)  # it logs every buffer


class Episode(NamedTuple):
    """What happened in T steps.

    Attributes:
        states: [T + 1, D] before each step, and after the last.
        actions: [T].
        rewards: [T].
        routable: [T] a request waited, so that the action meant something.
        work: [T + 1, 4] of each state, see `StepArrays`.
        ended: the episode was over after the last step, not cut.
    """

    states: FloatArray
    actions: npt.NDArray[np.int64]
    rewards: FloatArray
    routable: npt.NDArray[np.bool_]
    work: FloatArray
    ended: bool


@dataclass(frozen=True)
class AgentConfig(
    Checked,
    batch_size=COUNT,
    lr=POSITIVE,
    discount="[0, 1)",
    steps=COUNT,
    replay=COUNT,
    average_rate=POSITIVE,
):
    r"""How the network learns.

    Attributes:
        widths: of the hidden layers (C.10.3: 64 and 64).
        batch_size: transitions of an update (C.10.3: 512).
        lr: learning rate of Adam, at first.
        discount: γ of a step of Δt.
        steps: of Δt whose rewards are added up before the network's own estimate takes over. With
            1, the textbook's, an action's effect of a few seconds takes many thousands of updates
            to reach it through the estimates.
        replay: transitions that are kept.
        average_rate: share of it that the network which acts takes over at each update. What one
            update changes is little against the noise of its batch, and as little is what most
            actions differ by; the mean over updates routes much more steadily than the last.
    """

    widths: tuple[int, ...] = (64, 64)
    batch_size: int = 512
    lr: float = 1e-3
    discount: float = 0.997
    steps: int = 3
    replay: int = 150_000
    average_rate: float = 0.001

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch_size > self.replay:
            raise ValueError("agent.batch_size: more than agent.replay keeps")

    def _section(self) -> str:
        return "agent."


class _Dueling(nn.Module):
    r"""Q(s, a) = V(s) + A(s, a) − mean over a of A(s, a), by two networks (Wang et al. 2016).

    What a state is worth varies by a hundred times what an action does. Learned apart, its errors
    do not decide between actions; and only A, the paper's network, is needed to choose one.
    """

    def __init__(self, n_state: int, n_actions: int, widths: Sequence[int]) -> None:
        super().__init__()
        self.value = MLP(n_state, 1, num_cells=list(widths), activation_class=nn.ReLU)
        self.advantage = MLP(n_state, n_actions, num_cells=list(widths), activation_class=nn.ReLU)

    def forward(self, state: torch.Tensor) -> torch.Tensor:
        advantage: torch.Tensor = self.advantage(state)
        value: torch.Tensor = self.value(state)
        return value + advantage - advantage.mean(-1, keepdim=True)


class DoubleDQN:
    r"""Q-values of states and actions, learned off policy (van Hasselt et al. 2016).

    .. math:: y = \sum_{i < k} \gamma^i r_{t+i} + \gamma^k (1 - end)\,
              Q_{target}(s_{t+k}, \arg\max_a Q(s_{t+k}, a)), \qquad L = (Q(s_t, a_t) - y)^2

    Only states in which a request waits are learned, and :math:`s_{t+k}` is the first such state
    from ``steps`` on: elsewhere an action means nothing.

    Values of actions are computed by the same compiled code as a deployed router's. That one may
    not wait on an empty cluster; here it may, and learns that nothing comes of it.

    Args:
        n_state: numbers of a state.
        n_actions: actions.
        config: how it learns.
        seed: of the first weights and of what is replayed.
    """

    def __init__(self, n_state: int, n_actions: int, config: AgentConfig, seed: int) -> None:
        self.config, self.n_actions = config, n_actions
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            network = _Dueling(n_state, n_actions, config.widths)
        actor = QValueActor(network, in_keys=["observation"], action_space="categorical")
        self._loss = DQNLoss(
            actor, loss_function="l2", delay_value=True, double_dqn=True, action_space="categorical"
        )
        self._learn_for(config.discount)
        self._kept_discount = config.discount
        self._target = SoftUpdate(self._loss, tau=_TARGET_RATE)
        self._weights = list(self._loss.value_network_params.values(True, True))
        self._acting = {
            key[-2:]: weight
            for key, weight in self._loss.value_network_params.items(True, True)
            if "advantage" in key
        }
        self._averages = {key: weight.detach().clone() for key, weight in self._acting.items()}
        self._optimiser = torch.optim.Adam(self._weights, lr=config.lr)
        self._replay = TensorDictReplayBuffer(
            storage=LazyTensorStorage(config.replay),
            batch_size=config.batch_size,
            generator=torch.Generator().manual_seed(seed),
        )
        self._parameters: FloatArray | None = None

    def layers(self) -> Layers:
        """Return weights [out, in] and biases [out] of each layer of the network that acts."""
        averages = {key: weight.numpy().copy() for key, weight in self._averages.items()}
        places = sorted({place for place, _ in averages}, key=int)
        return [(averages[place, "weight"], averages[place, "bias"]) for place in places]

    def act(
        self, states: npt.NDArray[Any], exploration: float, generator: np.random.Generator
    ) -> npt.NDArray[np.int64]:
        """Return an action for each state [B, D]: at random with that probability, else the best.

        Ties go to the lowest index.
        """
        if self._parameters is None:
            self._parameters = network_parameters(self.layers())
        actions = _best_actions(self._parameters, states)
        at_random = generator.random(len(states)) < exploration
        drawn = generator.integers(0, self.n_actions, len(states))
        actions[at_random] = drawn[at_random]
        return actions

    def remember(self, episode: Episode, discount: float) -> None:
        """Keep the transitions of an episode; what was kept for another γ is dropped."""
        if abs((1.0 - self._kept_discount) / (1.0 - discount) - 1.0) > _SAME_HORIZON:
            self._replay.empty()
            self._kept_discount = discount
        if discount != self._discount:
            self._learn_for(discount)
        at = np.flatnonzero(episode.routable)
        if len(at) == 0:
            return
        last = len(episode.rewards)
        # What is to come counts over a shorter horizon for as much less.
        weights = _POTENTIAL * (1.0 - self.config.discount) / (1.0 - discount)
        potential = -episode.work[:, :2] @ weights
        arrived = -episode.work[1:, 2:] @ weights
        shaped = episode.rewards + discount * (potential[1:] - arrived) - potential[:-1]
        togo = np.zeros(last + 1)
        for t in range(last - 1, -1, -1):
            togo[t] = shaped[t] + discount * togo[t + 1]
        next_at = np.append(at, last)[np.searchsorted(at, at + self.config.steps)]
        steps = next_at - at
        rewards = togo[at] - discount**steps * togo[next_at]
        ended = torch.from_numpy((next_at == last) & episode.ended)[:, None]
        reward = torch.from_numpy(rewards * _REWARD_SCALE).float()[:, None]
        follows = {
            "observation": torch.from_numpy(episode.states[next_at]).float(),
            "reward": reward,
            "done": ended,
            "terminated": ended.clone(),
        }
        transitions = {
            "observation": torch.from_numpy(episode.states[at]).float(),
            "action": torch.from_numpy(episode.actions[at]),
            "steps_to_next_obs": torch.from_numpy(steps)[:, None],
            "next": follows,
        }
        self._replay.extend(TensorDict(transitions, batch_size=[len(at)]))

    def learn(self, progress: float = 0.0) -> float:
        """Make one update, at this share of the training; return the loss, NaN without a batch."""
        if len(self._replay) < self.config.batch_size:
            return float("nan")
        for group in self._optimiser.param_groups:
            group["lr"] = self.config.lr * (1.0 - (1.0 - _FINAL_LR) * progress)
        loss = self._loss(self._replay.sample())["loss"]
        self._optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self._weights, _CLIP)
        self._optimiser.step()
        self._target.step()
        for key, weight in self._acting.items():
            self._averages[key].lerp_(weight.detach(), self.config.average_rate)
        self._parameters = None
        return float(loss.detach())

    def _learn_for(self, discount: float) -> None:
        self._loss.make_value_estimator(ValueEstimators.TD0, gamma=discount)
        self._discount = discount

    def state_dict(self) -> dict[str, Any]:
        """Return all that resuming needs, the replay buffer included."""
        return {
            "discount": self._discount,
            "kept discount": self._kept_discount,
            "loss": self._loss.state_dict(),
            "averages": self._averages,
            "optimiser": self._optimiser.state_dict(),
            "replay": self._replay.state_dict() if len(self._replay) else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._learn_for(state["discount"])
        self._kept_discount = state["kept discount"]
        self._loss.load_state_dict(state["loss"])
        self._averages = state["averages"]
        self._optimiser.load_state_dict(state["optimiser"])
        if state["replay"] is not None:
            self._replay.load_state_dict(state["replay"])
        self._parameters = None


@compiled
def _best_actions(parameters: FloatArray, states: FloatArray) -> npt.NDArray[np.int64]:
    """Return the action of highest value for each state [B, D]."""
    actions = np.empty(len(states), dtype=np.int64)
    for b in range(len(states)):
        actions[b] = action_values(parameters, states[b]).argmax()
    return actions
