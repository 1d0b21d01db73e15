"""What the past of a client's requests lets expect of the next one, as it arrives."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from math import inf

import msgspec
import numpy as np
from msgspec import Raw

from predictor.live.zmq_sockets import shared_secret
from predictor.past.length_memory import (
    KeyArray,
    LengthMemory,
    PastError,
    Recalled,
    compile_memory,
    kept_chain,
)
from predictor.past.memory_file import MemoryFile
from rescheduler.coordination.coordinated_cluster import instances_digest
from rescheduler.coordination.messages import MOST_TOKENS, LearnedLength
from rescheduler.engines.deployment import Deployment, DeploymentError
from rescheduler.engines.proxy_options import PastOptions
from rescheduler.openai.openai_request import CHAT
from rescheduler.placement.account import OTHERS
from rescheduler.placement.live_request import LiveRequest

logger = logging.getLogger("headway.serve")

_TEMPLATE = (
    *("tools", "tool_choice", "response_format", "structured_outputs"),
    *("reasoning_effort", "chat_template_kwargs", "stop"),
)
"""Fields beside the system's messages that say how answers are to be."""
_PIECE = 2_048
"""Bytes of a prompt after which it has one more key: about 512 tokens."""
_MOST_BYTES, _MOST_MESSAGES = 1 << 20, 4_096
_MOST_TEMPLATE_BYTES = 256 << 10  # of each field
_MOST_NAMES = 4_096
_SAVED_SECONDS = 300.0
_MOST_SIBLINGS = 64
"""Requests of one prompt that are told at once when another one of these has ended, in turn."""


class _Message(msgspec.Struct):
    role: str = ""


_roles = msgspec.json.Decoder(list[_Message])
_messages = msgspec.json.Decoder(list[Raw])


def prefix_keys(body: Mapping[str, Raw], salt: bytes, chat: bool) -> KeyArray:
    """Return keys of a request's template, of each longer prefix of its prompt, and of the prompt.

    The template is its tools, the form and the effort of its answer, and the system's messages
    before all others.
    They are digests by the salt, 64 bits each, of what the client sent: no text can be read from
    them. Of a prompt of more than 1 MiB the first is read, of tools and the like 256 KiB.
    """
    digest = blake2b(key=salt, digest_size=8)
    for name in _TEMPLATE:
        value = memoryview(body.get(name, b""))
        digest.update(b"%s %d " % (name.encode(), len(value)))
        digest.update(value[:_MOST_TEMPLATE_BYTES])
    keys = [digest.digest()]
    for part, is_template in _parts(body.get("messages" if chat else "prompt", Raw()), chat):
        for start in range(0, len(part), _PIECE):
            digest.update(part[start : start + _PIECE])
            keys.append(digest.digest())
        digest.update(b"\0")
        if is_template:  # only all of it has a key
            keys = [digest.digest()]
    return np.frombuffer(b"".join(keys), dtype=np.uint64)


def _parts(prompt: Raw, chat: bool) -> Iterator[tuple[bytes, bool]]:
    """Yield what a prompt consists of, and whether that belongs to the template."""
    whole = bytes(memoryview(prompt)[:_MOST_BYTES])
    if not chat or len(prompt) > len(whole) or whole.count(b"{") > _MOST_MESSAGES:
        yield whole, False
        return
    try:
        roles = [message.role for message in _roles.decode(whole)]  # ends at what is no object
        messages = _messages.decode(whole)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        yield whole, False
        return
    begins = True
    for role, raw in zip(roles, messages, strict=True):
        begins = begins and role in ("system", "developer")
        yield bytes(raw), begins


@dataclass(slots=True)
class _Said:
    """What a request was told last, and what its prompt alone lets expect, if a predictor said."""

    tokens: int | None
    by_prompt: int | None = None


@dataclass(slots=True)
class _Siblings:
    """Requests of one client with the same prompt.

    Attributes:
        said: those that have not ended, and what they were told.
        ended: others that have, meanwhile.
    """

    model: int
    client: int
    chain: KeyArray
    said: dict[LiveRequest, _Said]
    ended: int = 0


def _prompt_key(recalled: Recalled) -> int:
    """Return the last key of a request's chain, which is of its whole prompt and its client."""
    return int(recalled.trail[-2])


def _beside(recalled: Recalled, siblings: _Siblings) -> Recalled:
    """Return what is recalled, where others with the same prompt run."""
    some = islice(siblings.said, _MOST_SIBLINGS)
    longest = max((one.generated_tokens for one in some), default=0)
    return recalled.beside(longest, siblings.ended) if longest else recalled


def _expected(request: LiveRequest, recalled: Recalled, by_prompt: int | None = None) -> int | None:
    """Return the tokens that an answer is expected to have; None if its client is new.

    Of very many clients some are forgotten, and their prefixes known.
    """
    if recalled.requests == 0 and recalled.known == 0:
        return by_prompt
    tokens = recalled.expected(request.max_tokens or inf, by_prompt)
    return max(1, round(tokens), request.fewest_tokens)


def shared_salt(deployment: Deployment) -> bytes | None:
    """Return the salt that all proxies of a coordinator have; None where there is no coordinator.

    It follows from the keys by which they trust each other. Without any, all are on one machine.
    """
    if deployment.coordinator is None:
        return None
    keys = deployment.keys_folder
    secret = b"" if keys is None else shared_secret(keys, "watcher")
    return blake2b(instances_digest(deployment).encode(), key=secret, digest_size=32).digest()


