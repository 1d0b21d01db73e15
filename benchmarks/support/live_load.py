"""The requests of a live measurement: mixed lengths, another draw each round, the same every time.

Requests that ask for long answers, and others, half of each, in random order. A round draws
prompts, seeds and gaps between arrivals of its own; loads only stretch its gaps.
"""

import random
import re

from data_collection.workload.prompts import load_prompts
from rescheduler.demo.demo_load import LoadRequest

_ASKS_FOR_MUCH = re.compile(
    r"[0-9]00 words|\blong\b|detail|interview|hour by hour|verses|30 |tutorial|table|every"
    r"|Write a story|steps"
)


def round_load(number: int, requests: int, rate: float, max_tokens: int) -> list[LoadRequest]:
    """Return a round's requests, a Poisson process; at an infinite rate all come at once."""
    generator = random.Random(number)
    kinds: tuple[list[tuple[str, str]], list[tuple[str, str]]] = ([], [])
    for prompt in load_prompts("starter"):
        text = prompt.messages[-1]["content"]
        kinds[_ASKS_FOR_MUCH.search(text) is None].append((prompt.id, text))
    much = generator.sample(kinds[0], requests // 2)
    little = generator.sample(kinds[1], requests - requests // 2)
    chosen = much + little
    generator.shuffle(chosen)
    load, now = [], 0.0
    for i, (name, text) in enumerate(chosen):
        now += generator.expovariate(1.0) / rate
        load.append(LoadRequest(name, text, max_tokens, 1_000 * number + i, now))
    return load
