"""One stream out of several engines': no token lost, repeated or changed."""

import json
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scripted_cluster import text_of
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from rescheduler.openai.continued_text import ContinuedText
from rescheduler.openai.openai_request import CHAT, COMPLETIONS, TextRules
from rescheduler.openai.openai_response import ResponseCollector
from rescheduler.openai.openai_stream import EventReader, StreamSplicer, event, read_chunk
from rescheduler.openai.request_reader import read_request

PROMPT = "Tell me"
texts = st.text(st.sampled_from("ab c🤦🏽é漢\n"), min_size=1, max_size=30)
cuts = st.lists(st.integers(1, 40), max_size=3, unique=True).map(sorted)
quick = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


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


def spliced(
    tokenizer: Tokenizer,
    tokens: list[int],
    cut_at: list[int],
    chat: bool,
    frozen: bool = True,
    **asked: Any,
) -> tuple[StreamSplicer, list[dict[str, Any]]]:
    """What a client sees of tokens that come from one engine after another.

    ``frozen``: an engine ends its part as a freeze does; else it dies without a word.
    """
    body = {"prompt": PROMPT, "messages": [], "stream": True, "max_tokens": 4096, **asked}
    client = read_request(CHAT if chat else COMPLETIONS, json.dumps(body).encode())
    splicer = StreamSplicer(client, tokenizer)
    prompt = tokenizer.encode(PROMPT).ids
    withheld = max(map(len, client.text.stop), default=1) - 1
    seen: list[dict[str, Any]] = []
    bounds = [0, *(cut for cut in cut_at if cut < len(tokens)), len(tokens)]
    for part in range(len(bounds) - 1):
        first, last = bounds[part], bounds[part + 1]
        ending = frozen or last == len(tokens)
        chunks = engine_stream(
            tokenizer,
            prompt,
            tokens[:first],
            tokens[first:last],
            chat=chat,
            withheld=0 if first else withheld,
            logprobs=bool(asked.get("logprobs")),
            created=part + 1,
            usage=client.include_usage and last == len(tokens),
            ending=ending,
        )
        for data in chunks:
            chunk = read_chunk(data)
            is_cut = chunk.finish_reason == "length" and last < len(tokens)
            out = splicer.pass_on_frozen(data, chunk) if is_cut else splicer.pass_on(data, chunk)
            if out is not None:
                seen.append(json.loads(out))
            if splicer.stopped:
                usage = splicer.usage()
                return splicer, seen if usage is None else [*seen, json.loads(usage)]
        if last < len(tokens) and not ending:
            splicer.cut()
    return splicer, seen


@quick
@given(text=texts, cut_at=cuts, chat=st.booleans(), frozen=st.booleans())
def test_any_cuts_leave_the_clients_text_as_it_is(
    tokenizer: Tokenizer, text: str, cut_at: list[int], chat: bool, frozen: bool
) -> None:
    tokens = tokenizer.encode(text).ids
    splicer, seen = spliced(tokenizer, tokens, cut_at, chat, frozen)
    assert text_of(seen) == whole_text(tokenizer, tokenizer.encode(PROMPT).ids, tokens)
    assert splicer.output_token_ids == tokens
    reasons = [choice["finish_reason"] for chunk in seen for choice in chunk["choices"]]
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert {chunk["created"] for chunk in seen} == {1}
    roles = [choice.get("delta", {}).get("role") for chunk in seen for choice in chunk["choices"]]
    assert [role for role in roles if role] == (["assistant"] if chat else [])