def _tokens_of_an_answer(request: LiveRequest) -> int:
    """Return the tokens that a request has generated; of several answers the mean, if counted."""
    if request.several:
        return round(request.counted_tokens / request.answers)
    return request.generated_tokens


class PastForecasts:
    """Learns from the requests of a proxy that end by themselves, and forecasts those that arrive.

    Of several requests with one prompt, such as retries or a group of rollouts, the others are
    forecast anew whenever one has ended.

    Args:
        options: how much is kept, and where.
        salt: of digests; None: that of the file, or a random one.

    Attributes:
        memory: of their lengths.
        tell: takes what has been learned here, for other proxies with the same salt.

    Raises:
        DeploymentError: nothing could be kept where the options say.
    """

    def __init__(self, options: PastOptions, salt: bytes | None = None) -> None:
        self._file: MemoryFile | None = None
        if options.file is None:
            self.memory = LengthMemory(options.keys, salt)
        else:
            try:
                self._file = MemoryFile(options.file, "proxy.past.file", logger)
            except PastError as error:
                raise DeploymentError(str(error)) from error
            self.memory = self._file.load(options.keys, salt)
        self.tell: Callable[[LearnedLength], None] = lambda learned: None
        self._running: dict[LiveRequest, Recalled] = {}
        self._siblings: dict[int, _Siblings] = {}
        self._key = lru_cache(_MOST_NAMES)(self.memory.key_of)
        compile_memory()

    def expected(self, request: LiveRequest) -> int | None:
        """Return the tokens that an answer is expected to have; None if its client is new.

        It is learnt from when it ends.
        """
        client = request.client
        if client.direct == "path" or request.account.name == OTHERS:
            return None  # not all of these generate anything, or are of one client
        model = self._key(f"model {request.model}")
        owner = self._key(f"client {request.account.name}")
        chain = prefix_keys(client.body, self.memory.salt, client.path == CHAT)
        recalled = self.memory.recall(model, owner, chain)
        prompt = _prompt_key(recalled)
        siblings = self._siblings.setdefault(prompt, _Siblings(model, owner, chain, {}))
        recalled = _beside(recalled, siblings)
        self._running[request] = recalled
        siblings.said[request] = said = _Said(_expected(request, recalled))
        return said.tokens

    def with_prompt(self, request: LiveRequest, by_prompt: int) -> int:
        """Return the tokens that an answer is expected to have by its prompt and the past."""
        recalled = self._running.get(request)
        if recalled is None:
            return by_prompt
        said = self._siblings[_prompt_key(recalled)].said[request]
        said.by_prompt = by_prompt
        said.tokens = _expected(request, recalled, by_prompt)
        return said.tokens or by_prompt

    def ended(self, request: LiveRequest, by_itself: bool) -> None:
        """Learn the length of a request that has ended by itself, or by its ``max_tokens``."""
        recalled = self._running.pop(request, None)
        if recalled is None:
            return
        prompt = _prompt_key(recalled)
        siblings = self._siblings[prompt]
        del siblings.said[request]
        if not siblings.said:
            del self._siblings[prompt]
        tokens = _tokens_of_an_answer(request)
        if by_itself and tokens:
            cut = request.max_tokens is not None and tokens >= request.max_tokens
            self.memory.learn(recalled, tokens, cut)
            siblings.ended += 1
            chain = kept_chain(siblings.chain).tobytes()
            length = min(tokens, MOST_TOKENS)
            self.tell(LearnedLength(siblings.model, siblings.client, chain, length, cut))
            if siblings.said:
                self._tell(siblings)

    def take(self, learned: Sequence[LearnedLength]) -> None:
        """Learn what other proxies have."""
        prompts = dict[int, None]()
        for one in learned:
            chain = np.frombuffer(one.chain, dtype=np.uint64)
            recalled = self.memory.recall(one.model, one.client, chain)
            self.memory.learn(recalled, one.length, one.cut)
            prompts[_prompt_key(recalled)] = None
        for prompt in prompts:
            siblings = self._siblings.get(prompt)
            if siblings is not None:
                siblings.ended += 1
                self._tell(siblings)

    def _tell(self, siblings: _Siblings) -> None:
        """Forecast some of the requests anew whose prompt has just been answered once more.

        Those that run keep what was forecast: of answers to one prompt the short ones end first,
        and say nothing of those that have outlived them.
        """
        recalled = self.memory.recall(siblings.model, siblings.client, siblings.chain)
        recalled = _beside(recalled, siblings)
        expected: dict[tuple[int | None, ...], int | None] = {}  # most are alike
        for request, said in [*islice(siblings.said.items(), _MOST_SIBLINGS)]:
            del siblings.said[request]
            if not request.generated_tokens and request.expected_tokens == said.tokens:
                alike = request.max_tokens, request.fewest_tokens, said.by_prompt
                if alike not in expected:
                    expected[alike] = _expected(request, recalled, said.by_prompt)
                request.expected_tokens = said.tokens = expected[alike]
                self._running[request] = recalled
            siblings.said[request] = said  # the others have their turn first

    async def run(self) -> None:
        """Keep what is known in the file every five minutes, forever."""
        while self._file is not None and self._file.usable:
            await asyncio.sleep(_SAVED_SECONDS)
            await asyncio.to_thread(self._file.save, await self._copied())

    async def _copied(self) -> LengthMemory:
        """Return a copy of what is known, made in many turns of the event loop."""
        copy = self.memory
        for part in self.memory.copied():
            copy = part
            await asyncio.sleep(0)
        return copy

    def close(self) -> None:
        """Keep what is known in the file, if there is one."""
        if self._file is not None:
            self._file.close(self.memory)
