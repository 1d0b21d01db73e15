"""Signatures of ``kv_transfer_params``: only the proxy may say whose KV cache an engine reads.

An engine's HTTP port takes these parameters from whoever reaches it. With them a request could
pull another one's KV cache, freeze it, or hold blocks, so that engines with keys ignore those
that the proxy has not signed:

    signature = HMAC-SHA256(secret, sorted JSON of everything but signature and prompt_token_ids)
"""

import hmac
from typing import Any

import msgspec

from data_collection.capture.request_ids import MIGRATION_PARAMS

__all__ = ["is_signed", "signed"]

_SIGNATURE = "signature"
_PROMPT = "prompt_token_ids"  # taken out by vLLM's server, and no more than a prompt


def signed(params: dict[str, Any], secret: bytes) -> dict[str, Any]:
    """Return parameters with their signature.

    Args:
        params: ``kv_transfer_params`` with an entry ``headway``.
        secret: shared with the engine, see `predictor.live.curve_keys.shared_secret`.
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