@quick
@given(
    text=texts,
    cut_at=cuts,
    chat=st.booleans(),
    frozen=st.booleans(),
    include=st.booleans(),
    data=st.data(),
)
def test_a_stop_string_is_found_across_any_cut(
    tokenizer: Tokenizer,
    text: str,
    cut_at: list[int],
    chat: bool,
    frozen: bool,
    include: bool,
    data: st.DataObject,
) -> None:
    tokens = tokenizer.encode(text).ids
    whole = whole_text(tokenizer, tokenizer.encode(PROMPT).ids, tokens)
    start = data.draw(st.integers(0, max(0, len(whole) - 1)))
    stop = whole[start : start + data.draw(st.integers(1, 5))]
    if not stop:
        return
    end = whole.index(stop)
    # Only cuts before it is complete: afterwards the first engine would have stopped.
    prompt = tokenizer.encode(PROMPT).ids
    done = next(
        i
        for i in range(1, len(tokens) + 1)
        if stop in whole_text(tokenizer, prompt, tokens[:i])
        and not tokenizer.decode(tokens[:i]).endswith("\N{REPLACEMENT CHARACTER}")
    )
    cut_at = [cut for cut in cut_at if cut < done] or ([1] if done > 1 else [])
    if not cut_at:
        return
    splicer, seen = spliced(
        tokenizer, tokens, cut_at, chat, frozen, stop=[stop], include_stop_str_in_output=include
    )
    assert splicer.stopped
    assert text_of(seen) == whole[: end + len(stop) if include else end]
    assert splicer.output_token_ids == tokens[:done]
    last = seen[-1]["choices"][0]
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)


def test_a_stop_string_that_begins_before_a_cut_is_found_and_none_is_looked_for_there(
    tokenizer: Tokenizer,
) -> None:
    ids = tokenizer.encode("one two three four").ids
    text = ContinuedText(tokenizer, [], TextRules(stop=("one", "o three")))
    text.follow(ids[:2])  # its engine has looked for both, and would have stopped at the first
    assert text.stopped is None and text.tokens == 2
    assert text.add(ids[2:]) == 1
    assert text.stopped == "o three" and text.text == "one tw"


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize(
    ("stop", "text"), [("four five", "one two three "), ("four fifty", "one two three four five")]
)
def test_of_a_stop_string_nothing_is_shown_before_it_is_certain_that_it_does_not_come(
    tokenizer: Tokenizer, chat: bool, stop: str, text: str
) -> None:
    tokens = tokenizer.encode("one two three four five").ids
    for cut in range(1, len(tokens)):
        _, seen = spliced(tokenizer, tokens, [cut], chat, stop=[stop])
        assert text_of(seen) == text


