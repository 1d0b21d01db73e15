"""What an engine's own past says of the requests that wait in its queue."""

from functools import lru_cache
from hashlib import blake2b
from typing import Any

import numpy as np

from data_collection.vllm_adapter.requests import adapter_of
from predictor.past.length_memory import KeyArray, LengthMemory, Recalled, compile_memory

_FINE, _COARSE = 16, 256
"""Tokens of a prompt after which it has one more key: up to 256, and beyond."""
_MOST_TOKENS = 1 << 16
_MOST_NAMES = 4_096


def token_keys(prompt: list[int], salt: bytes) -> KeyArray:
    """Return keys of each longer prefix of a prompt, and of the prompt; [n], at least 1.

    Of a prompt of more than 65,536 tokens the first are read.
    """
    tokens = np.asarray(prompt[:_MOST_TOKENS], dtype=np.int64)
    ends = [*range(_FINE, _COARSE, _FINE), *range(_COARSE, len(tokens), _COARSE)]
    digest, begin, keys = blake2b(key=salt, digest_size=8), 0, []
    for end in [*(one for one in ends if one < len(tokens)), len(tokens)]:
        digest.update(tokens[begin:end].tobytes())
        keys.append(digest.digest())
        begin = end
    return np.frombuffer(b"".join(keys), dtype=np.uint64)


class EnginePast:
    """Learns the lengths of an engine's requests, and forecasts those that wait in its queue.

    An engine does not know who sent a request: whoever gives a ``cache_salt`` is a client, and all
    others are one.

    Args:
        keys: prefixes that are known at most, 32 bytes each.
    """

    def __init__(self, keys: int) -> None:
        self._memory = LengthMemory(keys)
        self._recalled: dict[str, Recalled] = {}
        self._key = lru_cache(_MOST_NAMES)(self._memory.key_of)
        compile_memory()

    def expected(self, request: Any) -> float | None:
        """Return the tokens that a request is expected to generate; None if its client is new."""
        recalled = self._recall(request)
        self._recalled[request.request_id] = recalled
        if recalled.requests == 0:
            return None
        return recalled.length.expected(float(request.max_tokens))

    def ended(self, request: Any, by_itself: bool, cut: bool) -> None:
        """Learn the length of a request that has ended by itself, or by its ``max_tokens``."""
        recalled = self._recalled.pop(request.request_id, None)
        if by_itself and request.num_output_tokens > 0:
            recalled = recalled or self._recall(request)
            self._memory.learn(recalled, request.num_output_tokens, cut)

    def _recall(self, request: Any) -> Recalled:
        chain = token_keys(request.prompt_token_ids or [], self._memory.salt)
        model, client = self._key(adapter_of(request)), self._key(request.cache_salt or "")
        return self._memory.recall(model, client, chain)
