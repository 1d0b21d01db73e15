"""FairBatching in plain Python: Algorithm 1 and the prefill budget, as the docstrings read."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Waiting(NamedTuple):
    """A request that could be in the next batch; seconds and tokens."""

    slack: float
    tpot: float
    decoding: bool
    wanted: int
    context: int


class Formation(NamedTuple):
    name: str
    a: float
    b: float
    c: float
    max_tokens: int
    token_budget: int


def time_budget(rules: Formation, requests: Sequence[Waiting]) -> float:
    """Return B, infinite without decodes; of a fixed budget the time that its tokens take."""
    if rules.name in ("sarathi", "fairbatching_fixed"):
        return rules.a + rules.b * min(rules.token_budget, rules.max_tokens)
    slacks = [one.slack for one in requests if one.decoding]
    return max(min(slacks), min(one.tpot for one in requests)) if slacks else math.inf


def groups(rules: Formation, requests: Sequence[Waiting]) -> list[list[int]]:
    """Return the three groups in order: decodes that are always taken, and two others."""
    decodes = [i for i, one in enumerate(requests) if one.decoding]
    prefills = [i for i, one in enumerate(requests) if not one.decoding]
    if rules.name == "sarathi":
        return [decodes, prefills, []]
    below = time_budget(rules, requests) + min(one.tpot for one in requests)
    urgent = [i for i in decodes if requests[i].slack < below]
    others = [i for i in decodes if requests[i].slack >= below]
    return [sorted(each, key=lambda i: requests[i].slack) for each in (urgent, prefills, others)]


def plain_batch(rules: Formation, requests: Sequence[Waiting]) -> list[int]:
    """Return how many tokens of each request are computed."""
    taken = [0] * len(requests)
    if not requests:
        return taken
    budget = time_budget(rules, requests)
    time = budget - rules.a if rules.name == "fairbatching" else math.inf
    tokens = rules.max_tokens
    if rules.name == "fairbatching_tokens" and budget < math.inf and rules.b > 0:
        tokens = min(tokens, math.floor(max(budget - rules.a, 0) / rules.b))
    if rules.name in ("sarathi", "fairbatching_fixed"):
        tokens = min(tokens, rules.token_budget)
    urgent, prefills, others = groups(rules, requests)
    for i in urgent + prefills + others:
        one = requests[i]
        reading = rules.c * one.context
        room = rules.max_tokens - sum(taken)
        if i in urgent:
            taken[i] = min(one.wanted, room)
        elif one.wanted <= tokens and rules.b * one.wanted + reading <= time:
            taken[i] = one.wanted
        elif i in prefills and tokens > 0 and time > 0:
            taken[i] = chunk(one.wanted, tokens, time - reading, rules.b)
            if taken[i] == 0 and i == prefills[0] and one.slack < 0:
                taken[i] = chunk(one.wanted, tokens, time, rules.b)
        if taken[i]:
            time -= rules.b * taken[i] + reading
            tokens -= taken[i]
    return taken


def chunk(wanted: int, tokens: int, seconds: float, b: float) -> int:
    if seconds < 0:
        return 0
    most = min(wanted, tokens)
    return most if b * most <= seconds else math.floor(seconds / b)


class Held(NamedTuple):
    """A request that an engine has taken on."""

    slack: float
    context: int
    prompt_left: int


def plain_budget(
    rules: Formation, ttft: float, tpot: float, held: Sequence[Held], whole_steps: bool
) -> float:
    """Return the prompt tokens that fit a TTFT beside what falls due in it."""
    steps = [(ttft - one.slack) / tpot for one in held]
    due = [max(math.floor(n) + 1.0 if whole_steps else n, 0.0) for n in steps]
    decodes = [
        max(n - 1, 0.0) if whole_steps and one.prompt_left else n
        for n, one in zip(due, held, strict=True)
    ]
    work = sum(n * (rules.b + rules.c * one.context) for n, one in zip(decodes, held, strict=True))
    batches = max(due, default=0.0)
    rest = rules.a
    if whole_steps:
        ends = [
            one.slack + (n - 1) * tpot for n, one in zip(due, held, strict=True) if n == batches > 0
        ]
        rest = min(rules.a, ttft - max(min(ends, default=0.0), 0.0))
    seconds = ttft - work - batches * rules.a - rest
    return seconds / (rules.b + rules.c) - sum(one.prompt_left for one in held)
