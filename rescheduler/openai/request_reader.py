"""Reading what a client asks for."""

import time
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Raw

from rescheduler.openai.body_fields import FIELDS, fields_of, some_of, unreadable
from rescheduler.openai.openai_request import (
    CHAT,
    LONGEST_MODEL,
    MOST_ANSWERS,
    MOST_TOKENS,
    ClientRequest,
    RequestRefusedError,
    TextRules,
)

_DEFAULT_MAX_TOKENS = 16  # of /v1/completions
_MOST_MESSAGES_BYTES = 1 << 20
_MOST_PARTS = 16_384  # of a request, messages included
_MOST_MEDIA = 1_024  # parts that are weighed
_MOST_STOPS = 64
_MOST_STOP_CHARACTERS = 16 << 10
_DAY = 86_400.0
"""Seconds within which an answer can be promised: a longer time is one in another unit."""
_BACKGROUND = "flex"  # of OpenAI's service tiers
_LAST = Raw(b"%d" % (2**31 - 1))
"""The ``priority`` that vLLM serves after all others."""


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = False


class _Promise(msgspec.Struct):
    """When an answer must be finished: what the proxy alone reads."""

    finish_in_s: Annotated[float, msgspec.Meta(gt=0)] | None = None
    finish_by: Annotated[float, msgspec.Meta(gt=0)] | None = None
    finish_level: Annotated[float, msgspec.Meta(ge=0, le=0.999)] | None = None


Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


class _Reserved(msgspec.Struct):
    """Where a client could say what only the proxy may."""

    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    vllm_xargs: Any = None


class _Read(msgspec.Struct):
    """The small fields that the proxy itself reads; all others are the engine's."""

    request_id: str | None = None
    model: str | None = None
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    stream_interval: Integer | None = None
    n: Integer | None = 1
    best_of: Integer | None = 1
    max_tokens: Integer | None = None
    max_completion_tokens: Integer | None = None
    min_tokens: Integer | None = 0
    ignore_eos: bool | None = False
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool | None = False
    skip_special_tokens: bool | None = True
    spaces_between_special_tokens: bool | None = True
    return_token_ids: bool | None = False
    echo: bool | None = False
    use_beam_search: bool | None = False
    prompt_logprobs: Integer | None = None
    include_reasoning: bool | None = True
    thinking_token_budget: Integer | None = None
    watermarking: bool | None = None
    service_tier: str | None = None


class _ReadForwarded(msgspec.Struct):
    """The fields that the proxy reads of the other endpoints."""

    request_id: str | None = None
    model: str | None = None
    stream: bool | None = False
    max_tokens: Integer | None = None
    max_output_tokens: Integer | None = None
    background: bool | None = False
    previous_response_id: str | None = None
    n: Integer | None = 1
    service_tier: str | None = None


Fields = TypeVar("Fields", _Read, _ReadForwarded)


_ABSENT = Raw()


class _Part(msgspec.Struct, gc=False):
    """A part of a message: of text, or of media in a field of its own."""

    type: str = "text"
    image_url: Raw = _ABSENT
    input_audio: Raw = _ABSENT
    audio_url: Raw = _ABSENT
    video_url: Raw = _ABSENT
    image_embeds: Raw = _ABSENT
    audio_embeds: Raw = _ABSENT
    source: Raw = _ABSENT

    @property
    def media(self) -> int:
        """Bytes that are no text."""
        return sum(map(len, msgspec.structs.astuple(self)[1:]))


class _Message(msgspec.Struct, gc=False):
    content: str | list[_Part] | None = None


_OF_ITEMS = (
    "messages",
    "input",
    "inputs",
    "texts",
    "documents",
    "items",
    "queries",
    "text_1",
    "text_2",
    "data_1",
    "data_2",
)
"""Lists of what the endpoints of `FORWARDED` embed, classify or score one by one."""

_flag = msgspec.json.Decoder(bool | None)
_messages = msgspec.json.Decoder(list[_Message])
_prompts = msgspec.json.Decoder(list[Raw])
_NOTHING = (b"null", b"[]", b'""')
_TRUE = (b"1.0", b"on", b"t", b"y", b"yes")  # further words of pydantic's for it
_MOST_DECODED = 256 << 10  # bytes of a list of prompts
_DIGITS = tuple(b"%d" % digit for digit in range(10))


