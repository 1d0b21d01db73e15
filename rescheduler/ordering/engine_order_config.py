"""The order of service in an engine, as given to vLLM's own ``--additional-config``."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from data_collection.capture.capture_config import SECTION
from rescheduler.ordering.service_order import ServiceOrder, create_order

__all__ = ["EngineOrderConfig", "read_engine_order"]

_KEY = "order"


class EngineOrderConfig(NamedTuple):
    """The ``order`` part of the ``headway`` section of ``--additional-config``.

    Attributes:
        order: of service.
        prompt_checkpoint: predictor that reads prompts; None: what waits is expected to be like
            what ended lately.
    """

    order: ServiceOrder
    prompt_checkpoint: str | None


def read_engine_order(additional_config: Mapping[str, Any]) -> EngineOrderConfig:
    """Validate what vLLM's additional configuration says of the order.

    Raises:
        ValueError: it says nothing, there is no such order or option, or a value is invalid.
    """
    section = additional_config.get(SECTION)
    given = section.get(_KEY) if isinstance(section, Mapping) else None
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        raise ValueError(
            f"--additional-config has no order's name in its {SECTION!r} section; give for example "
            f'\'{{"{SECTION}": {{"{_KEY}": {{"name": "boost"}}}}}}\''
        )
    options = dict(given)
    checkpoint = options.pop("prompt_checkpoint", None)
    if checkpoint is not None and not isinstance(checkpoint, str):
        raise ValueError(
            f"--additional-config, {SECTION}.{_KEY}.prompt_checkpoint: a folder, not {checkpoint!r}"
        )
    try:
        return EngineOrderConfig(create_order(**options), checkpoint)
    except ValueError as error:
        raise ValueError(f"--additional-config, {SECTION}.{_KEY}: {error}") from error
