"""The text of a request whose tokens come from several engines, and where a stop string ends it."""

from collections.abc import Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rescheduler.openai.openai_request import TextRules


class ContinuedText:
    """Turns tokens into text one by one, as vLLM's incremental detokenizer does.

    An engine that takes over a request knows the earlier tokens as part of its prompt: it would
    find no stop string that began before, and after a cut inside a character it would repeat the
    whole prompt. So the proxy makes the text itself from the first cut on.

    The tokens of the original prompt decide the first token's spaces.

    Attributes:
        tokens: generated tokens taken so far.
        text: of them, cut where a stop string ended it.
        stopped: the stop string that ended it; None while there is none.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], rules: TextRules
    ) -> None:
        self.tokens = 0
        self.text = ""
        self.stopped: str | None = None
        self._tokenizer, self._rules = tokenizer, rules
        self._stream = DecodeStream(
            ids=list(prompt_token_ids), skip_special_tokens=rules.skip_special_tokens
        )
        withheld = rules.stop and not rules.include_stop
        self._withheld = max(map(len, rules.stop)) - 1 if withheld else 0
        self._taken = 0
        self._special: dict[int, str] = {}
        if not rules.skip_special_tokens and not rules.spaces_between_special_tokens:
            added = tokenizer.get_added_tokens_decoder()
            self._special = {token: entry.content for token, entry in added.items()}
        self._last_was_special = False

    def follow(self, token_ids: Sequence[int]) -> None:
        """Take tokens of an engine that has looked for stop strings itself, and found none."""
        self.tokens += len(token_ids)
        self.text += "".join(map(self._decoded, token_ids))

    def skip(self, characters: int) -> None:
        """Set how much of the text the client already has."""
        self._taken = characters

    def add(self, token_ids: Sequence[int], ended_by_token: bool = False) -> int:
        """Take tokens; return how many of them count: those after a stop string do not.

        One that ended the request (an end of sequence, or a stop token) is shown only if the rules
        include it.
        """
        for i, token in enumerate(token_ids):
            last = ended_by_token and i + 1 == len(token_ids)
            self.tokens += 1
            if last and not self._rules.include_stop:
                return i + 1
            new = self._decoded(token)
            self.text += new
            if new and self.tokens > self._rules.min_tokens and self._stops(len(new)):
                return i + 1
        return len(token_ids)

    def take(self, finished: bool) -> str:
        """Return the text that can be shown and was not yet.

        Once it is finished, what might have been the beginning of a stop string is text after all.
        """
        start, end = self._taken, len(self.text) - (0 if finished else self._withheld)
        self._taken = max(start, end)
        return self.text[start : self._taken]

    def _decoded(self, token: int) -> str:
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception as error:
            # Tokenizers whose text of more tokens does not begin with that of fewer.
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._rules.skip_special_tokens)
            text = self._stream.step(self._tokenizer, token)
        if self._special:
            special = self._special.get(token)
            if special is not None and self._last_was_special:
                text = special
            self._last_was_special = special is not None
        return text or ""

    def _stops(self, new_characters: int) -> bool:
        """Look for the stop string that ends first in the newest characters."""
        best_end = len(self.text) + 1
        for stop in self._rules.stop:
            at = self.text.find(stop, max(0, len(self.text) - new_characters - len(stop) + 1))
            if at >= 0 and at + len(stop) < best_end:
                self.stopped, best_end = stop, at + len(stop)
        if self.stopped is None:
            return False
        shown = best_end if self._rules.include_stop else best_end - len(self.stopped)
        self.text = self.text[:shown]
        return True


class ParsedAgain:
    """What an engine needs to parse an answer again, and what it cannot know of it.

    The parser's state is in the server of one engine. The next engine parses all tokens again, in
    the same chunks, and tells what comes after those that the client has: first the last chunk of
    the engine that froze the request, which the client has not seen.

    Attributes:
        cut: another engine goes on.
        shown: tokens whose chunks the client has.
        chunks: in which tokens came: how many in a row, and the tokens of each.
    """

    def __init__(self) -> None:
        self.cut = False
        self.shown = 0
        self.chunks: list[list[int]] = []
        self._tokens = 0
        self._logprobs: list[Any] = []
        self._calls: dict[int, str] = {}

    def repeated(self, tokens: int) -> int:
        """Return how many of the next tokens to be shown have been generated before."""
        return min(tokens, self._tokens - self.shown)

    def show(self, token_ids: list[int], repeated: int = 0) -> None:
        """Note tokens of a chunk that the client gets; the first ones may be noted already."""
        self._generate(len(token_ids) - repeated)
        self.shown += len(token_ids)

    def hide(self, token_ids: list[int], logprobs: list[Any]) -> list[int]:
        """Note tokens of a chunk that the client does not get; return those that are new."""
        repeated = self.repeated(len(token_ids))
        self._generate(len(token_ids) - repeated)
        self._logprobs += logprobs[repeated:]
        return token_ids[repeated:]

    def begin_call(self, index: int, id: str | None) -> None:
        """Note a tool call, and the id that its first engine gave it."""
        if id is not None:
            self._calls.setdefault(index, id)

    def mend(self, choice: dict[str, Any], repeated: int) -> None:
        """Put into a chunk of the next engine what only the engine before knew.

        These are the log-probabilities of its first tokens, and ids of calls: engines draw them.
        """
        for call in choice["delta"].get("tool_calls") or ():
            id, named = call.get("id"), (call.get("function") or {}).get("name")
            if id is not None and not named:
                call["id"] = self._calls.get(call["index"], id)
            self.begin_call(call["index"], id)
        if choice.get("logprobs") and repeated:
            choice["logprobs"]["content"][:repeated] = self._logprobs[:repeated]
        del self._logprobs[:repeated]

    def _generate(self, tokens: int) -> None:
        self._tokens += tokens
        if not tokens:
            return
        if self.chunks and self.chunks[-1][1] == tokens:
            self.chunks[-1][0] += 1
        else:
            self.chunks.append([1, tokens])


_encode = msgspec.json.encode


class ChunkJoiner:
    """Gives a client the chunks that it asked for by ``stream_interval``.

    As of vLLM's engines, the first tokens come at once, then a chunk with every so many tokens, and
    the end at once. Engines themselves send each token as it comes: what is not yet sent would be
    lost with them, and nobody could tell a long interval from a stream that hangs.

    Args:
        interval: tokens between two chunks.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._sent = 0
        self._joined: dict[str, Any] | None = None

    def take(self, chunks: list[bytes], generated: int) -> list[bytes]:
        """Take chunks, as JSON; return those that are due.

        Args:
            chunks: of the engine, in order.
            generated: tokens of the request with these.
        """
        due: list[bytes] = []
        for data in chunks:
            chunk = msgspec.json.decode(data)
            if not chunk.get("choices"):
                due += self.rest()
                due.append(data)
            elif self._joined is None:
                self._joined = chunk
            else:
                _join(self._joined, chunk)
            if self._joined is not None and self._joined["choices"][0].get("finish_reason"):
                due += self.rest()
        if self._sent == 0 or generated - self._sent >= self._interval:
            due += self.rest()
            self._sent = generated
        return due

    def rest(self) -> list[bytes]:
        """Return what has not been sent."""
        joined, self._joined = self._joined, None
        return [] if joined is None else [_encode(joined)]


def _join(joined: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if key == "choices":
            _join_values(joined["choices"][0], value[0])
        elif value is not None:
            joined[key] = value


def _join_values(joined: dict[str, Any], more: dict[str, Any]) -> None:
    """Join the text, tokens and other lists of two chunks; of other values the newer one stays."""
    for key, value in more.items():
        before = joined.get(key)
        if key == "tool_calls" and isinstance(before, list) and isinstance(value, list):
            _join_calls(before, value)
        elif key in _JOINED and isinstance(before, str) and isinstance(value, str):
            joined[key] = before + value
        elif key in _JOINED and isinstance(before, list) and isinstance(value, list):
            before += value
        elif isinstance(before, dict) and isinstance(value, dict):
            _join_values(before, value)
        elif value is not None:
            joined[key] = value


_JOINED = (
    *("text", "content", "reasoning", "reasoning_content", "arguments", "token_ids"),
    *("tokens", "token_logprobs", "top_logprobs", "text_offset"),
)


def _join_calls(joined: list[dict[str, Any]], more: list[dict[str, Any]]) -> None:
    for call in more:
        if joined and joined[-1].get("index") == call.get("index"):
            _join_values(joined[-1], call)
        else:
            joined.append(call)
