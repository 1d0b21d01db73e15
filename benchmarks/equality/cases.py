"""The requests that are asked of both, a line each."""

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "Once upon a time, in a small village by the sea, there lived a"
MESSAGES = [{"role": "user", "content": "Tell me a story of a river."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}},
    "required": ["name"],
}
_USAGE = {"include_usage": True}


@dataclass(frozen=True)
class Case:
    """A request: a body of fields, or one that is sent byte for byte, several parts in chunks."""

    name: str  # what it is, beside method and path, for a reader of the documentation
    path: str
    fields: dict[str, Any] | None = None
    raw: tuple[bytes, ...] = ()
    method: str = "POST"
    headers: Mapping[str, str] = field(default_factory=dict)
    by_client: bool = False  # `openai`'s

    @property
    def request(self) -> str:
        return f"{self.method} {self.path}" + (f": {self.name}" if self.name else "")


def _each(field: str, *values: Any) -> Iterator[dict[str, Any]]:
    return ({field: value} for value in values)


BOTH: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 1.0, "top_p": 0.7, "seed": 4},
    {"temperature": 1.0, "top_k": 3, "seed": 5},
    {"temperature": 1.0, "min_p": 0.2, "seed": 6},
    {"temperature": -1},
    {"temperature": 2.5, "seed": 7},
    {"temperature": "0"},
    {"temperature": None, "seed": 8},
    *_each("top_p", 0, 1.5),
    *_each("top_k", -2, "many"),
    {"min_p": 2},
    *_each("seed", 2**63, 1.5),
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"presence_penalty": 3},
    {"n": 2, "temperature": 0.9, "seed": 9},
    {"n": 1.0},
    {"n": "2", "seed": 9},
    *_each("n", 0, -1, None, "two"),
    {"best_of": 2},
    {"use_beam_search": True, "n": 2},
    *_each("prompt_logprobs", 1, -3),
    *_each("logit_bias", {"100": 5.0}, {"none": 5.0}, {"999999": 5.0}),
    *_each("stop", " the", [" the", "a"], [], "", ["", "a"], None, 5, ["a", 5], ["a"] * 2000),
    {"stop": ["a"], "include_stop_str_in_output": True},
    *_each("stop_token_ids", [28], ["x"]),
    *_each("max_tokens", 3.0, "3", " 3", True, 3.5, 0, -1),
    {"max_tokens": None, "stop": ["e", "a", "o", "i"]},
    {"max_tokens": 100_000, "stop": ["e", "a", "o", "i"]},
    *_each("max_tokens", 2**63, 10**30, "many", []),
    *_each("max_completion_tokens", 3, "3", 0),
    *_each("min_tokens", 8, "8", 9, -1, None),
    *_each("ignore_eos", True, "on"),
    *_each("skip_special_tokens", False, "no", None),
    {"spaces_between_special_tokens": 0},
    *_each("return_token_ids", True, "yes"),
    {"include_stop_str_in_output": "maybe"},
    *_each("truncate_prompt_tokens", 4, 5000),
    *_each("allowed_token_ids", [28, 30], []),
    *_each("bad_words", [" the"], [""]),
    *_each("structured_outputs", {"regex": "[a-c]{5}"}, {"choice": ["red", "green"]}),
    {"structured_outputs": {"json": SCHEMA}, "max_tokens": 40},
    *_each("structured_outputs", {"regex": "("}, {}),
    {"response_format": {"type": "json_object"}, "max_tokens": 20},
    {
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}},
        "max_tokens": 40,
    },
    {"response_format": {"type": "verse"}},
    {"user": "someone", "metadata": {"a": "b"}, "store": False},
    {"unknown_field": [1, {"a": None}]},
    {"service_tier": "auto"},
    *_each("priority", 0, 5),
    *_each("cache_salt", "salt", ""),
    *_each("request_id", "mine", 5),
    {"echo": False},
    {"stream_options": _USAGE},
    *_each("vllm_xargs", {"a": 1}, "a"),
    {"kv_transfer_params": {"a": 1}},
    {"vllm_xargs": {"kv_transfer_params": {}}},
    *_each("model", "another", "", None, 5),
)
"""Asked of both endpoints, streamed and as a whole."""

