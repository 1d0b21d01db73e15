"""Chunks of an engine's stream, spliced into the one stream that the client reads."""

import re
from collections.abc import AsyncIterable, AsyncIterator
from typing import Annotated, Any

import msgspec
from tokenizers import Tokenizer

from rescheduler.openai.continued_text import ContinuedText, ParsedAgain
from rescheduler.openai.openai_request import ClientRequest

DONE = b"[DONE]"

# In JSON a quote inside a string is escaped, so that this finds keys only.
_TOKEN_IDS = re.compile(rb'"((?:prompt_)?token_ids)":\s*\[[0-9,\s]*\]')
_EMPTY_DELTA = b'"delta":{}'
_encode = msgspec.json.encode
_DATA = b"data:"
_LARGEST_EVENT = 16 << 20
"""Bytes of an engine's event: the first one may hold a million ids of a prompt's tokens."""
_LARGEST_CHUNK = 1 << 20
"""Bytes of a chunk without the prompt's tokens: the event loop waits while it is read."""
_BYTES_PER_ID = 12

TokenId = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


class _Call(msgspec.Struct):
    index: int = 0
    id: str | None = None


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Logprobs(msgspec.Struct):
    tokens: list[str] = []


class _Choice(msgspec.Struct):
    text: str = ""
    delta: _Delta | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[TokenId] | None = None
    prompt_token_ids: list[TokenId] | None = None


class Chunk(msgspec.Struct):
    """What the proxy reads of a chunk of either endpoint.

    Attributes:
        choices: one, or none beside ``usage``.
        created: seconds since 1970.
        prompt_token_ids: of a chat's first chunk.
        system_fingerprint: of the last chunk.
        usage: token counts, of the last chunk or of all.
        error: instead of everything else.
    """

    choices: list[_Choice] = []
    created: int = 0
    prompt_token_ids: list[TokenId] | None = None
    system_fingerprint: str | None = None
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None

    @property
    def finish_reason(self) -> str | None:
        """Why the request ended, in its last chunk but that of ``usage``."""
        return self.choices[0].finish_reason if self.choices else None

    @property
    def has_text(self) -> bool:
        """Whether it brings any."""
        return any(
            choice.text or (choice.delta and (choice.delta.content or choice.delta.reasoning))
            for choice in self.choices
        )

    @property
    def prompt(self) -> list[int]:
        """Token ids of the prompt, which the first chunk of either endpoint brings."""
        if self.prompt_token_ids:
            return self.prompt_token_ids
        for choice in self.choices:  # looked at for each token of an engine that tells none
            if choice.prompt_token_ids:
                return choice.prompt_token_ids
        return []

    @property
    def token_ids(self) -> list[int]:
        """Tokens of this chunk."""
        return (self.choices[0].token_ids or []) if self.choices else []


_decoder = msgspec.json.Decoder(Chunk)


def read_chunk(data: bytes) -> Chunk:
    """Read a chunk; raises `msgspec.DecodeError` if it is none."""
    try:
        data.decode()  # the decoder skips what it does not read
        return _decoder.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error


class Signs(msgspec.Struct):
    """The error that an event of any endpoint's stream reports, or whether it brings output.

    Attributes:
        ends: it ends an answer of the stream.
        last: it ends the stream.
        counts: what of it says how many tokens the answer has, as `read_usage` reads it.
    """

    error: dict[str, Any] | None
    output: bool
    ends: bool = False
    last: bool = False
    counts: bytes | None = None


_ABSENT = msgspec.Raw()


class _AnyChoice(msgspec.Struct):
    delta: dict[str, msgspec.Raw] | None = None
    finish_reason: Any = None


class _AnyEvent(msgspec.Struct):
    error: Any = None
    type: str = ""
    choices: list[_AnyChoice] | None = None
    usage: msgspec.Raw = _ABSENT
    message: msgspec.Raw = _ABSENT
    response: msgspec.Raw = _ABSENT


_any_events = msgspec.json.Decoder(_AnyEvent)
_NOTHING = (b"null", b'""', b"[]")
_NO_OUTPUT = ("ping", "message_start", "response.created", "response.in_progress")
"""Types of events of `/v1/messages` and `/v1/responses` that come without a token."""
_LAST = ("message_stop", "response.completed", "response.incomplete", "response.failed")


