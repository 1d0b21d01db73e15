"""The card of a router's checkpoint, made from its configuration."""

from typing import Any

__all__ = ["router_card"]

_CARD = """\
---
license: apache-2.0
library_name: headway
tags:
- llm-serving
- load-balancing
- reinforcement-learning
---
# Learned router for {instances} instances ({variant})

A Double DQN {shape} with ReLU that sends the first request of the queue to one of {instances} \
instances of a model, or lets it wait, every {interval:g} s. It reads {inputs} numbers: the \
queue's length, the first request's prompt and the bucket of its expected output, and of each \
instance, in ascending order of KV load, requests in the prompt phase, decoding requests by bucket \
(from {edges} tokens on), free capacity and the seconds until one is expected to end. After \
Jain et al. 2025, "Performance Aware LLM Load Balancer for Mixed Workloads".

| | |
|---|---|
{provenance}

```
headway simulate --config FILE.yaml --policies '[{{name: rl, checkpoint: this folder}}]'
```

It knows the step time, memory, mix and rate of requests that it was trained on. Elsewhere it may
do worse than simpler policies, above all where it may send a request to an instance that is full
(`dispatch: instant`); `docs/papers/rl_router.md` has figures. It refuses another number of
instances.
"""


def router_card(config: dict[str, Any]) -> str:
    """Return the card's text for a checkpoint's ``router.json``."""
    edges = [str(edge) for edge in config["edges"]]
    return _CARD.format(
        instances=config["instances"],
        variant=config["variant"],
        shape="→".join(map(str, config["sizes"])),
        interval=config["interval"],
        inputs=config["sizes"][0],
        edges=f"{', '.join(edges[:-1])} and {edges[-1]}" if len(edges) > 1 else edges[0],
        provenance="\n".join(
            f"| {name} | {_cell(value)} |" for name, value in config["provenance"].items()
        ),
    )


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|")