COMPLETION: tuple[dict[str, Any], ...] = (
    *_each(
        "prompt",
        ["One two", "Three four"],
        ["One two"],
        [504, 1670, 260],
        [[504, 1670], [260, 28]],
        [[504, 1670]],
        "",
        [],
        [""],
        [[]],
        None,
        5,
        {"a": "b"},
        [1.5],
        [-1],
        [10**9],
        ["a", 1],
        "long " * 3000,
        "é漢🌊 ́",
    ),
    {"prompt_embeds": "AAAA"},
    *_each("logprobs", 0, 2, "2", 20, 99, -1, -2, True, "all", None),
    {"echo": True},
    {"echo": True, "logprobs": 1},
    {"echo": True, "max_tokens": 0},
    {"echo": "yes"},
    *_each("suffix", " in the end", ""),
    {"add_special_tokens": False},
)
CHATS: tuple[dict[str, Any], ...] = (
    *_each(
        "messages",
        [],
        "hello",
        None,
        [{"content": "hello"}],
        [{"role": "poet", "content": "hello"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": [{"type": "text", "text": "hello"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "system", "content": "Be short."}, *MESSAGES],
        [*MESSAGES, {"role": "assistant", "content": "A river"}],
    ),
    {
        "messages": [*MESSAGES, {"role": "assistant", "content": "A river"}],
        "add_generation_prompt": False,
        "continue_final_message": True,
    },
    {"messages": [{"role": "user", "content": "long " * 3000}]},
    {"logprobs": True},
    {"logprobs": True, "top_logprobs": 2},
    {"logprobs": "true", "top_logprobs": "2"},
    *_each("logprobs", 1, 5),
    {"logprobs": True, "top_logprobs": 99},
    {"logprobs": True, "top_logprobs": -2},
    {"logprobs": True, "top_logprobs": None},
    {"top_logprobs": 2},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL], "tool_choice": "auto"},
    {"tools": [TOOL], "tool_choice": "required", "max_tokens": 40},
    {
        "tools": [TOOL],
        "tool_choice": {"type": "function", "function": {"name": "weather"}},
        "max_tokens": 40,
    },
    {"tools": [TOOL], "tool_choice": "sometimes"},
    {"tools": []},
    {"tool_choice": "required"},
    {"tools": [{"type": "function"}]},
    {"parallel_tool_calls": False},
    {"echo": True},
    *_each("reasoning_effort", "low", "heroic"),
    {"include_reasoning": False},
    {"thinking_token_budget": 4},
    {"chat_template_kwargs": {"a": 1}},
    {"chat_template": "{{ messages }}"},
    {"return_prompt_text": True},
    {"documents": [{"title": "a", "text": "b"}]},
)
STREAMED: tuple[dict[str, Any], ...] = (
    *_each(
        "stream_options",
        {"include_usage": "true"},
        {"include_usage": False},
        {"include_usage": True, "continuous_usage_stats": True},
        {},
        None,
        "usage",
        {"include_usage": "perhaps"},
    ),
)

