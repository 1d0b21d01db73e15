"""What an engine's own past says of the requests that wait in its queue."""

import logging
import time
from collections.abc import Iterator
from functools import lru_cache
from hashlib import blake2b
from threading import Thread
from typing import Any

import numpy as np

from data_collection.vllm_adapter.requests import adapter_of
from predictor.past.length_memory import KeyArray, LengthMemory, Recalled, compile_memory
from predictor.past.memory_file import MemoryFile

logger = logging.getLogger("vllm.headway.order")  # with vLLM's handler

_FINE, _COARSE = 16, 256
"""Tokens of a prompt after which it has one more key: up to 256, and beyond."""
_MOST_TOKENS = 1 << 16
_MOST_NAMES = 4_096
_SAVED_SECONDS = 60.0
"""Between two times that the file is written: by default vLLM kills an engine that is to stop."""


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
        model: that it serves: another one's lengths in the same file say nothing of this one's.
        keys: prefixes that are known at most, 32 bytes each.
        file: that keeps them across restarts; None: a restart forgets them.

    Raises:
        PastError: no such file could be written.
    """

    def __init__(self, model: str, keys: int, file: str | None = None) -> None:
        self._model = model
        self._file = None if file is None else MemoryFile(file, "headway.order.past_file", logger)
        self._memory = LengthMemory(keys) if self._file is None else self._file.load(keys)
        self._copying: Iterator[LengthMemory] | None = None
        self._copy: LengthMemory | None = None
        self._writer: Thread | None = None
        self._keep_at = time.monotonic() + _SAVED_SECONDS
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

    def keep(self) -> None:
        """Keep what is known in the file every minute.

        Each call copies a part. A thread writes the copy, so that no step waits for a disk.
        """
        if self._file is None or (self._copying is None and not self._is_due()):
            return
        try:
            self._copying = self._copying or self._memory.copied()
            copy = next(self._copying, None)
            if copy is not None:
                self._copy = copy
                return
            writer = Thread(target=self._file.save, args=(self._copy,), daemon=True)
            writer.start()
            self._writer = writer
        except Exception:  # the queue is put in order though no memory or thread is left
            logger.exception("what is known of the past is not kept this time")
        self._copying = self._copy = None
        self._keep_at = time.monotonic() + _SAVED_SECONDS

    def _is_due(self) -> bool:
        writes = self._writer is not None and self._writer.is_alive()
        return time.monotonic() >= self._keep_at and not writes

    def close(self) -> None:
        """Keep what is known in the file, if there is one."""
        if self._file is not None:
            self._file.close(self._memory)

    def _recall(self, request: Any) -> Recalled:
        chain = token_keys(request.prompt_token_ids or [], self._memory.salt)
        model = self._key(f"{self._model} {adapter_of(request)}")
        return self._memory.recall(model, self._key(request.cache_salt or ""), chain)
