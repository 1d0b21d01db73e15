"""Streams as what they say in all, wherever they are cut into chunks."""

import json
from collections.abc import Sequence
from typing import Any


def joined_events(text: str) -> dict[str, Any]:
    """Return what server-sent events say, of any endpoint."""
    lines = text.splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    chunks = [json.loads(one) for one in data if one != "[DONE]"]
    if any("choices" in chunk for chunk in chunks):
        said = joined_chunks(chunks)
    else:
        said = {"text": "".join(map(_delta, chunks)), "fields": _fields(chunks)}
    events = sorted({line for line in lines if line.startswith("event: ")})
    return {**said, "events": events, "done": data[-1:] == ["[DONE]"]}


def joined_chunks(chunks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return what the chunks of a completion or a chat say."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.get("choices", ()):
            _add(choices.setdefault(choice["index"], {"fields": set()}), choice)
    for joined in choices.values():
        joined["fields"] = sorted(joined["fields"])
    usages = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    fingerprints = (chunk.get("system_fingerprint") for chunk in chunks)
    return {
        "fields": _fields(chunks),
        "models": sorted({str(chunk.get("model")) for chunk in chunks}),
        "ids": len({chunk.get("id") for chunk in chunks}),
        "choices": choices,
        "usage": usages[-1:],
        "every_chunk_has_usage": len(usages) == len(chunks),
        "chunks_without_choices": sum(not chunk.get("choices") for chunk in chunks),
        "system_fingerprint": next(filter(None, fingerprints), None),
        "prompt_token_ids": [
            one for chunk in chunks for one in chunk.get("prompt_token_ids") or ()
        ],
    }


def _fields(chunks: Sequence[dict[str, Any]]) -> list[str]:
    return sorted({key for chunk in chunks for key in chunk})


def _delta(event: dict[str, Any]) -> str:
    delta = event.get("delta") or ""
    return delta if isinstance(delta, str) else str(delta.get("text") or "")


def _add(joined: dict[str, Any], choice: dict[str, Any]) -> None:
    said = choice.get("delta", choice)
    joined["fields"] |= {*choice, *(f"delta.{key}" for key in choice.get("delta", ()))}
    for key in ("text", "content", "reasoning"):
        if said.get(key):
            joined[key] = joined.get(key, "") + said[key]
    for key, value in (
        ("role", said.get("role")),
        ("finish_reason", choice.get("finish_reason")),
        ("stop_reason", choice.get("stop_reason")),
    ):
        if value is not None:
            joined[key] = [*joined.get(key, ()), value]
    for key in ("token_ids", "prompt_token_ids"):
        joined[key] = [*joined.get(key, ()), *(choice.get(key) or ())]
    for key, entries in (choice.get("logprobs") or {}).items():
        joined.setdefault("logprobs", {}).setdefault(key, []).extend(entries or ())
    for call in said.get("tool_calls") or ():
        function = call.get("function") or {}
        name, arguments = function.get("name"), function.get("arguments") or ""
        joined["tool_calls"] = (
            joined.get("tool_calls", "") + (f"{name}: " if name else "") + arguments
        )
