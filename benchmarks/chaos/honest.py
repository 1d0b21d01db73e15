"""Honest clients: OpenAI's own library, and an answer that is known beforehand.

Some have their streams silent: each asks for all of its answer in a single event, the half of them
with tools, with which a request stays where it is.
"""

import asyncio
import random
import time
from typing import Any

import openai

from benchmarks.chaos.ledger import Ledger
from rescheduler.emulation.scripted_answers import LENGTH, SEED

_TEXTS = (
    "Once upon a time, in a small village by the sea, there lived a",
    "The three most important inventions of the last century are",
    "A short history of the bicycle begins in",
    "Dear Sir or Madam, I am writing to you because",
)
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.6, "frequency_penalty": 0.4},
    {"temperature": 0, "extra_body": {"repetition_penalty": 1.2, "min_tokens": 30}},
    {
        "temperature": 1.0,
        "extra_body": {"structured_outputs": {"regex": "([a-z]{2,9} ){30}[a-z]{2,9}"}},
    },
)
_SECONDS = 600.0
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}
_SILENT_QUESTIONS = 4
_AGAIN_SECONDS = 5.0
"""After which a silent stream that failed is asked for again."""


class HonestClients:
    """Ask the same few things again and again, and compare each answer with that in peace.

    Args:
        url: of the proxy.
        model: that is asked.
        questions: how many.
        ledger: counts.
        scripted: whether engines are emulated.
        silent_tokens: of the answer of a silent stream; 0: there are none.
    """

    def __init__(
        self,
        url: str,
        model: str,
        questions: int,
        ledger: Ledger,
        scripted: bool = False,
        silent_tokens: int = 0,
    ) -> None:
        self._client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_SECONDS
        )
        self._model = model
        self._questions = questions
        self._ledger = ledger
        self._sampling = _SAMPLING[:2] if scripted else _SAMPLING
        self._silent_tokens = silent_tokens
        self._expected: list[list[int]] = []
        self._expected_of_silent: list[list[int]] = []

    async def learn(self, at_once: int) -> None:
        limit = asyncio.Semaphore(at_once)

        async def one(fields: dict[str, Any]) -> list[int]:
            async with limit:
                tokens: list[int] = []
                assert await self._ask(fields, tokens), f"{fields} has no end"
                return tokens

        asked = [self._fields(number) for number in range(self._questions)]
        if self._silent_tokens:
            asked += [self._silent_fields(number) for number in range(_SILENT_QUESTIONS)]
        expected = await asyncio.gather(*map(one, asked))
        self._expected = expected[: self._questions]
        self._expected_of_silent = expected[self._questions :]

    async def run(self, at_once: int, until: asyncio.Event, generator: random.Random) -> None:
        """Keep so many requests under way until an event is set, and then until they have ended."""

        async def client() -> None:
            while not until.is_set():
                await self._one(generator.randrange(self._questions))

        await asyncio.gather(*(client() for _ in range(at_once)))

    async def burst(self, count: int, generator: random.Random) -> None:
        """Ask so many at once, and wait for their ends."""
        numbers = [generator.randrange(self._questions) for _ in range(count)]
        await asyncio.gather(*map(self._one, numbers))

    async def run_silent(self, at_once: int, until: asyncio.Event, patience: float) -> None:
        """Keep so many silent streams under way; each is left after so many seconds."""

        async def client(number: int) -> None:
            while not until.is_set():
                await self._silent(number % _SILENT_QUESTIONS, patience)
                number += at_once

        await asyncio.gather(*map(client, range(at_once)))

    async def _silent(self, number: int, patience: float) -> None:
        tokens, how = list[int](), "no end"
        fields = self._silent_fields(number)
        fields["extra_body"]["stream_interval"] = self._silent_tokens
        self._ledger.counts["silent_sent"] += 1
        try:
            async with asyncio.timeout(patience):
                how = "ended" if await self._ask(fields, tokens) else "no end"
        except TimeoutError:
            how = "without_end"
        except openai.APIError as error:
            how = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        self._ledger.silent(number, tokens, self._expected_of_silent[number], how)
        if how != "ended":
            await asyncio.sleep(_AGAIN_SECONDS)

    async def close(self) -> None:
        await self._client.close()

    async def _one(self, number: int) -> None:
        began, tokens, expected = time.monotonic(), list[int](), self._expected[number]

        def failed(how: str, why: object) -> None:
            why = " ".join(f"{type(why).__name__}: {why}".split())[:300]
            self._ledger.failed(number, tokens, expected, began, why, how)

        try:
            ended = await self._ask(self._fields(number), tokens)
        except openai.APIStatusError as error:
            status = error.status_code
            how = "5xx" if status >= 500 else "4xx"
            failed(str(status) if status in (429, 503) else how, error)
        except openai.APIConnectionError as error:
            # Of httpx, or of what `openai` has in its place.
            refused = type(error.__cause__).__name__ == "ConnectError"
            failed("refused" if refused else "broken", error)
        except openai.APIError as error:  # an event of the stream
            failed("5xx", error)
        else:
            if ended:
                self._ledger.ended(number, tokens, expected)
                return
            failed("silent", "no end")
        await asyncio.sleep(0.5)  # as a client that tries again

    def _fields(self, number: int) -> dict[str, Any]:
        """Return what a question asks."""
        text = f"{number}. {_TEXTS[number % len(_TEXTS)]}"
        fields = dict(self._sampling[number % len(self._sampling)])
        extra = {**fields.pop("extra_body", {}), "return_token_ids": True}
        # Where engines are emulated; others do not read it.
        extra["vllm_xargs"] = {LENGTH: 150 + number * 53 % 250, SEED: number}
        fields |= {"max_tokens": 200 + number * 37 % 200, "seed": number}
        return fields | self._prompt(text, chat=number % 4 == 3) | {"extra_body": extra}

    def _silent_fields(self, number: int) -> dict[str, Any]:
        """Return what a silent stream asks."""
        tokens, pinned = self._silent_tokens, number % 2 == 1
        extra: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
        extra["vllm_xargs"] = {LENGTH: tokens, SEED: 10_000 + number}
        fields: dict[str, Any] = {"temperature": 0, "max_tokens": tokens}
        if pinned:
            fields |= {"tools": [_TOOL], "tool_choice": "none"}
        text = f"silent {number}. {_TEXTS[number % len(_TEXTS)]}"
        return fields | self._prompt(text, chat=pinned) | {"extra_body": extra}

    def _prompt(self, text: str, chat: bool) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text}]} if chat else {"prompt": text}

    async def _ask(self, fields: dict[str, Any], tokens: list[int]) -> bool:
        """Ask one thing and take its tokens; return whether the answer had an end."""
        chat = "messages" in fields
        create: Any = self._client.chat.completions if chat else self._client.completions
        stream: Any = await create.create(model=self._model, stream=True, **fields)
        ended = False
        async with stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    tokens += (choice.model_extra or {}).get("token_ids") or []
                    ended |= choice.finish_reason in ("stop", "length")
        return ended
