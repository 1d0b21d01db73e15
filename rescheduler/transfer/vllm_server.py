"""ASGI middleware by which an engine goes on with chats whose text is parsed.

Given to vLLM as ``--middleware rescheduler.transfer.vllm_server.ResumedChatsMiddleware``; the
``headway`` entry of ``kv_connector_extra_config`` then says ``parses_again``.
"""

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from data_collection.capture.requests import MIGRATION_PARAMS
from data_collection.vllm_adapter.resumed_chats import AnswerBegun, ResumedChats
from data_collection.vllm_adapter.support import refuse_other_version
from rescheduler.transfer.migration_params import MigrationParams

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


def answer_begun(request: Any) -> AnswerBegun | None:
    """Return how far a chat has come on other engines, as its proxy says; None: not at all."""
    carried = (request.kv_transfer_params or {}).get(MIGRATION_PARAMS)
    try:
        params = msgspec.convert(carried, MigrationParams)
    except msgspec.ValidationError:
        return None
    answer = params.answer
    if answer is None:
        return None
    return AnswerBegun(params.generated, answer.shown, answer.chunks, answer.stop, answer.whole)


class ResumedChatsMiddleware:
    """Prepares the server with its first request, before which vLLM has not made it.

    Args:
        app: the server.

    Raises:
        ValueError: another version of vLLM.
    """

    def __init__(self, app: App) -> None:
        refuse_other_version()
        self._app = app
        self._chat: Any = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] == "http":
            chat = getattr(scope["app"].state, "openai_serving_chat", None)
            if chat is not None and chat is not self._chat:
                self._chat = chat
                ResumedChats(chat, answer_begun)
        await self._app(scope, receive, send)