def read_request(
    path: str, raw: bytes, priority: bool = False, ranks: bool = False
) -> ClientRequest:
    """Read a request body.

    Args:
        path: of the endpoint.
        raw: the body.
        priority: whether engines see the ``priority`` that a client gives its request.
        ranks: whether engines schedule by ``priority``, so that the proxy gives background
            requests the last one.

    Raises:
        RequestRefusedError: no JSON object, or a field that only the proxy may set.
    """
    body = fields_of(raw)
    promise, progress = _promise(body), _takes_progress(body)
    read, unread = _checked(body, _Read)
    tier, model = _ranked(body, read, unread, priority, ranks), _model(read, unread)
    chat = path == CHAT
    prompts = 1 if chat else _number_of_prompts(body.get("prompt"))
    has_media, media = _media(body.get("messages")) if chat else (False, 0)
    direct, pinned = _direct(read, unread, body, prompts), _pinned(read, has_media)
    interval = read.stream_interval or 1
    if interval > 1 and not direct and not pinned:
        del body["stream_interval"]  # the proxy joins the chunks of the engine
    maximum = read.max_tokens
    if chat and read.max_completion_tokens is not None:
        maximum = read.max_completion_tokens
    elif not chat and "max_tokens" not in body:  # null: as many as the context holds
        maximum = _DEFAULT_MAX_TOKENS
    maximum = _bounded(read, maximum)
    options = read.stream_options
    stop = tuple(filter(None, [read.stop] if isinstance(read.stop, str) else read.stop or ()))
    fewest = min(read.min_tokens or 0, MOST_TOKENS)
    return ClientRequest(
        path=path,
        body=body,
        size=len(raw),
        media=media + len(body.get("prompt_embeds", b"")),
        request_id=read.request_id,
        prompt_ids=_prompt_ids(body.get("prompt")),
        model=model,
        stream=bool(read.stream),
        include_usage=not read.stream or bool(options and options.include_usage),
        keeps_token_ids=bool(read.return_token_ids),
        max_tokens=maximum,
        fewest_tokens=maximum if read.ignore_eos and maximum and not stop else fewest,
        text=TextRules(
            stop=stop,
            include_stop=bool(read.include_stop_str_in_output),
            min_tokens=fewest,
            skip_special_tokens=read.skip_special_tokens is not False,
            spaces_between_special_tokens=read.spaces_between_special_tokens is not False,
        ),
        tier=tier,
        finish_in=promise.finish_in_s,
        finish_by=promise.finish_by,
        finish_level=promise.finish_level,
        progress=progress,
        direct=direct,
        pinned=pinned,
        answers=_number_of_answers(max(read.n or 1, read.best_of or 1), unread, prompts),
        stream_interval=max(1, interval),
        tools=chat and _is_given(body.get("tools")),
    )


def read_forwarded(
    path: str, raw: bytes, priority: bool = False, ranks: bool = False
) -> ClientRequest:
    """Read the body of a request of `FORWARDED`, that one decode instance answers as a whole.

    Args:
        path: of the endpoint.
        raw: the body.
        priority: as of `read_request`.
        ranks: as of `read_request`.

    Raises:
        RequestRefusedError: as for `read_request`, or it needs a response of another instance.
    """
    body = fields_of(raw)
    for field in _Promise.__struct_fields__:
        if field in body:
            raise RequestRefusedError(400, f"`{field}`: no promise is given for {path}", field)
    read, unread = _checked(body, _ReadForwarded)
    tier = _ranked(body, read, unread, priority, ranks)
    for field in ("background", "previous_response_id"):
        if field in unread or getattr(read, field):
            why = "responses are not kept where every instance can find them"
            raise RequestRefusedError(400, f"`{field}` is not supported: {why}", field)
    return ClientRequest(
        path=path,
        body=body,
        size=len(raw),
        media=_media_of(body),
        request_id=read.request_id,
        model=_model(read, unread),
        stream=bool(read.stream),
        max_tokens=_if_positive(read.max_output_tokens or read.max_tokens),
        tier=tier,
        direct="path",
        answers=_number_of_answers(read.n, unread, _number_of_items(body)),
    )


def _bounded(read: _Read, maximum: int | None) -> int | None:
    """Return how many tokens a request may generate, as far as the proxy reckons with it.

    A larger number than any model's context is the engine's to judge, which cuts it.

    Raises:
        RequestRefusedError: 400, too few answers or tokens, in vLLM's words.
    """
    if read.n is not None and read.n < 1:
        raise RequestRefusedError(400, f"n must be at least 1, got {read.n}.")
    if read.min_tokens is not None and read.min_tokens < 0:
        message = f"min_tokens must be greater than or equal to 0, got {read.min_tokens}."
        raise RequestRefusedError(400, message)
    if maximum == 0 and read.echo:
        return 1  # as vLLM reckons with one that only wants its prompt
    if maximum is not None and maximum < 1:
        said = f"max_tokens must be at least 1, got {maximum}."
        message = f"{said} (parameter=max_tokens, value={maximum})"
        raise RequestRefusedError(400, message, "max_tokens")
    return _if_positive(maximum)


