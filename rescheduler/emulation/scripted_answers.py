"""How long an emulated engine's answers are, and what they say."""

import math
import zlib
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from struct import unpack
from typing import Any, NamedTuple

import numpy as np

from data_collection.capture.requests import MIGRATION_PARAMS, parse_request_id
from rescheduler.emulation.emulate_options import AnswerLengths

LENGTH = "emulated_length"
"""Key of a request's ``vllm_xargs``: tokens of its answer, the end included."""
SEED = "emulated_seed"
"""Key of a request's ``vllm_xargs``: which words its answer has."""
TOKENS = "emulated_tokens"
"""Key of a request's ``vllm_xargs``: token ids that its answer begins with, such as a tool call."""

LARGEST = 1 << 31
"""Lengths and seeds are below this."""
_FIRST_WORD, _WORDS = 1_000, 1_024


def refuse_unscripted(arguments: Mapping[str, Any]) -> None:
    """Refuse a length or a seed that is none, of what a client attached to its request.

    Raises:
        ValueError: names the key, and what it may be.
    """
    for key, least in ((LENGTH, 1), (SEED, 0)):
        value = arguments.get(key, least)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not least <= value < LARGEST or value != int(value):
            raise ValueError(
                f"vllm_xargs, {key} must be a whole number from {least} to {LARGEST - 1}, "
                f"not {value!r}"
            )
    if TOKENS in arguments and _token_ids(arguments[TOKENS]) is None:
        raise ValueError(f"vllm_xargs, {TOKENS} must be a list of token ids")


def scripted_token(seed: int, n: int, vocabulary: int) -> int:
    """Return token n of an answer, which is never its end: a word past the special tokens."""
    first = min(_FIRST_WORD, vocabulary // 2)
    word = zlib.crc32(b"%d %d" % (seed, n)) % min(_WORDS, vocabulary - first)
    return first + word


def standard_normal(key: str) -> float:
    """Return a standard normal number that depends on a text alone (Box and Muller)."""
    u, v = ((number + 0.5) / 2**32 for number in unpack("<II", _digest(key)))
    return math.sqrt(-2 * math.log(u)) * math.cos(2 * math.pi * v)


def _digest(key: str) -> bytes:
    return blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest()


class Script(NamedTuple):
    """An answer: its tokens with the end, its words, and its request's name on every engine.

    It begins with the ``tokens``, of which those beyond the vocabulary are others.
    """

    length: int
    seed: int
    key: str
    tokens: Sequence[int] = ()


class ScriptedAnswers:
    """The answers of the requests that an engine has, the same on every engine that they move to.

    Lengths that requests do not state follow the law; words are of the vocabulary's tokens.

    Attributes:
        scripts: the answers, by the request's id in the engine.
    """

    def __init__(self, law: AnswerLengths, vocabulary: int) -> None:
        self._law, self._vocabulary = law, vocabulary
        self.scripts: dict[str, Script] = {}

    def begin(self, name: str, arguments: Mapping[str, Any], min_tokens: int) -> None:
        """Learn of a request."""
        key = _key(name, arguments)
        seed = _whole(arguments.get(SEED), int.from_bytes(_digest(key)[:4], "little"))
        given = _token_ids(arguments.get(TOKENS)) or ()
        tokens = [token % self._vocabulary for token in given]
        drawn = len(tokens) + 1 if tokens else self._drawn(key)
        length = max(_whole(arguments.get(LENGTH), drawn), min_tokens, 1)
        self.scripts[name] = Script(length, seed, key, tokens)

    def token(self, name: str, n: int) -> int | None:
        """Return token n of a request's answer, None where it ends; past that, others."""
        script = self.scripts[name]
        if n + 1 == script.length:
            return None
        if n < len(script.tokens):
            return script.tokens[n]
        return scripted_token(script.seed, n, self._vocabulary)

    def forget(self, names: Sequence[str]) -> None:
        """Forget requests."""
        for name in names:
            self.scripts.pop(name, None)

    def _drawn(self, key: str) -> int:
        law = self._law
        length = law.median * np.exp(law.sigma * standard_normal(f"length {key}"))
        return int(min(max(round(length), 1), law.longest))


def _key(name: str, arguments: Mapping[str, Any]) -> str:
    transfer = arguments.get("kv_transfer_params")
    headway = transfer.get(MIGRATION_PARAMS) if isinstance(transfer, dict) else None
    id = headway.get("id") if isinstance(headway, dict) else None
    parsed = parse_request_id(name)
    stem = id if isinstance(id, str) else f"{parsed.external_id} {parsed.prompt_index}"
    return f"{stem} {parsed.sample_index}"


def _whole(value: Any, otherwise: int) -> int:
    """Return a whole number that a client gave, if it is one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return int(value) if is_number and 0 <= value < LARGEST else otherwise


def _token_ids(value: Any) -> list[int] | None:
    """Return token ids that a client gave, if they are such."""
    if not isinstance(value, list):
        return None
    ids = [_whole(token, -1) for token in value]
    return (
        ids if all(id >= 0 and id == token for id, token in zip(ids, value, strict=True)) else None
    )
