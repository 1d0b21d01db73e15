"""Models without a ``tokenizer.json``: what is made of their files, or served without it."""

import base64
import json
import logging
import shutil
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from huggingface_hub import errors
from scripted_cluster import PROMPT, Cluster, names, scripted, served, tokens_of, until
from tokenizers import Tokenizer

from rescheduler.engines.deployment import DeploymentError
from rescheduler.openai.continued_text import ContinuedText
from rescheduler.openai.openai_request import TextRules
from rescheduler.serving import serve
from rescheduler.serving.serve import load_tokenizer

TEXT = "Hello, wörld 👋🏽 naïve\n  x = 12345  <|im_end|>"


@pytest.fixture
def model(smollm2: Path, tmp_path: Path) -> Path:
    """A model without a tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    shutil.copy(smollm2 / "config.json", folder)
    return folder


def describe(model: Path, **tokenizer: Any) -> None:
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))


def test_vocabulary_and_merges_become_a_tokenizer(
    model: Path, smollm2: Path, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """As they do in vLLM, which loads them by the same function."""
    values = json.loads((smollm2 / "tokenizer.json").read_text())["model"]
    merges = [one if isinstance(one, str) else " ".join(one) for one in values["merges"]]
    (model / "vocab.json").write_text(json.dumps(values["vocab"]))
    (model / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    describe(model, tokenizer_class="GPT2Tokenizer", eos_token="<|im_end|>")
    made = load_tokenizer(str(model))
    assert made is not None
    ids = tokenizer.encode(TEXT).ids
    for rules in (TextRules(), TextRules(skip_special_tokens=False)):
        texts = [ContinuedText(one, ids[:1], rules) for one in (made, tokenizer)]
        for token in ids[1:]:
            assert {text.add([token]) for text in texts} == {1}
            assert texts[0].text == texts[1].text
    assert not caplog.records


def tekken(model: Path) -> None:
    (model / "tekken.json").write_text("{}")


def tiktoken(model: Path) -> None:
    rows = [f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256)]
    (model / "tiktoken.model").write_text("".join(rows))
    theirs = ["tokenization_mine.TikTokenTokenizer", None]
    describe(model, tokenizer_class="TikTokenTokenizer", auto_map={"AutoTokenizer": theirs})


def code_beside_a_known_class(model: Path) -> None:
    vocabulary = {"a": 0, "b": 1, "<|endoftext|>": 2}
    (model / "vocab.json").write_text(json.dumps(vocabulary))
    (model / "merges.txt").write_text("#version: 0.2\n")
    theirs = ["tokenization_mine.Mine", None]
    describe(model, tokenizer_class="GPT2Tokenizer", auto_map={"AutoTokenizer": theirs})


def nothing(model: Path) -> None:
    del model


@pytest.mark.parametrize("files", [tekken, tiktoken, code_beside_a_known_class, nothing])
def test_another_kind_of_tokenizer_is_said_in_a_line(
    model: Path, files: Any, caplog: pytest.LogCaptureFixture
) -> None:
    files(model)
    with caplog.at_level(logging.WARNING):
        assert load_tokenizer(str(model)) is None
    (record,) = (one for one in caplog.records if one.name == "headway.serve")
    assert f"{model} has no tokenizer.json" in record.message
    assert "none is moved" in record.message
    assert "\n" not in record.message and len(record.message) < 700


def test_a_damaged_tokenizer_is_refused(model: Path) -> None:
    (model / "tokenizer.json").write_text("{")
    with pytest.raises(DeploymentError, match=r"model: .*tokenizer\.json"):
        load_tokenizer(str(model))


@pytest.mark.parametrize("fault", [errors.LocalEntryNotFoundError, OSError])
def test_a_hub_that_cannot_be_asked_is_no_model_without_a_tokenizer(
    monkeypatch: pytest.MonkeyPatch, fault: type[Exception]
) -> None:
    def unreachable(*_: Any) -> str:
        raise fault("the hub cannot be reached")

    monkeypatch.setattr(serve, "hf_hub_download", unreachable)
    with pytest.raises(DeploymentError, match=r"model: me/mine: .* the hub cannot be reached"):
        load_tokenizer("me/mine")


async def test_requests_are_placed_and_stay(tokenizer: Tokenizer) -> None:
    engines, deployment = await scripted(tokenizer, names(2), prefix_caching=False)
    try:
        async with (
            served(deployment, None) as (proxy, listeners),
            aiohttp.ClientSession() as session,
        ):
            it = Cluster(engines, proxy, listeners, session, tokenizer)
            body = {"model": "m", "prompt": PROMPT, "return_token_ids": True}
            status, answer, _ = await it.post({**body, "max_tokens": 5})
            assert status == 200
            assert answer["choices"][0]["text"] == tokenizer.decode(it.expected(5))
            assert engines["prefill-0"].bodies
            it.set_decodes(token_seconds=0.02)
            drained: list[str] = []

            async def drain(tokens: int) -> None:
                if tokens == 5:
                    source, _ = it.source_and_target()
                    drained.append(source.name)
                    assert proxy.drainer is not None
                    proxy.drainer.drain(proxy.cluster.instances[source.name])
                    (request,) = it.requests()
                    assert not request.movable and not request.can_move

            chunks = await it.stream({**body, "max_tokens": 60, "stream": True}, drain)
            assert tokens_of(chunks) == it.expected(60)
            assert sum(engine.pulled for engine in it.decodes) == 2, "of prefills alone"
            assert drained
            await until(lambda: not it.requests())
            it.set_decodes(breaks_at=len(tokenizer.encode(PROMPT).ids) + 5)
            asked = {**body, "max_tokens": 60, "stream": True}
            async with session.post(f"{it.url}/v1/completions", json=asked) as response:
                assert '"error"' in await response.text(), "nobody could go on with its text"
    finally:
        for engine in engines.values():
            await engine.stop()
