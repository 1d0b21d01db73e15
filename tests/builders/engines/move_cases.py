"""Requests that go from one engine to the other and back, whatever they are sampled with."""

import asyncio
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from moving import GREEDY, Engine, Generation, moved


@dataclass(frozen=True)
class Case:
    """A request to generate without moves, and with moves after the tokens of its cuts."""

    body: dict[str, Any]
    cuts: tuple[int, ...] = (5, 21)
    chat: bool = False
    expected: Callable[[Generation], bool] = lambda generation: len(generation.tokens) >= 40


CODE = r"[0-9]{3}-[0-9]{4}-(red|green|blue)-[a-f]{12}"
QUESTION = "Tell me about the moon in three sentences."
SAMPLED = GREEDY | {"temperature": 1.0, "seed": 7}
CASES = {
    "greedy": Case(GREEDY, (8, 24)),
    "seed": Case(SAMPLED),
    "top-p-top-k": Case(SAMPLED | {"temperature": 0.8, "top_p": 0.9, "top_k": 40}),
    "repetition-penalty": Case(GREEDY | {"repetition_penalty": 1.3}),
    "other-penalties": Case(GREEDY | {"presence_penalty": 1.0, "frequency_penalty": 0.7}),
    "seed-and-penalties": Case(SAMPLED | {"frequency_penalty": 0.5, "repetition_penalty": 1.1}),
    "logprobs": Case(
        GREEDY | {"logprobs": 2},
        expected=lambda generation: len(generation.logprobs) == len(generation.tokens) == 48,
    ),
    "bad-words": Case(GREEDY | {"bad_words": ["sea", "girl"]}),
    "min-tokens": Case(GREEDY | {"min_tokens": 40, "ignore_eos": False, "max_tokens": 60}),
    # The end is forbidden until the 30th token, wherever the first of them came from.
    "min-tokens-of-a-short-answer": Case(
        {"prompt": "Yes or no? Answer:", "max_tokens": 60, "temperature": 0, "min_tokens": 30},
        (6, 20),
        expected=lambda generation: len(generation.tokens) >= 30,
    ),
    "logit-bias": Case(GREEDY | {"logit_bias": {"28": -100}}),
    "grammar": Case(
        SAMPLED
        | {
            "prompt": "An order number reads:",
            "ignore_eos": False,
            "max_tokens": 40,
            "structured_outputs": {"regex": CODE},
        },
        (6, 14),
        expected=lambda generation: bool(re.fullmatch(CODE, generation.text)),
    ),
    "chat": Case(
        {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 40, "temperature": 0},
        (7, 19),
        chat=True,
        expected=lambda generation: len(generation.text) > 40,
    ),
}

Compared = dict[str, "asyncio.Task[tuple[Generation, Generation]]"]


async def there_and_back(engines: list[Engine], cases: Mapping[str, Case] = CASES) -> Compared:
    """Generate each case without and with moves, some of them at the same time."""
    places = asyncio.Semaphore(6)

    async def compare(case: Case) -> tuple[Generation, Generation]:
        async with places:
            alone = asyncio.create_task(moved(engines, case.body, [], case.chat))
            for _ in range(20):  # on a busy machine a request may end before it is frozen
                hopping = await moved(engines, case.body, case.cuts, case.chat)
                if hopping.hops == len(case.cuts):
                    return await alone, hopping
        raise AssertionError("the request ended before each of its moves")

    tasks = {name: asyncio.create_task(compare(case)) for name, case in cases.items()}
    await asyncio.wait(tasks.values())
    return tasks


def assert_unchanged(compared: Compared, name: str, case: Case) -> None:
    """Assert the same tokens, text, log-probabilities and end of a case."""
    alone, hopping = compared[name].result()
    assert hopping.tokens == alone.tokens
    assert hopping.text == alone.text
    assert hopping.finish_reason == alone.finish_reason
    assert hopping.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
    assert case.expected(hopping)
