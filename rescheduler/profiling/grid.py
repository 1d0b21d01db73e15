"""Driving an engine through steps of many sizes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np

from rescheduler.step_time.profile import EngineDescription

__all__ = ["drive", "grid"]

_DECODED = 10
_SHORTEST = 8
_REPEATS = 3
_TOKENS = 10_000
"""Prompts' token ids are below; every model's vocabulary is larger."""
_LONGEST_SECONDS = 600.0


@dataclass(frozen=True)
class Cell:
    """Requests that are sent at once.

    Attributes:
        requests: how many.
        prompt_tokens: of each.
        output_tokens: of each.
        late_prompt_tokens: of one more request, sent while the others decode; 0 for none.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    late_prompt_tokens: int = 0


def grid(engine: EngineDescription, points: int = 5) -> list[Cell]:
    """Return what an engine is driven through: prompts alone, decodes alone, both together.

    Sizes are spread geometrically, from a prompt of 8 tokens to the longest context, and from
    one request to as many as the engine runs at a time.
    """
    longest = engine.max_model_len - _DECODED - 1
    lengths = np.unique(np.geomspace(_SHORTEST, longest, points).astype(int)).tolist()
    batches = np.unique(np.geomspace(1, engine.max_num_seqs, points).astype(int)).tolist()
    cells = [Cell(1, length, 1) for length in lengths] * _REPEATS
    for batch in batches:
        cells += [Cell(batch, length, _DECODED) for length in lengths]
        if batch < engine.max_num_seqs:
            cells += [Cell(batch, lengths[1], 2 * _DECODED, length) for length in lengths[1:]]
    return cells


async def drive(url: str, cells: Sequence[Cell], seed: int) -> AsyncIterator[Cell]:
    """Send the cells' requests, one cell after another; yield each cell when it is answered.

    Prompts are random tokens, so that nothing of them is cached.

    Raises:
        ValueError: no server is there, or it rejected a request.
    """
    generator = np.random.default_rng(seed)
    limit = aiohttp.ClientTimeout(total=_LONGEST_SECONDS)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    try:
        async with aiohttp.ClientSession(timeout=limit, connector=connector) as session:
            async with session.get(f"{url}/v1/models") as response:
                response.raise_for_status()
                model = (await response.json())["data"][0]["id"]
            for cell in cells:
                await _send(session, url, model, cell, generator)
                yield cell
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ValueError(f"{url}: {error or type(error).__name__}") from error


async def _send(
    session: aiohttp.ClientSession, url: str, model: str, cell: Cell, generator: np.random.Generator
) -> None:
    """Send a cell's requests, and wait for all answers."""
    first_token = asyncio.Event()

    async def ask(prompt_tokens: int, output_tokens: int) -> None:
        body = {
            "model": model,
            "prompt": generator.integers(1000, _TOKENS, prompt_tokens).tolist(),
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
        }
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                text = (await response.text())[:500]
                raise ValueError(f"{url} rejected a request: {response.status} {text}")
            async for _ in response.content:
                first_token.set()

    async def ask_later() -> None:
        await first_token.wait()
        await ask(cell.late_prompt_tokens, 1)

    asking = [ask(cell.prompt_tokens, cell.output_tokens) for _ in range(cell.requests)]
    # The first of several failures is raised as it is.
    await asyncio.gather(*asking, *([ask_later()] if cell.late_prompt_tokens else []))