def read_signs(data: bytes) -> Signs:
    """Return what an event is, as far as can be told without knowing its endpoint.

    Raises:
        msgspec.DecodeError: it is no JSON object.
    """
    if data == DONE:
        return Signs(None, False, last=True)
    try:
        read = _any_events.decode(data)
    except (UnicodeDecodeError, RecursionError) as error:
        raise msgspec.DecodeError(str(error)) from error
    if read.error is not None:
        return Signs(read.error if isinstance(read.error, dict) else {"message": read.error}, False)
    counts = data if read.usage else None
    if read.choices is None:
        last = read.type in _LAST
        if read.type == "message_start":
            counts = bytes(read.message)
        elif last and read.response:
            counts = bytes(read.response)
        return Signs(None, read.type not in _NO_OUTPUT, last=last, counts=counts)
    ends = any(choice.finish_reason is not None for choice in read.choices)
    return Signs(None, any(map(_brings_output, read.choices)), ends, counts=counts)


def _brings_output(choice: _AnyChoice) -> bool:
    """Return whether a choice is more than the role: its text may be held back for a while."""
    delta = choice.delta or {}
    return "role" not in delta or any(
        name != "role" and bytes(value) not in _NOTHING for name, value in delta.items()
    )


def event(data: bytes) -> bytes:
    """Return a server-sent event."""
    return b"data: " + data + b"\n\n"


