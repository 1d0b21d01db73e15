"""The learned router: a network says where the first request of the queue goes, or to wait."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import floor, inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from data_collection.files import find_shipped, read_text, replace_file, write_text_atomically
from predictor.compilation import compiled, compiled_core, compiled_inline
from predictor.models.checkpoint_card import front_matter, provenance_rows
from rescheduler.routing.inputs import RoutingInputs, fits, length_bucket, place
from rescheduler.routing.policy import Needs, RoutingPolicy, routing_policy

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

QUEUE_NUMBERS = 3
"""Numbers of the queue, which come first."""

_MOST = 8.0
"""Times its scale above which a count or a prompt is no longer distinguished from a greater one."""


class StateScales(NamedTuple):
    """What the numbers are measured in, so that they are about in [0, 1].

    Attributes:
        slots: B, requests that an instance decodes at once. Four times as many waiting ones are
            the most that are distinguished (C.10).
        requests: of a count of requests that is many.
        prompt_tokens: of a long prompt.
        seconds_per_token: of an average decode batch.
        seconds: of a long wait for the first request to end.
        capacity: share of a KV cache whose being free is much; below it preemptions begin.
    """

    slots: float = 128.0
    requests: float = 32.0
    prompt_tokens: float = 200.0
    seconds_per_token: float = 0.02
    seconds: float = 2.0
    capacity: float = 0.2


def state_size(n_instances: int, n_buckets: int) -> int:
    """Return how many numbers a state has."""
    return QUEUE_NUMBERS + n_instances * (3 + n_buckets)


def state_bounds(scales: StateScales) -> tuple[float, float]:
    """Return what no number of a state is below, and what none is above."""
    return -_MOST, max(_MOST, 4.0 * scales.slots / scales.requests, 1.0 / scales.capacity)


@compiled_core
def router_state(
    inputs: RoutingInputs, scales: StateScales, order: IntArray, state: FloatArray
) -> None:
    """Write the state of a cluster into ``state``, [3 + G·(3 + K)], and who is who into ``order``.

    The order, [G], is by KV load, of equal ones by index. An instance's requests in the prompt
    phase are those without a token yet. Capacity is the free share of the KV cache, below 0 where
    more is queued than fits; it and the seconds are rounded to two decimals (C.10).
    """
    _by_load(inputs.load, order)
    n_waiting, n_buckets = len(inputs.size), len(inputs.edges)
    state[0] = min(n_waiting, 4.0 * scales.slots) / scales.requests
    state[1] = 0.0
    state[2] = 0.0
    if n_waiting > 0:
        state[1] = min(inputs.size[0] / scales.prompt_tokens, _MOST)
        bucket = length_bucket(inputs.edges, inputs.remaining[0])
        state[2] = bucket / max(n_buckets - 1, 1)
    for m in range(len(order)):
        g, at = order[m], QUEUE_NUMBERS + m * (3 + n_buckets)
        decoding = 0
        for k in range(n_buckets):
            decoding += inputs.by_length[g, k]
            state[at + 1 + k] = min(inputs.by_length[g, k] / scales.requests, _MOST)
        state[at] = min((inputs.running[g] - decoding) / scales.requests, _MOST)
        free = 1.0 - inputs.load[g] / inputs.capacity[g]
        state[at + 1 + n_buckets] = max(_two_decimals(free) / scales.capacity, -_MOST)
        seconds = _two_decimals(inputs.soonest[g] * scales.seconds_per_token)
        state[at + 2 + n_buckets] = min(seconds / scales.seconds, 1.0)


@compiled_inline
def _by_load(load: IntArray, order: IntArray) -> None:
    for g in range(len(load)):
        at = g
        while at > 0 and load[order[at - 1]] > load[g]:
            order[at] = order[at - 1]
            at -= 1
        order[at] = g


@compiled_core
def _two_decimals(value: float) -> float:
    return floor(value * 100.0 + 0.5) / 100.0


Layers = Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]

_CARD = """\
{front_matter}# Learned router for {instances} instances ({variant})

A Double DQN {shape} with ReLU that sends the first request of the queue to one of {instances} \
instances of a model, or lets it wait, every {interval:g} s: the policy `rl` of `headway simulate` \
and `headway serve`. What it reads is described in `rescheduler/routing/learned/rl.py`, \
with buckets of expected output from {edges} tokens on. After Jain et al. 2025, "Performance Aware \
LLM Load Balancer for Mixed Workloads".

| | |
|---|---|
{provenance}

It knows the step time, memory, mix and rate of requests that it was trained on. Elsewhere it may
do worse than simpler policies, above all where it may send a request to an instance that is full
(`dispatch: instant`); `docs/papers/jain.md` has figures. It refuses another number of
instances.
"""

_DAMAGED = (
    *(ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError),
    *(RecursionError, SafetensorError),
)
"""What a file raises that is none, or another's."""


