"""Where the answers of vLLM and of the proxy differ."""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from benchmarks.equality.asking import Server
from benchmarks.equality.cases import Case

_AT_A_TIME = 4
_NEAR = 2e-3
"""Of logprobs: a prompt computed in other pieces rounds otherwise."""
_ABSENT = "(absent)"


class Difference(msgspec.Struct, frozen=True):
    """A request that the proxy answers otherwise; ``fields`` where the statuses are the same."""

    request: str
    vllm: int
    proxy: int
    fields: list[str]
    reason: str = ""


async def compare(cases: Sequence[Case], vllm: str, proxy: str) -> list[Difference]:
    """Ask both servers everything, and return what they answer otherwise, in the cases' order."""
    servers, gate = (Server(vllm), Server(proxy)), asyncio.Semaphore(_AT_A_TIME)

    async def one(case: Case) -> Difference | None:
        async with gate:
            direct, served = [await server.ask(case) for server in servers]
        fields = sorted(set(_differ(direct, served)))
        if not fields:
            return None
        statuses = direct["status"], served["status"]
        return Difference(case.request, *statuses, [] if statuses[0] != statuses[1] else fields)

    try:
        found = await asyncio.gather(*map(one, cases))
    finally:
        for server in servers:
            await server.close()
    return [difference for difference in found if difference is not None]


def _differ(vllm: Any, proxy: Any, at: str = "") -> Iterator[str]:
    """Yield the names of what differs; an element of a list has that of the list."""
    if isinstance(vllm, dict) and isinstance(proxy, dict):
        for key in dict.fromkeys([*vllm, *proxy]):
            where = f"{at}.{key}" if at else key
            yield from _differ(vllm.get(key, _ABSENT), proxy.get(key, _ABSENT), where)
    elif isinstance(vllm, list) and isinstance(proxy, list) and len(vllm) == len(proxy):
        for one, other in zip(vllm, proxy, strict=True):
            yield from _differ(one, other, at)
    elif isinstance(vllm, float) and isinstance(proxy, int | float):
        if not abs(vllm - proxy) <= _NEAR:
            yield at
    elif at.endswith("system_fingerprint"):  # it ends with a hash of the engine's configuration
        if str(vllm).rpartition("-")[0] != str(proxy).rpartition("-")[0]:
            yield at
    elif vllm != proxy:
        yield at