class EventReader:
    """Cuts a byte stream into server-sent events, wherever its packets end.

    Args:
        longest_prompt: tokens of which the first event may hold the ids, and no later one; None:
            any event may be large.

    Attributes:
        comments: that were complete with the last bytes, with their line ends.
        rest: bytes of an event that is not complete.
    """

    def __init__(self, longest_prompt: int | None = None) -> None:
        self.comments: list[bytes] = []
        self.rest = bytearray()
        self._after_return = False
        self._largest = self._largest_later = _LARGEST_EVENT
        if longest_prompt is not None:
            first = _LARGEST_CHUNK + _BYTES_PER_ID * longest_prompt
            self._largest = min(first, _LARGEST_EVENT)
            self._largest_later = _LARGEST_CHUNK

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that are complete by now; comments are none.

        Raises:
            msgspec.DecodeError: an event is too large, or does not end.
        """
        rest = self.rest
        if self.comments:
            self.comments = []
        if self._after_return or b"\r" in data:  # what stands before an engine may end lines so
            data = self._with_line_feeds(data)
        if rest:
            at = len(rest) - 1
            rest += data
            if rest.find(b"\n\n", at) < 0:
                self._check_size(len(rest))
                return []
            data = bytes(rest)
        *whole, left = data.split(b"\n\n")
        self.rest = bytearray(left)
        found = []
        for part in whole:
            if part.startswith(_DATA):
                found.append(part[len(_DATA) :].removeprefix(b" "))
            elif (at := part.find(b"\n" + _DATA)) >= 0:  # after the name of an event
                found.append(part[at + 1 + len(_DATA) :].removeprefix(b" "))
            elif part.startswith(b":"):
                self.comments.append(part + b"\n\n")
        for event in found:
            self._check_size(len(event))
            self._largest = self._largest_later
        self._check_size(len(left))
        return found

    def _with_line_feeds(self, data: bytes) -> bytes:
        """Return lines that end otherwise with line feeds; JSON escapes what else looks so."""
        if self._after_return:
            data = data.removeprefix(b"\n")
        self._after_return = data.endswith(b"\r")
        return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _check_size(self, size: int) -> None:
        if size > self._largest:
            raise msgspec.DecodeError(f"an event of more than {self._largest >> 20} MiB")


async def read_events(lines: AsyncIterable[bytes]) -> AsyncIterator[dict[str, Any]]:
    """Yield the JSON of each event of an answer's lines, up to ``[DONE]`` or the stream's end.

    Raises:
        msgspec.DecodeError: an event is not JSON.
    """
    async for line in lines:
        if line.startswith(_DATA):
            data = line[len(_DATA) :].strip()
            if data == DONE:
                return
            yield msgspec.json.decode(data)


class StreamSplicer:
    """Makes one stream of what several engines say about one request.

    Until the request first moves, chunks pass as they are, without the token ids that only the
    proxy asked for. From then on the first engine's ``created`` and fingerprint are kept, the
    role is not repeated, and counts and offsets go on. The text is made here, or where an engine
    parses it for tool calls or reasoning, by the next engine, which parses all of it again. A
    request that never moves needs no tokenizer.

    Attributes:
        prompt_token_ids: of the prompt, once the first chunk came.
        output_token_ids: generated so far.
        moves: the request can go on elsewhere: false once an engine sends text without its tokens.
        parsed: its text is parsed, so that it can go on only where an engine parses it again.
    """

    def __init__(self, request: ClientRequest, tokenizer: Tokenizer | None) -> None:
        self.prompt_token_ids: list[int] = []
        self.output_token_ids: list[int] = []
        self.moves = True
        self.parsed = request.tools
        self._request, self._tokenizer = request, tokenizer
        self._created: int | None = None
        self._fingerprint: str | None = None
        self._characters = 0
        self._text_offset = 0
        self._text: ContinuedText | None = None
        self._last = b""
        self._again = ParsedAgain()

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found that the engine does not know of."""
        return self._text is not None and self._text.stopped is not None

    @property
    def answer_so_far(self) -> dict[str, Any] | None:
        """What the next engine has to know to parse the text again; None: it need not."""
        if not self.parsed:
            return None
        request = self._request
        return {
            "shown": self._again.shown,
            "chunks": self._again.chunks,
            "stop": list(request.text.stop),
            "whole": request.tools and not request.stream,
        }

    def new_tokens(self, chunk: Chunk) -> int:
        """Return how many tokens of a chunk are not among those generated so far."""
        return len(chunk.token_ids) - self._again.repeated(len(chunk.token_ids))

    def pass_on(self, data: bytes, chunk: Chunk) -> bytes | None:
        """Take a chunk; return it as the client is to see it, or None to leave it out.

        Raises:
            msgspec.DecodeError: an engine does not go on with the answer that it was given.
        """
        if self._text is not None:
            return self._continued(data, chunk, frozen=False)
        if self._again.cut:
            return self._parsed_again(data, chunk)
        self._note(chunk)
        self._last = data
        self.output_token_ids += chunk.token_ids
        if self._request.chat:  # the text of a completion is never parsed
            self._again.show(chunk.token_ids)
            if _EMPTY_DELTA in data:
                # An engine that holds text back parses it, perhaps for reasoning that begins.
                self.parsed = self.parsed or chunk.finish_reason is None
                if self._says_nothing(data, chunk):
                    return None
        if self._request.keeps_token_ids:
            return data
        return _TOKEN_IDS.sub(rb'"\1":null', data)

    def pass_on_frozen(self, data: bytes, chunk: Chunk) -> bytes | None:
        """Take the last chunk of a frozen request, whose end the client must not see."""
        if self._text is None and not self._again.cut:
            self._note_head(chunk)
        self.cut()
        if self.parsed:  # with its end the engine may have flushed what its parser held back
            self.output_token_ids += self._again.hide(chunk.token_ids, _logprobs_of(data, chunk))
            return None
        return self._continued(data, chunk, frozen=True)

    def cut(self) -> None:
        """Continue with chunks of another engine from here."""
        if self.parsed:
            self._again.cut = True
        elif self._text is None:
            rules = self._request.text
            assert self._tokenizer is not None
            self._text = ContinuedText(self._tokenizer, self.prompt_token_ids, rules)
            self._text.follow(self.output_token_ids)
            self._text.skip(self._characters)

    def usage(self) -> bytes | None:
        """Return the chunk of token counts, if the client expects one and no engine gives it."""
        if not self._request.include_usage:
            return None
        counts: dict[str, Any] = {}
        self._count(counts)
        last = msgspec.json.decode(self._last)
        last.pop("prompt_token_ids", None)
        return _encode({**last, "choices": [], "usage": counts})

    def _note(self, chunk: Chunk) -> None:
        self._note_head(chunk)
        for choice in chunk.choices:
            text, delta = choice.text, choice.delta
            if delta is not None:
                text = delta.content or ""
                self.parsed = self.parsed or delta.reasoning is not None
                for call in delta.tool_calls or ():
                    self._again.begin_call(call.index, call.id)
            self._characters += len(text)
            if text and not choice.token_ids and choice.finish_reason is None:
                self.moves = False
            if choice.logprobs is not None:
                self._text_offset += sum(map(len, choice.logprobs.tokens))

    def _note_head(self, chunk: Chunk) -> None:
        """Keep what a later engine says differently."""
        if self._created is None:
            self._created = chunk.created
        if chunk.system_fingerprint is not None and self._fingerprint is None:
            self._fingerprint = chunk.system_fingerprint
        if not self.prompt_token_ids:
            self.prompt_token_ids = chunk.prompt

    def _says_nothing(self, data: bytes, chunk: Chunk) -> bool:
        """Whether a chunk comes for its token ids alone, while the engine's parser holds text."""
        return (
            not self._request.keeps_token_ids
            and _EMPTY_DELTA in data
            and all(one.finish_reason is None and one.logprobs is None for one in chunk.choices)
        )

    def _parsed_again(self, data: bytes, chunk: Chunk) -> bytes | None:
        """Take a chunk of an engine that tells the answer as if it had begun there."""
        tokens = chunk.token_ids
        if any(one.delta is not None and one.delta.role is not None for one in chunk.choices):
            raise msgspec.DecodeError("it begins an answer, instead of going on with it")
        repeated = self._again.repeated(len(tokens))
        shown = self._again.shown
        if tokens[:repeated] != self.output_token_ids[shown : shown + repeated]:
            raise msgspec.DecodeError("it repeats other tokens than were generated")
        value: dict[str, Any] = msgspec.json.decode(data)
        if chunk.choices:
            choice = value["choices"][0]
            self._again.mend(choice, repeated)
            if not self._request.keeps_token_ids:
                choice["token_ids"] = None
        self._again.show(tokens, repeated)
        self.output_token_ids += tokens[repeated:]
        if self._says_nothing(data, chunk):
            return None
        self._mend_head(value)
        if value.get("usage"):
            value["usage"].pop("prompt_tokens_details", None)
        self._last = _encode(value)
        return self._last

    def _mend_head(self, value: dict[str, Any]) -> None:
        if self._created is not None and "created" in value:
            value["created"] = self._created
        if self._fingerprint is not None and "system_fingerprint" in value:
            value["system_fingerprint"] = self._fingerprint

    def _continued(self, data: bytes, chunk: Chunk, frozen: bool) -> bytes | None:
        assert self._text is not None
        value: dict[str, Any] = msgspec.json.decode(data)
        if chunk.choices:
            choice = value["choices"][0]
            if chunk.choices[0].token_ids is None and chunk.finish_reason is None:
                return None  # the role, which the client has
            self._continue_choice(choice, chunk, frozen)
            value.pop("prompt_token_ids", None)
            if frozen:
                value.pop("system_fingerprint", None)
        self._mend_head(value)
        if value.get("usage"):
            self._count(value["usage"])
        self._last = _encode(value)
        return self._last

    def _continue_choice(self, choice: dict[str, Any], chunk: Chunk, frozen: bool) -> None:
        assert self._text is not None
        tokens = chunk.token_ids
        finished = chunk.finish_reason is not None and not frozen
        counted = self._text.add(tokens, ended_by_token=chunk.finish_reason == "stop")
        self.output_token_ids += tokens[:counted]
        if frozen:
            choice["finish_reason"] = None
            choice.pop("stop_reason", None)
        if self._text.stopped is not None:
            finished = True
            choice["finish_reason"], choice["stop_reason"] = "stop", self._text.stopped
        text = self._text.take(finished)
        if self._request.chat:
            choice["delta"] = {"content": text}
        else:
            choice["text"] = text
        choice["token_ids"] = tokens[:counted] if self._request.keeps_token_ids else None
        if not self._request.chat:
            choice["prompt_token_ids"] = None
        self._continue_logprobs(choice.get("logprobs"), counted)

    def _continue_logprobs(self, logprobs: dict[str, Any] | None, counted: int) -> None:
        if not logprobs:
            return
        for name, entries in logprobs.items():
            if isinstance(entries, list):
                logprobs[name] = entries[:counted]
        if "text_offset" in logprobs:
            offsets = []
            for token in logprobs.get("tokens", ()):
                offsets.append(self._text_offset)
                self._text_offset += len(token)
            logprobs["text_offset"] = offsets

    def _count(self, usage: dict[str, Any]) -> None:
        """Count the tokens of all engines; what one of them had cached says nothing now."""
        prompt, output = len(self.prompt_token_ids), len(self.output_token_ids)
        usage.pop("prompt_tokens_details", None)
        usage["prompt_tokens"], usage["completion_tokens"] = prompt, output
        usage["total_tokens"] = prompt + output


def _logprobs_of(data: bytes, chunk: Chunk) -> list[Any]:
    """Return the log-probabilities of a chat's tokens; none if it has none."""
    if not any(choice.logprobs for choice in chunk.choices):
        return []
    return msgspec.json.decode(data)["choices"][0]["logprobs"].get("content") or []
