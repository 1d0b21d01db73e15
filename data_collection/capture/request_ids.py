"""The join between the ids a client or proxy knows and the ids inside vLLM's engine."""

import re
from typing import NamedTuple

__all__ = ["MIGRATION_PARAMS", "RequestName", "parse_request_id"]

MIGRATION_PARAMS = "headway"
"""Entry of a request's ``kv_transfer_params`` by which a proxy knows it on every engine."""

_RANDOM_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_CHILD_PREFIX = re.compile(r"^(\d+)_")
_COMPLETION = re.compile(r"^(cmpl-.*)-(\d+)$")


class RequestName(NamedTuple):
    """What a client calls a request, and which of its answers this one is."""

    external_id: str
    prompt_index: int
    sample_index: int


def parse_request_id(internal_id: str) -> RequestName:
    """Recover the client's id from the id inside vLLM's engine.

    vLLM appends eight hexadecimal digits to every id, and prefixes the children of a
    request with n > 1 by their number: ``1_chatcmpl-77-0a1b2c3d`` is the second sample of
    ``chatcmpl-77``. The completions endpoint also numbers the prompts of one call:
    ``cmpl-77-4-0a1b2c3d`` answers the fifth prompt of ``cmpl-77``.

    Raises:
        ValueError: the id is empty.
    """
    if not internal_id:
        raise ValueError("a request id inside the engine cannot be empty")
    child = _CHILD_PREFIX.match(internal_id)
    name = internal_id[child.end() :] if child else internal_id
    name = _RANDOM_SUFFIX.sub("", name)
    sample_index = int(child.group(1)) if child else 0
    if completion := _COMPLETION.match(name):
        return RequestName(completion.group(1), int(completion.group(2)), sample_index)
    return RequestName(name, 0, sample_index)