_SMALL = {"model": "smollm2", "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
_JSON = {"Content-Type": "application/json"}
_TEXT = json.dumps(_SMALL)
_BYTES = _TEXT.encode()


def _post(name: str, *raw: bytes, path: str = COMPLETIONS, **headers: str) -> Case:
    sent = {key.replace("_", "-"): value for key, value in headers.items()}
    return Case(name, path, raw=raw, headers={**_JSON, **sent})


BODIES = (
    _post("an empty body", b""),
    _post("an object without fields", b"{}"),
    _post("`{}` as a chat", b"{}", path=CHAT),
    _post("a list as body", b"[]"),
    _post("a string as body", b'"text"'),
    _post("`null` as body", b"null"),
    _post("invalid JSON", b'{"model": "smollm2", '),
    _post("invalid JSON as a chat", b'{"model": "smollm2", }', path=CHAT),
    _post("JSON and something after it", _BYTES + b" x"),
    _post("JSON with blanks around it", b" \n" + _BYTES + b"\n\n"),
    _post("`NaN` as a number", _TEXT.replace("0}", "NaN}").encode()),
    _post("`Infinity` in an unknown field", _TEXT.replace("0}", '0, "a": Infinity}').encode()),
    _post("a field twice", _TEXT.replace("0}", '0, "max_tokens": 2}').encode()),
    _post("a lone surrogate", _TEXT.replace("Once", "\\ud800").encode()),
    _post("a NUL character", _TEXT.replace("Once", "\\u0000").encode()),
    _post("a raw line feed in a string", _TEXT.replace("Once", "On\nce").encode()),
    _post(
        "lists nested 2,000 deep",
        _TEXT[:-1].encode() + b', "a": ' + b"[" * 2000 + b"]" * 2000 + b"}",
    ),
    _post("UTF-8 with a byte-order mark", b"\xef\xbb\xbf" + _BYTES),
    _post("UTF-16", _TEXT.encode("utf-16")),
    _post("UTF-16 without a byte-order mark", _TEXT.encode("utf-16-le")),
    _post("UTF-32", _TEXT.encode("utf-32")),
    _post("invalid UTF-8", _TEXT.replace("Once", "\x80").encode("latin-1")),
    _post(
        "Latin-1, which its header names",
        _TEXT.replace("Once", "é").encode("latin-1"),
        Content_Type="application/json; charset=latin-1",
    ),
    _post("gzip", gzip.compress(_BYTES), Content_Encoding="gzip"),
    _post("an unknown Content-Encoding", _BYTES, Content_Encoding="zebra"),
    _post("in chunks", _TEXT[:40].encode(), _TEXT[40:].encode()),
    _post("Content-Type with a charset", _BYTES, Content_Type="application/json; charset=utf-8"),
    _post("Content-Type in capitals", _BYTES, Content_Type="APPLICATION/JSON"),
    _post("Content-Type text/plain", _BYTES, Content_Type="text/plain"),
    _post("Content-Type of a form", _BYTES, Content_Type="application/x-www-form-urlencoded"),
    _post("Content-Type application/vnd.api+json", _BYTES, Content_Type="application/vnd.api+json"),
    Case("no Content-Type", COMPLETIONS, raw=(_BYTES,)),
    Case("no Content-Type for /tokenize", "/tokenize", raw=(_BYTES,)),
    *(
        _post(f'`"stream": {value}`', _TEXT.replace("0}", f'0, "stream": {value}}}').encode())
        for value in ("1", "0", "1.0", '"true"', '"yes"', '"off"', '"2"', "2", "null", "[]")
    ),
    _post("an Authorization header", _BYTES, Authorization="Bearer nobody"),
    _post("an X-Request-Id header", _BYTES, X_Request_Id="mine"),
    _post("a query string", _BYTES, path=COMPLETIONS + "?a=b"),
)


def _routes() -> Iterator[Case]:
    paths = (
        "/ /health /ping /version /v1/models /v1/models/smollm2 /v1/models/none /load /metrics "
        "/docs /redoc /openapi.json /server_info /tokenizer_info /kv_event_sources /is_sleeping "
        "/v1/responses/resp_1 /v1 /unknown /favicon.ico /V1/models //v1/models /v1//models "
        "/v1/models/ /health/ /ping/ /version/ /unknown/ /v1/models?a=b /v1/%6dodels "
        f"/static/x /ready /admin/instances {COMPLETIONS} {CHAT} {COMPLETIONS}/ /tokenize "
        "/v1/embeddings"
    )
    for path in paths.split():
        yield Case("", path, method="GET")
    for path in ("/health", "/v1/models", "/metrics", COMPLETIONS, "/unknown"):
        yield Case("", path, method="HEAD")
        yield Case("", path, method="OPTIONS")
    for path in (COMPLETIONS, "/v1/models"):
        for method in ("PUT", "DELETE", "PATCH", "BREW"):
            yield Case("", path, method=method)
    preflight = {"Access-Control-Request-Method": "POST", "Origin": "https://a.example"}
    yield Case("a CORS preflight", COMPLETIONS, method="OPTIONS", headers=preflight)
    headers = {**preflight, "Access-Control-Request-Headers": "authorization, content-type"}
    yield Case("a CORS preflight with headers", CHAT, method="OPTIONS", headers=headers)
    origin = {"Origin": "https://a.example"}
    yield Case("an Origin header", "/v1/models", method="GET", headers=origin)
    yield _post("an Origin header", _BYTES, Origin="https://a.example")


def _forwarded() -> Iterator[Case]:
    small = {"model": "smollm2", "max_tokens": 4, "temperature": 0}
    chat = {**small, "messages": MESSAGES}
    response = {"model": "smollm2", "input": "A river", "max_output_tokens": 16, "temperature": 0}
    asked: tuple[tuple[str, dict[str, Any]], ...] = (
        *((path, {}) for path in ("/ping", "/health", "/v1/models", "/unknown")),
        (COMPLETIONS + "/", _SMALL),
        (CHAT + "/", chat),
        ("/tokenize/", {"model": "smollm2", "prompt": "a b"}),
        ("/tokenize", {"model": "smollm2", "prompt": "a b"}),
        ("/tokenize", {"model": "smollm2", "messages": MESSAGES}),
        ("/tokenize", {"model": "smollm2", "prompt": 5}),
        ("/tokenize", {}),
        ("/detokenize", {"model": "smollm2", "tokens": [504, 1670]}),
        ("/detokenize", {"model": "smollm2", "tokens": "504"}),
        ("/v1/responses", response),
        ("/v1/responses", {**response, "max_output_tokens": "16"}),
        ("/v1/responses", {**response, "stream": True}),
        ("/v1/responses", {"model": "smollm2", "input": "A", "background": True}),
        ("/v1/responses", {"model": "smollm2", "input": "A", "previous_response_id": "resp_1"}),
        ("/v1/responses", {"input": 5}),
        ("/v1/responses/resp_1/cancel", {}),
        ("/v1/messages", {**chat}),
        ("/v1/messages", {**chat, "stream": True}),
        ("/v1/messages", {**chat, "max_tokens": "4"}),
        ("/v1/messages", {**chat, "max_tokens": "few"}),
        ("/v1/messages", {"model": "smollm2"}),
        ("/v1/messages/count_tokens", {"model": "smollm2", "messages": MESSAGES}),
        ("/v1/embeddings", {"model": "smollm2", "input": "a"}),
        ("/pooling", {"model": "smollm2", "input": "a"}),
        ("/classify", {"model": "smollm2", "input": "a"}),
        ("/score", {"model": "smollm2", "text_1": "a", "text_2": "b"}),
        ("/rerank", {"model": "smollm2", "query": "a", "documents": ["b"]}),
        ("/v1/audio/transcriptions", {}),
        ("/v1/audio/translations", {}),
        ("/v1/chat/completions/batch", {**small, "messages": [MESSAGES, MESSAGES]}),
        ("/v1/chat/completions/render", chat),
        ("/v1/completions/render", _SMALL),
        (
            "/inference/v1/generate",
            {"model": "smollm2", "token_ids": [504], "sampling_params": {"max_tokens": 1}},
        ),
        (
            "/generative_scoring",
            {"model": "smollm2", "query": "a", "items": ["b"], "label_token_ids": [28, 30]},
        ),
        ("/v1/systemone", {"model": "smollm2"}),
        ("/invocations", _SMALL),
        ("/invocations", {**chat, "stream": True}),
        ("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}),
        *((path, {}) for path in ("/start_profile", "/sleep", "/reset_prefix_cache")),
        *((path, {}) for path in ("/scale_elastic_ep", "/is_scaling_elastic_ep")),
    )
    for path, fields in asked:
        told = {key: value for key, value in fields.items() if small.get(key) != value}
        yield Case(_short(told), path, fields=fields)


def _generated() -> Iterator[Case]:
    whole, stream = {"max_tokens": 8, "temperature": 0}, {"stream": True}
    for path, own, prompt in (
        (COMPLETIONS, (*BOTH, *COMPLETION), {"prompt": PROMPT}),
        (CHAT, CHATS, {"messages": MESSAGES}),
    ):
        base = {"model": "smollm2", **prompt, **whole}
        for fields in own:
            yield Case(_short(fields), path, {**base, **fields}, by_client=True)
        streamed = (*own, *STREAMED, *(BOTH if path == CHAT else ()))
        for fields in streamed:
            asked = {**base, **stream, **fields}
            yield Case(_short(stream | fields), path, asked, by_client=True)
        for missing in base:
            kept = {key: value for key, value in base.items() if key != missing}
            yield Case(f"no `{missing}`", path, kept | {"seed": 1, "stop": ["."]})


def _short(fields: dict[str, Any]) -> str:
    """Return fields as JSON that fits into a table."""
    text = json.dumps(fields, ensure_ascii=False)
    for word, value in (("TOOL", TOOL), ("SCHEMA", SCHEMA), ("QUESTION", MESSAGES[0])):
        text = text.replace(json.dumps(value), word)
    return f"`{text if len(text) <= 100 else text[:99] + '…'}`" if fields else ""


CASES = (*_generated(), *BODIES, *_routes(), *_forwarded())
"""All of them."""
