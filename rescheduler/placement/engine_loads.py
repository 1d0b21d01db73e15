"""What requests of other clients take of engines without a control socket."""

import asyncio
import logging
import re
from itertools import pairwise
from math import isfinite

from rescheduler.openai.openai_request import RequestRefusedError
from rescheduler.placement.account import Account
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.placeable import Placeable, Placements, R
from rescheduler.placement.upstream import EngineRefusedError, Upstream, UpstreamError

logger = logging.getLogger("headway.serve")

METRICS = "/metrics"

_SHORTEST = 0.1
_LARGEST_PAGE = 1 << 20
_MOST_SAMPLES = 1024
_MOST_TOKENS = 1 << 40
_MOST_REQUESTS = 1024
"""Of other clients on an engine; further ones are not counted, their tokens are."""
_SAMPLE = re.compile(
    rb"^vllm:(num_requests_running|num_requests_waiting|kv_cache_usage_perc|cache_config_info)"
    rb"\{([^\n]{0,1000})\} ([0-9.eE+-]{1,40})$",
    re.MULTILINE,
)
_LABEL = re.compile(rb'(?:^|,)(engine|num_gpu_blocks|block_size)="([^"]*)"')
_ANYBODY = Account("")


def read_load(page: bytes) -> tuple[int, int | None]:
    r"""Return the requests on an engine and the tokens in its KV cache, by its ``/metrics``.

    The tokens are :math:`\sum_e u_e B_e b_e` over its data-parallel ranks e, with the usage u of
    ``vllm:kv_cache_usage_perc`` and the B blocks of b tokens of ``vllm:cache_config_info``; None
    if it does not say.

    Raises:
        ValueError: the page is too large, lacks the requests, or has numbers that cannot be.
    """
    if len(page) > _LARGEST_PAGE:
        raise ValueError(f"more than {_LARGEST_PAGE >> 20} MiB")
    requests: float | None = None
    usages: dict[bytes, float] = {}
    sizes: dict[bytes, int] = {}
    for i, sample in enumerate(_SAMPLE.finditer(page)):
        if i == _MOST_SAMPLES:
            raise ValueError(f"more than {_MOST_SAMPLES} samples of its load")
        name, said, number = sample.groups()
        value, labels = float(number), dict(_LABEL.findall(said))
        if not (isfinite(value) and value >= 0):
            raise ValueError(f"{name.decode()} is {value}")
        engine = labels.get(b"engine", b"")
        if name == b"kv_cache_usage_perc":
            usages[engine] = min(value, 1.0)
        elif name == b"cache_config_info":
            sizes[engine] = _tokens(labels)
        else:
            requests = value + (requests or 0.0)
    if requests is None:
        raise ValueError("no vllm:num_requests_running in it")
    known = bool(usages) and all(sizes.get(engine) for engine in usages)
    tokens = sum(usage * sizes[engine] for engine, usage in usages.items()) if known else 0.0
    return int(min(requests, 2.0**30)), min(round(tokens), _MOST_TOKENS) if known else None


def _tokens(labels: dict[bytes, bytes]) -> int:
    """Return how many tokens a KV cache holds; 0 if that is not said, or cannot be."""
    blocks, size = labels.get(b"num_gpu_blocks", b""), labels.get(b"block_size", b"")
    if not (blocks.isdigit() and size.isdigit() and len(blocks) <= 10 and len(size) <= 5):
        return 0
    return int(blocks) * int(size)


class LoadReader:
    """Reads what engines without a control socket have to do for others.

    Every ``probe_seconds`` it asks for their ``/metrics``, and takes off this process's own
    requests. The rest stands in `InstanceState.others` until the next answer. Without one, or with
    one that cannot be read, nothing is assumed; the instance stays in service, and a late answer
    holds up nothing.
    """

    def __init__(self, upstream: Upstream, placements: Placements[R], seconds: float) -> None:
        self._upstream, self._placements = upstream, placements
        self._seconds = max(_SHORTEST, seconds)
        self._said: dict[InstanceState, str] = {}

    async def run(self, instance: InstanceState) -> None:
        """Read an instance's load forever."""
        while True:
            try:
                await self.read(instance)
            except Exception:
                instance.others = []
                logger.exception("%s: reading its load failed", instance.name)
            await asyncio.sleep(self._seconds)

    async def read(self, instance: InstanceState) -> None:
        """Read an instance's load once."""
        if not instance.breaker.closed:
            instance.others = []
            return
        before = set(self._placements.on(instance))
        try:
            requests, tokens = read_load(await self._upstream.get(instance.instance, METRICS))
        except (UpstreamError, EngineRefusedError, RequestRefusedError, ValueError) as error:
            instance.others = []
            if self._said.get(instance) != str(error):
                logger.warning(
                    "%s: its %s cannot be read, so requests of others do not count there: %s",
                    instance.name,
                    METRICS,
                    error,
                )
            self._said[instance] = str(error)
            return
        self._said.pop(instance, None)
        # What came or ended meanwhile may be among the engine's: it is nobody else's.
        own = before.union(self._placements.on(instance))
        mine = sum(request.context_tokens for request in own)
        theirs = max(0, requests - len(own))
        if tokens is None:  # as many each as this process's own have
            tokens = mine + theirs * (mine // max(1, len(own)))
        instance.others = _requests(theirs, max(0, tokens - mine))


def _requests(number: int, tokens: int) -> list[Placeable]:
    """Return as many requests that hold as many tokens, of which nothing else is known."""
    number = min(number, _MOST_REQUESTS)
    ends = [tokens * i // number for i in range(number + 1)] if number else []
    return [
        Placeable("", prompt_tokens=max(1, end - begin), generating=True, account=_ANYBODY)
        for begin, end in pairwise(ends)
    ]
