"""Streams as vLLM writes them, one engine after another, for the tests of splicing."""

import json
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


def whole_text(tokenizer: Tokenizer, prompt: list[int], tokens: list[int]) -> str:
    """What the tokens say after the prompt; of a character only whole ones."""
    before, text = tokenizer.decode(prompt), tokenizer.decode(prompt + tokens)
    assert text.startswith(before)
    return text[len(before) :].rstrip("\N{REPLACEMENT CHARACTER}")


def engine_stream(
    tokenizer: Tokenizer,
    prompt: list[int],
    before: list[int],
    tokens: list[int],
    *,
    chat: bool,
    withheld: int = 0,
    finish: str = "length",
    logprobs: bool = False,
    created: int = 1,
    usage: bool = False,
    ending: bool = True,
) -> list[bytes]:
    """Chunks of an engine that generates ``tokens`` after ``prompt`` and ``before``."""
    kind, head = ("chatcmpl-1", "chat.completion.chunk") if chat else ("cmpl-1", "text_completion")
    common = {"id": kind, "object": head, "created": created, "model": "m"}
    known = prompt + before
    stream = DecodeStream(ids=known, skip_special_tokens=True)
    chunks: list[dict[str, Any]] = []
    if chat:
        choice: dict[str, Any] = {
            "index": 0,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        chunks.append({**common, "choices": [choice], "prompt_token_ids": known})
    text, sent, offset = "", 0, 0
    for i, token in enumerate(tokens):
        text += stream.step(tokenizer, token) or ""
        last = ending and i + 1 == len(tokens)
        end = len(text) if last else max(sent, len(text) - withheld)
        delta, sent = text[sent:end], end
        choice = {"index": 0}
        choice.update({"delta": {"content": delta}} if chat else {"text": delta})
        choice["logprobs"] = None
        if logprobs:
            word = tokenizer.decode([token])
            if chat:
                choice["logprobs"] = {"content": [{"token": word, "logprob": -1.0}]}
            else:
                choice["logprobs"] = {
                    "text_offset": [offset],
                    "token_logprobs": [-1.0],
                    "tokens": [word],
                    "top_logprobs": [{word: -1.0}],
                }
            offset += len(word)
        choice["finish_reason"] = finish if last else None
        if last or not chat:
            choice["stop_reason"] = None
        if not chat:
            choice["prompt_token_ids"] = known if i == 0 else None
        choice["token_ids"] = [token]
        chunks.append({**common, "choices": [choice]})
        if last and not usage:
            chunks[-1]["system_fingerprint"] = f"engine-{created}"
    if usage and ending:
        counts = {
            "prompt_tokens": len(known),
            "total_tokens": len(known) + len(tokens),
            "completion_tokens": len(tokens),
        }
        fingerprint = f"engine-{created}"
        chunks.append({**common, "choices": [], "usage": counts, "system_fingerprint": fingerprint})
    return [
        json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() for chunk in chunks
    ]
