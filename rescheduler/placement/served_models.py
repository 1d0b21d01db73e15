"""The models that an engine lists, its adapters among them."""

from collections.abc import Sequence
from typing import Any

import msgspec

from rescheduler.openai.openai_request import LONGEST_MODEL, RequestRefusedError
from rescheduler.placement.instance_state import InstanceState
from rescheduler.placement.upstream import EngineRefusedError, Upstream, UpstreamError

__all__ = ["MODELS", "ask_models", "differing_models", "merged_models"]

MODELS = "/v1/models"
_MOST_MODELS = 4096
_LARGEST_LIST = 4 << 20


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


async def ask_models(upstream: Upstream, instance: InstanceState) -> None:
    """Ask an instance for its models; what it listed before holds while it does not answer.

    An engine may load an adapter at any time, and no other engine has it then.
    """
    try:
        instance.models = _names(await upstream.get(instance.instance, MODELS))
    except EngineRefusedError:  # for want of a key, perhaps
        instance.models = None
    except (UpstreamError, RequestRefusedError):
        pass  # its health says whether it is in service


def _names(body: bytes) -> frozenset[str] | None:
    """Return the names of a list of models; None if it is none that can be used.

    A request for a name that is too long is for no model in particular.
    """
    if len(body) > _LARGEST_LIST:
        return None
    try:
        listed = msgspec.json.decode(body, type=_Models).data
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    names = frozenset(model.id for model in listed if len(model.id) <= LONGEST_MODEL)
    return names if 0 < len(names) <= _MOST_MODELS else None


def differing_models(instances: Sequence[InstanceState]) -> list[InstanceState]:
    """Return as few instances as have among them all models that are known; none if all do."""
    seen: set[str] = set()
    chosen = []
    for instance in instances:
        if instance.models is not None and not instance.models <= seen:
            seen |= instance.models
            chosen.append(instance)
    return chosen if len(chosen) > 1 else []


def merged_models(bodies: Sequence[bytes]) -> bytes:
    """Return the lists of several instances as one: each model as it is listed first.

    The first list is returned as it is where the others add nothing, or are no lists.
    """
    merged: dict[str, Any] | None = None
    seen: set[str] = set()
    more = False
    for body in bodies:
        try:
            read = msgspec.json.decode(body, type=dict[str, Any])
            models = msgspec.convert(read.get("data"), list[dict[str, Any]])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            continue
        new = [model for model in models if str(model.get("id")) not in seen]
        seen |= {str(model.get("id")) for model in new}
        if merged is None:
            merged = {**read, "data": new}
        elif new:
            merged["data"] += new
            more = True
    return msgspec.json.encode(merged) if merged is not None and more else bodies[0]