def _if_positive(tokens: int | None) -> int | None:
    """Return a number of tokens within what a model can generate; None where it is none."""
    return None if tokens is None or tokens < 1 else min(tokens, MOST_TOKENS)


def _promise(body: dict[str, Raw]) -> _Promise:
    """Take when an answer must be finished out of a body.

    Raises:
        RequestRefusedError: 400, no number, out of range, or in another unit.
    """
    given = some_of(body, _Promise)
    for name in _Promise.__struct_fields__:
        body.pop(name, None)
    try:
        promise = msgspec.json.decode(given, type=_Promise)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestRefusedError(400, f"invalid promise: {error}", "finish_in_s") from error
    if promise.finish_in_s is not None and promise.finish_by is not None:
        message = "`finish_in_s` and `finish_by` exclude each other"
        raise RequestRefusedError(400, message, "finish_by")
    if promise.finish_level is not None and promise.finish_in_s is promise.finish_by:
        message = "`finish_level` needs `finish_in_s` or `finish_by`"
        raise RequestRefusedError(400, message, "finish_level")
    _refuse_other_units(promise)
    return promise


def _refuse_other_units(promise: _Promise) -> None:
    """Refuse times that are no seconds: clocks of JavaScript and Java count milliseconds.

    Raises:
        RequestRefusedError: 400, in the past, or more than a day ahead.
    """
    if promise.finish_in_s is not None and promise.finish_in_s > _DAY:
        message = f"`finish_in_s` is in seconds: {promise.finish_in_s:.15g} are more than a day"
        raise RequestRefusedError(400, message, "finish_in_s")
    if promise.finish_by is None:
        return
    now = time.time()
    if not now < promise.finish_by <= now + _DAY:
        where = "in the past" if promise.finish_by <= now else "more than a day from now"
        message = (
            f"`finish_by` is in seconds since 1970: {promise.finish_by:.15g} is {where}; it is "
            f"{now:.0f} now"
        )
        raise RequestRefusedError(400, message, "finish_by")


def _takes_progress(body: dict[str, Raw]) -> bool:
    """Take ``headway`` out of the stream options of a body, and return whether it was true."""
    given = body.get("stream_options")
    if given is None or b"headway" not in bytes(given):
        return False
    try:
        options = FIELDS.decode(given)
        if "headway" not in options:
            return False
        asked = _flag.decode(options["headway"])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False  # the engine says what is wrong
    del options["headway"]
    if options:
        body["stream_options"] = Raw(msgspec.json.encode(options))
    else:
        del body["stream_options"]
    return bool(asked)


def _ranked(
    body: dict[str, Raw],
    read: _Read | _ReadForwarded,
    unread: list[str],
    priority: bool,
    ranks: bool,
) -> str:
    """Set the ``priority`` that engines see, and return a request's tier.

    A tier that is no text is left for the engine to judge.
    """
    if "service_tier" in unread:
        unread.remove("service_tier")
    background = read.service_tier == _BACKGROUND
    if background or not priority:
        body.pop("priority", None)
    if background and ranks:
        body["priority"] = _LAST
    return read.service_tier or "default"


def _model(read: _Read | _ReadForwarded, unread: list[str]) -> str:
    """Return the model by which an instance is chosen; empty: the engine judges the name."""
    if "model" in unread:
        unread.remove("model")
    name = read.model or ""
    return name if len(name) <= LONGEST_MODEL and name.isprintable() else ""


