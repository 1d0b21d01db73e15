"""Chats with tools before engines that parse them again, and before engines that do not."""

from typing import Any

import pytest
from scripted_cluster import Cluster, cluster, text_of, until
from tokenizers import Tokenizer

from rescheduler.openai.openai_request import CHAT

ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "How is the weather?"}],
    "tools": [{"type": "function", "function": {"name": "weather"}}],
    "max_tokens": 300,
    "return_token_ids": False,
}


async def known(it: Cluster, *parses: bool) -> None:
    """Wait until the proxy knows which of the decode engines parse again."""
    for engine, does in zip(it.decodes, parses, strict=True):
        engine.says = {"parses_again": does}
    decodes = it.proxy.cluster.decodes
    await until(lambda: [instance.parses_again for instance in decodes] == [*parses])


@pytest.mark.parametrize("parses", [(True, True), (True, False), (False, False)])
async def test_a_chat_with_tools_moves_only_where_every_engine_parses_again(
    tokenizer: Tokenizer, parses: tuple[bool, bool]
) -> None:
    async with cluster(tokenizer) as it:
        await known(it, *parses)
        can_move = []

        async def at(tokens: int) -> None:
            if tokens == 5:
                can_move.append(it.live().can_move)

        asked = {**ASKED, "return_token_ids": True} if all(parses) else ASKED
        chunks = await it.stream(asked, at, CHAT)
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        (body,) = (body for engine in it.decodes for body in engine.bodies)
        assert body.get("return_token_ids", False) is all(parses)
        assert can_move == [all(parses)]


async def test_a_stream_goes_on_nowhere_where_it_is_not_parsed_again(tokenizer: Tokenizer) -> None:
    """Neither on an engine that says so, nor on one that only claims to."""
    for claims in (True, False):
        async with cluster(tokenizer) as it:
            await known(it, True, True)

            async def at(tokens: int, it: Cluster = it, claims: bool = claims) -> None:
                if tokens == 5:
                    source, target = it.source_and_target()
                    target.says["parses_again"] = claims
                    target_state = it.proxy.cluster.instances[target.name]
                    await until(lambda: target_state.parses_again is claims)
                    source.breaks_at = len(next(iter(source.running.values())).output) + 1

            chunks = await it.stream({**ASKED, "return_token_ids": True}, at, CHAT)
            assert chunks[-1]["error"]["code"] == 502
            alone = await it.stream({**ASKED, "tools": None}, path=CHAT)
            assert 0 < len(text_of(chunks)) < len(text_of(alone))
            assert text_of(alone).startswith(text_of(chunks))
