"""Honest clients: OpenAI's own library, and an answer that is known beforehand."""

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


class HonestClients:
    """Ask the same few things again and again, and compare each answer with that in peace."""

    def __init__(
        self, url: str, model: str, questions: int, ledger: Ledger, scripted: bool = False
    ) -> None:
        self._client = openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=_SECONDS
        )
        self._model, self._questions, self._ledger = model, questions, ledger
        self._sampling = _SAMPLING[:2] if scripted else _SAMPLING
        self._expected: list[list[int]] = []

    async def learn(self, at_once: int) -> None:
        limit = asyncio.Semaphore(at_once)

        async def one(number: int) -> list[int]:
            async with limit:
                tokens: list[int] = []
                assert await self._ask(number, tokens), f"request {number} has no end"
                return tokens

        self._expected = await asyncio.gather(*map(one, range(self._questions)))

    async def run(self, at_once: int, until: asyncio.Event, generator: random.Random) -> None:
        """Keep so many requests under way until an event is set, and then until they have ended."""

        async def client() -> None:
            while not until.is_set():
                await self._one(generator.randrange(self._questions))

        await asyncio.gather(*(client() for _ in range(at_once)))

    async def close(self) -> None:
        await self._client.close()

    async def _one(self, number: int) -> None:
        began, tokens, expected = time.monotonic(), list[int](), self._expected[number]

        def failed(how: str, why: object) -> None:
            why = " ".join(f"{type(why).__name__}: {why}".split())[:300]
            self._ledger.failed(number, tokens, expected, began, why, how)

        try:
            ended = await self._ask(number, tokens)
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

    async def _ask(self, number: int, tokens: list[int]) -> bool:
        """Ask one thing and take its tokens; return whether the answer had an end."""
        text = f"{number}. {_TEXTS[number % len(_TEXTS)]}"
        fields = dict(self._sampling[number % len(self._sampling)])
        extra = {**fields.pop("extra_body", {}), "return_token_ids": True}
        # Where engines are emulated; others do not read it.
        extra["vllm_xargs"] = {LENGTH: 150 + number * 53 % 250, SEED: number}
        fields |= {"model": self._model, "max_tokens": 200 + number * 37 % 200, "seed": number}
        fields |= {"stream": True, "extra_body": extra}
        stream: Any
        if number % 4 == 3:
            messages: Any = [{"role": "user", "content": text}]
            stream = await self._client.chat.completions.create(messages=messages, **fields)
        else:
            stream = await self._client.completions.create(prompt=text, **fields)
        ended = False
        async with stream:
            async for chunk in stream:
                for choice in chunk.choices:
                    tokens += (choice.model_extra or {}).get("token_ids") or []
                    ended |= choice.finish_reason in ("stop", "length")
        return ended