@dataclass(frozen=True, eq=False)
class RouterCheckpoint:
    """A trained router.

    Attributes:
        variant: of its training: baseline, aware or guided.
        n_instances: G, of the clusters it can route for; action G is to wait.
        edges: output tokens from which the buckets of its state begin.
        interval: seconds between two decisions.
        scales: of its state.
        layers: weights [out, in] and biases [out] of each layer; ReLU between them.
        provenance: command, commit, versions, machine, settings and results, for the card.

    Raises:
        ValueError: the layers do not fit the state and the actions.
    """

    variant: str
    n_instances: int
    edges: tuple[int, ...]
    interval: float
    scales: StateScales
    layers: Layers
    provenance: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.interval < inf:
            raise ValueError(f"the interval must be above 0, not {self.interval}")
        ascending = all(low < high for low, high in pairwise(self.edges))
        if not self.edges or self.edges[0] != 0 or not ascending:
            raise ValueError(f"edges must ascend from 0, not {list(self.edges)}")
        if not all(0 < scale < inf for scale in self.scales):
            raise ValueError(f"scales must be above 0, not {self.scales._asdict()}")
        if not all(np.isfinite(part).all() for layer in self.layers for part in layer):
            raise ValueError("weights that are no numbers")
        sizes = self.sizes
        wanted = state_size(self.n_instances, len(self.edges)), self.n_instances + 1
        chained = all(
            weight.shape == (sizes[i + 1], sizes[i]) and bias.shape == (sizes[i + 1],)
            for i, (weight, bias) in enumerate(self.layers)
        )
        if not chained or (sizes[0], sizes[-1]) != wanted:
            raise ValueError(
                f"a router of {self.n_instances} instances and {len(self.edges)} buckets reads "
                f"{wanted[0]} numbers and chooses among {wanted[1]} actions, the layers have "
                f"{sizes}"
            )

    @property
    def sizes(self) -> list[int]:
        """Width of the input and of every layer."""
        return _widths(self.layers)

    def save(self, folder: Path) -> None:
        """Write the checkpoint with its card; weights last, so that only a whole one has any."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").unlink(missing_ok=True)
        config = {
            "kind": "router",
            "variant": self.variant,
            "instances": self.n_instances,
            "edges": list(self.edges),
            "interval": self.interval,
            "scales": self.scales._asdict(),
            "sizes": self.sizes,
            "provenance": self.provenance,
        }
        write_text_atomically(folder / "router.json", json.dumps(config, indent=1) + "\n")
        card = _CARD.format(
            front_matter=front_matter("llm-serving", "load-balancing", "reinforcement-learning"),
            instances=self.n_instances,
            variant=self.variant,
            shape="→".join(map(str, self.sizes)),
            interval=self.interval,
            edges=", ".join(map(str, self.edges)),
            provenance=provenance_rows(self.provenance),
        )
        write_text_atomically(folder / "README.md", card)
        tensors = {}
        for i, (weight, bias) in enumerate(self.layers):
            tensors[f"layers.{i}.weight"] = np.ascontiguousarray(weight, dtype=np.float32)
            tensors[f"layers.{i}.bias"] = np.ascontiguousarray(bias, dtype=np.float32)
        with replace_file(folder / "model.safetensors") as temporary:
            temporary.write_bytes(save(tensors))


def load_router(folder: Path) -> RouterCheckpoint:
    """Read a checkpoint.

    Raises:
        ValueError: the folder lacks a file, or one is damaged or of something else.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder, so there is no router")
    for name in ("router.json", "model.safetensors"):
        if not (folder / name).is_file():
            raise ValueError(
                f"{folder}: no {name}, so this is no router; train one with `headway "
                "papers train-router`"
            )
    try:
        config = json.loads(read_text(folder / "router.json"))
        if set(config["scales"]) != set(StateScales._fields):
            raise ValueError(f"scales {sorted(config['scales'])}, not {list(StateScales._fields)}")
        if config["kind"] != "router":
            raise ValueError(f"a checkpoint of kind {config['kind']!r}")
        tensors = load_file(folder / "model.safetensors")
        layers = [
            (tensors[f"layers.{i}.weight"], tensors[f"layers.{i}.bias"])
            for i in range(len(tensors) // 2)
        ]
        return RouterCheckpoint(
            variant=config["variant"],
            n_instances=config["instances"],
            edges=tuple(config["edges"]),
            interval=float(config["interval"]),
            scales=StateScales(**{name: float(of) for name, of in config["scales"].items()}),
            layers=layers,
            provenance=config["provenance"],
        )
    except _DAMAGED as error:
        raise ValueError(f"{folder}: no router that can be read: {error}") from error


def network_parameters(layers: Layers) -> FloatArray:
    """Return a network as one array: layers, width of the input and of each, weights, biases.

    The weights of a layer come as [in, out], so that compiled code adds up whole columns.
    """
    parts = [np.array([len(layers), *_widths(layers)], dtype=np.float64)]
    for weight, bias in layers:
        parts += [weight.T.astype(np.float64).ravel(), bias.astype(np.float64)]
    return np.concatenate(parts)


def _widths(layers: Layers) -> list[int]:
    return [layers[0][0].shape[1], *(weight.shape[0] for weight, _ in layers)]


@compiled
def action_values(parameters: FloatArray, state: FloatArray) -> FloatArray:
    r"""Return :math:`Q(s, a)` of every action, [G + 1].

    .. math:: Q(s) = W_m\,\phi(\dots \phi(W_1 s + b_1) \dots) + b_m, \qquad \phi = ReLU

    Args:
        parameters: of `network_parameters`.
        state: of `router_state`.
    """
    n_layers = int(parameters[0])
    at = n_layers + 2
    values = state
    for layer in range(n_layers):
        n_in, n_out = int(parameters[1 + layer]), int(parameters[2 + layer])
        bias = at + n_in * n_out
        out = parameters[bias : bias + n_out].copy()
        for i in range(n_in):
            value = values[i]
            if value != 0.0:
                for o in range(n_out):
                    out[o] += value * parameters[at + o]
            at += n_out
        if layer < n_layers - 1:
            for o in range(n_out):
                out[o] = max(out[o], 0.0)
        at = bias + n_out
        values = out
    return values


@compiled
def learned_router(
    inputs: RoutingInputs, parameters: FloatArray, target: npt.NDArray[np.int64]
) -> None:
    """Place the first request by the highest value among the actions that are possible.

    It can go where it fits, or wait; but not while no instance has a request at all, where it
    might wait forever. Ties go to the lower load.
    """
    if len(inputs.size) == 0:
        return
    scales = StateScales(
        parameters[0], parameters[1], parameters[2], parameters[3], parameters[4], parameters[5]
    )
    n_instances = len(inputs.load)
    state = np.empty(3 + n_instances * (3 + len(inputs.edges)))
    order = np.empty(n_instances, dtype=np.int64)
    router_state(inputs, scales, order, state)
    values = action_values(parameters[6:], state)
    best = n_instances if inputs.running.sum() > 0 else -1
    for m in range(n_instances - 1, -1, -1):
        g = order[m]
        if fits(inputs, 0, g) and (best < 0 or values[m] >= values[best]):
            best = m
    if 0 <= best < n_instances:
        place(inputs, target, 0, order[best])


@routing_policy("rl")
@dataclass(frozen=True)
class LearnedRouter(RoutingPolicy):
    r"""The action of highest value, :math:`\arg\max_a Q(s, a)`, of a trained network.

    Every ``interval`` of the checkpoint the first request of the queue goes to one of the
    instances, or waits, unless all are empty. In a simulation with instant dispatch it may go to
    any of them, and queues there, as in the paper; else only to one that has a place for it.

    Source: Performance Aware LLM Load Balancer (Jain et al. 2025), §4.3.

    Attributes:
        checkpoint: folder that `headway papers train-router` wrote; or what is in one.

    Raises:
        ValueError: the folder is no checkpoint.
    """

    needs = Needs.LENGTHS
    whole_cluster = True
    kernel = learned_router

    checkpoint: str | Path | RouterCheckpoint = "checkpoints/rl-router"
    _loaded: RouterCheckpoint = field(init=False, repr=False, compare=False)
    _parameters: FloatArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        given = self.checkpoint
        loaded = given if isinstance(given, RouterCheckpoint) else load_router(find_shipped(given))
        object.__setattr__(self, "_loaded", loaded)
        parameters = np.concatenate([loaded.scales, network_parameters(loaded.layers)])
        object.__setattr__(self, "_parameters", parameters)

    def parameters(self) -> FloatArray:
        """Return the scales of the state, and the network."""
        return self._parameters

    def length_edges(self) -> npt.NDArray[np.int64]:
        """Return the buckets of the state."""
        return np.array(self._loaded.edges, dtype=np.int64)

    def decide_every(self) -> float:
        """Return the seconds between two decisions in training."""
        return self._loaded.interval

    def holds_back(self) -> bool:
        """Say that one of its actions is to wait."""
        return True

    def refuse_other_cluster(self, n_instances: int) -> None:
        """Refuse another number of instances: the network has an input and an action for each.

        Raises:
            ValueError: it was trained for another number.
        """
        trained = self._loaded.n_instances
        if n_instances != trained:
            raise ValueError(
                f"rl: the router was trained for {trained} instances, this cluster has "
                f"{n_instances}; train one with `headway papers train-router --config "
                f"configs/rl/paper.yaml --cluster.instances {n_instances} --out FOLDER` and give "
                "FOLDER/router as checkpoint"
            )