def test_min_tokens_also_count_over_the_cut(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a stop b stop c").ids
    first = next(i for i in range(len(tokens)) if "stop" in tokenizer.decode(tokens[: i + 1])) + 1
    _, seen = spliced(tokenizer, tokens, [1], False, stop=["stop"], min_tokens=first)
    assert text_of(seen) == "a stop b "


@quick
@given(text=texts, cut_at=cuts)
def test_text_offsets_go_on_after_a_cut(tokenizer: Tokenizer, text: str, cut_at: list[int]) -> None:
    tokens = tokenizer.encode(text).ids
    uncut = spliced(tokenizer, tokens, [], False, logprobs=1)[1]
    _, seen = spliced(tokenizer, tokens, cut_at, False, logprobs=1)
    assert [chunk["choices"][0]["logprobs"] for chunk in seen] == [
        chunk["choices"][0]["logprobs"] for chunk in uncut
    ]


@pytest.mark.parametrize("chat", [False, True])
def test_usage_counts_the_tokens_of_all_engines_and_the_prompt_once(
    tokenizer: Tokenizer, chat: bool
) -> None:
    tokens = tokenizer.encode("one two three four five").ids
    options = {"stream_options": {"include_usage": True}}
    _, seen = spliced(tokenizer, tokens, [2, 3], chat, **options)
    prompt = len(tokenizer.encode(PROMPT).ids)
    expected = {
        "prompt_tokens": prompt,
        "completion_tokens": len(tokens),
        "total_tokens": prompt + len(tokens),
    }
    assert seen[-1]["usage"] == expected
    _, seen = spliced(tokenizer, tokens, [2], chat, stop=["four"], **options)
    assert seen[-1]["usage"]["completion_tokens"] == len(tokenizer.encode("one two three four").ids)
    assert seen[-1]["choices"] == []


@pytest.mark.parametrize("chat", [False, True])
def test_token_ids_are_seen_only_by_who_asked_for_them(tokenizer: Tokenizer, chat: bool) -> None:
    tokens = tokenizer.encode('the key "token_ids":[1, 2] in a text').ids
    prompt = tokenizer.encode(PROMPT).ids
    for cut_at in ([], [3]):
        _, seen = spliced(tokenizer, tokens, cut_at, chat)
        for chunk in seen:
            assert chunk.get("prompt_token_ids") is None
            for choice in chunk["choices"]:
                assert choice.get("token_ids") is None
                assert choice.get("prompt_token_ids") is None
        assert '"token_ids":[1, 2]' in text_of(seen)
        _, seen = spliced(tokenizer, tokens, cut_at, chat, return_token_ids=True)
        parts = [choice.get("token_ids") or [] for chunk in seen for choice in chunk["choices"]]
        assert [token for part in parts for token in part] == tokens
        first = seen[0] if chat else seen[0]["choices"][0]
        assert first["prompt_token_ids"] == prompt
        assert sum("prompt_token_ids" in json.dumps(chunk) for chunk in seen if chat) <= 1


def test_the_fingerprint_is_the_first_engines_and_only_at_the_end(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("one two three").ids
    _, seen = spliced(tokenizer, tokens, [1], False)
    assert "system_fingerprint" not in seen[0]
    fingerprints = {c["system_fingerprint"] for c in seen if "system_fingerprint" in c}
    assert len(fingerprints) == 1


@pytest.mark.parametrize(
    ("delta", "parsed"), [({"reasoning": "so"}, True), ({}, True), ({"content": "so"}, False)]
)
def test_reasoning_needs_an_engine_that_parses_it_again(
    tokenizer: Tokenizer, delta: dict[str, str], parsed: bool
) -> None:
    client = read_request(CHAT, b'{"messages": [], "stream": true}')
    splicer = StreamSplicer(client, tokenizer)
    chunk = {"created": 1, "choices": [{"delta": delta, "token_ids": [5]}]}
    data = msgspec.json.encode(chunk)
    splicer.pass_on(data, read_chunk(data))
    assert splicer.moves
    assert splicer.parsed is parsed
    assert (splicer.answer_so_far is not None) is parsed


@quick
@given(
    payloads=st.lists(st.text("ab{}\n ", max_size=9).map(lambda t: json.dumps(t).encode())),
    sizes=st.lists(st.integers(1, 7)),
)
def test_events_are_read_wherever_packets_end(payloads: list[bytes], sizes: list[int]) -> None:
    stream = b"".join(map(event, payloads))
    reader, read, at = EventReader(), [], 0
    for size in [*sizes, len(stream)]:
        read += reader.feed(stream[at : at + size])
        at += size
    assert read == payloads


@pytest.mark.parametrize("chat", [False, True])
def test_a_whole_answer_adds_up_the_chunks(tokenizer: Tokenizer, chat: bool) -> None:
    tokens = tokenizer.encode("one two three four five").ids
    for cut_at in ([], [2], [1, 3]):
        body = {"prompt": PROMPT, "messages": [], "max_tokens": 64, "return_token_ids": True}
        client = read_request(CHAT if chat else COMPLETIONS, json.dumps(body).encode())
        collector = ResponseCollector(client)
        options = {"return_token_ids": True, "stream_options": {"include_usage": True}}
        for chunk in spliced(tokenizer, tokens, cut_at, chat, logprobs=1, **options)[1]:
            collector.add(json.dumps(chunk).encode())
        answer = json.loads(collector.response())
        choice = answer["choices"][0]
        text = choice["message"]["content"] if chat else choice["text"]
        assert text == "one two three four five"
        assert answer["object"] == ("chat.completion" if chat else "text_completion")
        assert choice["finish_reason"] == "length"
        assert choice["token_ids"] == tokens
        assert answer["usage"]["completion_tokens"] == len(tokens)
        if not chat:
            words = choice["logprobs"]["tokens"]
            starts = [len("".join(words[:i])) for i in range(len(words))]
            assert choice["logprobs"]["text_offset"] == starts
