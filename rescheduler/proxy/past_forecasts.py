"""What the past of a client's requests lets expect of the next one, as it arrives."""

import asyncio
import logging
from collections.abc import Iterator, Mapping
from functools import lru_cache
from hashlib import blake2b
from math import inf
from pathlib import Path

import msgspec
import numpy as np
from msgspec import Raw

from predictor.past.length_memory import KeyArray, LengthMemory, PastError, Recalled
from rescheduler.engines.deployment import PastOptions
from rescheduler.placement.live_request import LiveRequest

logger = logging.getLogger("headway.serve")

_TEMPLATE = ("tools", "tool_choice", "response_format")
_PIECE = 2_048
"""Bytes of a prompt after which it has one more key: about 512 tokens."""
_MOST_BYTES, _MOST_MESSAGES = 1 << 20, 4_096
_MOST_NAMES = 4_096
_SAVED_SECONDS = 300.0


class _Message(msgspec.Struct):
    role: str = ""


_messages = msgspec.json.Decoder(list[Raw])
_message = msgspec.json.Decoder(_Message)


def prefix_keys(body: Mapping[str, Raw], salt: bytes) -> KeyArray:
    """Return keys of a request's template, of each longer prefix of its prompt, and of the prompt.

    The template is its tools, the form of its answer and the system's messages before all others.
    They are digests by the salt, 64 bits each, of what the client sent: no text can be read from
    them. Of a prompt of more than 1 MiB the first is read.
    """
    digest = blake2b(key=salt, digest_size=8)
    for name in _TEMPLATE:
        digest.update(b"%s %s\0" % (name.encode(), bytes(body.get(name, b""))))
    keys = [digest.digest()]
    for part, is_template in _parts(body):
        for start in range(0, len(part), _PIECE):
            digest.update(part[start : start + _PIECE])
            keys.append(digest.digest())
        digest.update(b"\0")
        if is_template:  # only all of it has a key
            keys = [digest.digest()]
    return np.frombuffer(b"".join(keys), dtype=np.uint64)


def _parts(body: Mapping[str, Raw]) -> Iterator[tuple[bytes, bool]]:
    """Yield what a prompt consists of, and whether that belongs to the template."""
    given = bytes(body.get("messages", body.get("prompt", b"")))
    whole = given[:_MOST_BYTES]
    if "messages" not in body or len(given) > len(whole) or given.count(b"{") > _MOST_MESSAGES:
        yield whole, False
        return
    try:
        messages = _messages.decode(given)
    except (msgspec.DecodeError, RecursionError):
        messages = [Raw(whole)]
    begins = True
    for raw in messages:
        begins = begins and _is_system(raw)
        yield bytes(raw), begins


def _is_system(raw: Raw) -> bool:
    try:
        return _message.decode(raw).role in ("system", "developer")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False


class PastForecasts:
    """Learns from the requests of a proxy that end by themselves, and forecasts those that arrive.

    Args:
        options: how much is kept, and where.

    Attributes:
        memory: of their lengths.
    """

    def __init__(self, options: PastOptions) -> None:
        self._path = None if options.file is None else Path(options.file).expanduser()
        self.memory = LengthMemory(options.keys)
        if self._path is not None and self._path.exists():
            try:
                self.memory = LengthMemory.load(self._path, options.keys)
            except (OSError, PastError) as error:
                logger.warning("proxy.past: begins anew: %s", error)
        self._running: dict[LiveRequest, Recalled] = {}
        self._key = lru_cache(_MOST_NAMES)(self._digest)
        self._failed = False
        self._compile()

    def expected(self, request: LiveRequest) -> int | None:
        """Return the tokens that an answer is expected to have; None if its client is new.

        It is learnt from when it ends.
        """
        client = request.client
        if client.direct == "path":  # not all of these generate anything
            return None
        recalled = self.memory.recall(
            self._key("model", request.model),
            self._key("client", request.account.name),
            prefix_keys(client.body, self.memory.salt),
        )
        self._running[request] = recalled
        if recalled.requests == 0:
            return None
        tokens = round(recalled.length.expected(request.max_tokens or inf))
        return max(1, tokens, request.fewest_tokens)

    def ended(self, request: LiveRequest, by_itself: bool) -> None:
        """Learn the length of a request that has ended by itself, or by its ``max_tokens``."""
        recalled = self._running.pop(request, None)
        tokens = request.generated_tokens
        if recalled is not None and by_itself and tokens and not request.several:
            self.memory.learn(recalled, tokens, request.was_cut)

    async def run(self) -> None:
        """Keep what is known in the file every five minutes, forever."""
        while self._path is not None:
            await asyncio.sleep(_SAVED_SECONDS)
            await asyncio.to_thread(self._save, self.memory.copy())

    def close(self) -> None:
        """Keep what is known in the file, if there is one."""
        self._save(self.memory)

    def _save(self, memory: LengthMemory) -> None:
        if self._path is None:
            return
        try:
            memory.save(self._path)
        except OSError as error:
            if not self._failed:
                logger.warning("proxy.past.file: %s; only the first failure is shown", error)
            self._failed = True

    def _digest(self, kind: str, name: str) -> int:
        raw = f"{kind} {name}".encode(errors="surrogatepass")
        digest = blake2b(raw, key=self.memory.salt, digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def _compile(self) -> None:
        """Recall and learn once, so that no request waits for a compiler."""
        other = LengthMemory(0)
        other.learn(other.recall(1, 1, np.ones(1, dtype=np.uint64)), 1)