def _checked(body: dict[str, Raw], kind: type[Fields]) -> tuple[Fields, list[str]]:
    """Return the fields that the proxy reads, and the names of those that only an engine can.

    Numbers may be strings, as in vLLM; whatever else an engine accepts or refuses, it judges.

    Raises:
        RequestRefusedError: no JSON, or a field that only the proxy may set.
    """
    try:
        _refuse_reserved(msgspec.json.decode(some_of(body, _Reserved), type=_Reserved))
        try:
            return msgspec.json.decode(some_of(body, kind), type=kind, strict=False), []
        except msgspec.ValidationError:
            return _read_apart(body, kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise unreadable(error) from error


def _refuse_reserved(reserved: _Reserved) -> None:
    further = reserved.vllm_xargs if isinstance(reserved.vllm_xargs, dict) else {}
    for field in ("kv_transfer_params", "ec_transfer_params"):
        if getattr(reserved, field) is not None or field in further:
            raise RequestRefusedError(400, f"`{field}` is set by the proxy; leave it out", field)


def _read_apart(body: dict[str, Raw], kind: type[Fields]) -> tuple[Fields, list[str]]:
    """Read one field after the other, where one of them is of another type."""
    read, unread = {}, []
    for field in msgspec.structs.fields(kind):
        if field.name in body:
            try:
                read[field.name] = msgspec.json.decode(
                    body[field.name], type=field.type, strict=False
                )
            except msgspec.ValidationError:
                unread.append(field.name)
    if "stream" in unread:  # how the answer comes has to be known
        read["stream"] = bytes(body["stream"]).strip(b'"').lower() in _TRUE
    return kind(**read), unread


def _direct(read: _Read, unread: list[str], body: dict[str, Raw], prompts: int) -> str:
    """Return what a request has that needs one engine for prefill and decoding, or ""."""
    if unread:
        return unread[0]
    reasons = {
        "n": (read.n or 1) != 1,
        "best_of": (read.best_of or 1) != 1,
        "stream_options": not read.stream and _is_given(body.get("stream_options")),
        "echo": read.echo,
        "use_beam_search": read.use_beam_search,
        "prompt_logprobs": read.prompt_logprobs is not None,
        "prompt_embeds": _is_given(body.get("prompt_embeds")),
        "suffix": _is_given(body.get("suffix")),
        "prompt": prompts != 1,
    }
    return next((field for field, given in reasons.items() if given), "")


def _pinned(read: _Read, has_media: bool) -> str:
    """Return what a request has whose state would be lost by a move, or ""."""
    reasons = {
        "include_reasoning": read.include_reasoning is False,
        "thinking_token_budget": read.thinking_token_budget is not None,
        "watermarking": read.watermarking,
        "messages": has_media,
        "stop": _are_many(read.stop),  # after a move the proxy looks for each of them
    }
    return next((field for field, given in reasons.items() if given), "")


def _are_many(stops: str | list[str] | None) -> bool:
    """Return whether stop strings are too many, or too long, to look for after each token."""
    listed = [stops] if isinstance(stops, str) else stops or []
    return len(listed) > _MOST_STOPS or sum(map(len, listed)) > _MOST_STOP_CHARACTERS


def _is_given(value: Raw | None) -> bool:
    return value is not None and (len(value) > 4 or bytes(value) not in _NOTHING)


def _prompt_ids(prompt: Raw | None) -> int | None:
    if prompt is None or _first_of_list(prompt) not in _DIGITS:
        return None
    return bytes(prompt).count(b",") + 1


def _number_of_prompts(prompt: Raw | None) -> int:
    """Return how many prompts there are; the most of what is no list that can be read."""
    if prompt is None or _first_of_list(prompt) in (b"", b"]", *_DIGITS):
        return 1
    if len(prompt) > _MOST_DECODED:  # it could be of millions: not more than it has of either
        raw = bytes(prompt)
        return max(raw.count(b'"') // 2, raw.count(b"[") - 1, 1)
    try:
        return len(_prompts.decode(prompt))
    except msgspec.DecodeError:
        return MOST_ANSWERS


def _number_of_items(body: dict[str, Raw]) -> int:
    """Return how many conversations, texts or pairs a request of `FORWARDED` is about."""
    given = [(name, body[name]) for name in _OF_ITEMS if name in body]
    lists = [
        value
        for name, value in given
        if name not in ("messages", "input") or _first_of_list(value) != b"{"  # a conversation
    ]
    return max(map(_number_of_prompts, lists), default=1)


def _number_of_answers(each: int | None, unread: list[str], prompts: int) -> int:
    """Return how many answers are asked for; the most where an engine may read what we do not."""
    if "n" in unread or "best_of" in unread:
        return MOST_ANSWERS
    return min(max(each or 1, 1) * max(prompts, 1), MOST_ANSWERS)


def _first_of_list(value: Raw) -> bytes:
    """Return the first character inside a list; nothing if it is no list."""
    start = bytes(memoryview(value)[:64])
    return start[1:].lstrip()[:1] if start[:1] == b"[" else b""


def _media_of(body: dict[str, Raw]) -> int:
    """Return the bytes of a request that are no text, if it has not too many parts."""
    lists = [body[name] for name in ("messages", "input") if name in body]
    if sum(bytes(one).count(b"{") for one in lists) > _MOST_PARTS:
        return 0
    return sum(_media(one)[1] for one in lists)


def _media(messages: Raw | None) -> tuple[bool, int]:
    """Return whether messages are more than text, or too many to look at, and the bytes of that.

    Of too many to look at, and of what only an engine can read, all bytes count as text.
    """
    if messages is None:
        return False, 0
    if bytes(messages).count(b"{") > _MOST_PARTS:
        return True, 0
    try:
        read = _messages.decode(messages)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return True, 0
    parts = [
        part
        for message in read
        if isinstance(message.content, list)
        for part in message.content
        if part.type != "text"
    ]
    size = sum(part.media for part in parts[:_MOST_MEDIA])
    return bool(parts) or len(messages) > _MOST_MESSAGES_BYTES, size
