"""The network of a learned router, as compiled code computes it, and its checkpoint."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from data_collection.files import read_text, replace_file, write_text_atomically
from predictor.compilation import compiled
from predictor.models.checkpoint_card import front_matter, provenance_rows
from rescheduler.routing.learned.router_state import StateScales, state_size

__all__ = ["Layers", "RouterCheckpoint", "action_values", "load_router", "network_parameters"]

FloatArray = npt.NDArray[np.float64]
Layers = Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]]

_CARD = """\
{front_matter}# Learned router for {instances} instances ({variant})

A Double DQN {shape} with ReLU that sends the first request of the queue to one of {instances} \
instances of a model, or lets it wait, every {interval:g} s: the policy `rl` of `headway simulate` \
and `headway serve`. What it reads is described in `rescheduler/routing/learned/router_state.py`, \
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
