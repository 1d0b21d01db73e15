"""What a request carries for moving it, beside the KV parameters of NIXL."""

import hmac
from typing import Annotated, Any, Literal

import msgspec

from data_collection.capture.requests import MIGRATION_PARAMS

Count = Annotated[int, msgspec.Meta(ge=0)]
Suspended = Literal["first", "last"] | None
"""Whether an engine whose memory runs out suspends a request before all others, or after them."""

_MOST_CHUNKS = 1 << 21


class AnswerSoFar(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine has to know to parse an answer again that another one has begun.

    Attributes:
        shown: of the generated tokens, those whose chunks the client has.
        chunks: in which all of them came: how many in a row, and the tokens of each.
        stop: strings that end the answer.
        whole: the client does not stream.
    """

    shown: Count = 0
    chunks: Annotated[list[tuple[Count, Count]], msgspec.Meta(max_length=_MOST_CHUNKS)] = []
    stop: list[str] = []
    whole: bool = False


class MigrationParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``headway`` entry of a request's ``kv_transfer_params``.

    Attributes:
        id: by which the proxy knows the request on every engine.
        hop: which placement of it this is, from 0.
        generated: tokens at the end of the prompt that an earlier engine generated.
        max_tokens: what the client asked for, where the engine is asked for less (a prefill).
        copies: only the KV cache of the prompt is wanted, for a request that is to come.
        answer: how far the answer has come, where its text is parsed.
        suspended: before all others, or after them, when memory runs out (see `Victims`).
        signature: the proxy's, see `signed`.
    """

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    hop: Count = 0
    generated: Count = 0
    max_tokens: Count | None = None
    copies: bool = False
    answer: AnswerSoFar | None = None
    suspended: Suspended = None
    signature: str | None = None


class ConnectorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``headway`` entry of ``kv_connector_extra_config``.

    Attributes:
        control: ZMQ endpoint that the connector binds; with data parallelism its port is raised
            by the rank. None: requests do not move away from this engine (a prefill).
        keys: folder made by ``headway keys``, needed off the loopback.
        time_to_live: seconds that the KV cache of a frozen request is kept. Reads stop 5 s
            before.
        parses_again: the engine's server has `vllm_server.ResumedChatsMiddleware`.
    """

    control: str | None = None
    keys: str | None = None
    time_to_live: Annotated[float, msgspec.Meta(gt=5)] = 15.0
    parses_again: bool = False


def connector_config(extra_config: dict[str, Any]) -> ConnectorConfig:
    """Read a connector's configuration.

    Raises:
        ValueError: an unknown or impossible entry, with its name.
    """
    try:
        return msgspec.convert(extra_config.get(MIGRATION_PARAMS, {}), ConnectorConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_connector_extra_config.{MIGRATION_PARAMS}: {error}") from error


_SIGNATURE = "signature"
_PROMPT = "prompt_token_ids"  # taken out by vLLM's server, and no more than a prompt


def signed(params: dict[str, Any], secret: bytes) -> dict[str, Any]:
    """Return parameters with their signature: only the proxy may say whose KV cache is read.

    An engine's HTTP port takes these parameters from whoever reaches it. With them a request could
    pull another one's KV cache, freeze it, or hold blocks, so that engines with keys ignore those
    that the proxy has not signed:

        signature = HMAC-SHA256(secret, sorted JSON of all but signature and prompt_token_ids)

    Args:
        params: ``kv_transfer_params`` with an entry ``headway``.
        secret: shared with the engine, see `predictor.live.zmq_sockets.shared_secret`.
    """
    headway = {**params[MIGRATION_PARAMS], _SIGNATURE: _signature(params, secret)}
    return {**params, MIGRATION_PARAMS: headway}


def is_signed(params: dict[str, Any], secret: bytes) -> bool:
    """Return whether parameters are as the owner of the secret has signed them."""
    headway = params.get(MIGRATION_PARAMS)
    given = headway.get(_SIGNATURE) if isinstance(headway, dict) else None
    if not isinstance(given, str):
        return False
    try:
        expected = _signature(params, secret)
    except (msgspec.EncodeError, TypeError, ValueError, RecursionError):
        return False
    return hmac.compare_digest(given.encode(), expected.encode())


def _signature(params: dict[str, Any], secret: bytes) -> str:
    headway = {k: v for k, v in params[MIGRATION_PARAMS].items() if k != _SIGNATURE}
    rest = {k: v for k, v in params.items() if k not in (_PROMPT, MIGRATION_PARAMS)}
    content = msgspec.json.encode({**rest, MIGRATION_PARAMS: headway}, order="deterministic")
    return hmac.digest(secret, content, "sha256").hex()
