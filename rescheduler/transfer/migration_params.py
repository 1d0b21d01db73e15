"""What a request carries for moving it, beside the KV parameters of NIXL."""

from typing import Annotated, Any

import msgspec

from data_collection.capture.request_ids import MIGRATION_PARAMS

__all__ = ["ConnectorConfig", "MigrationParams", "connector_config"]

Count = Annotated[int, msgspec.Meta(ge=0)]


class MigrationParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``headway`` entry of a request's ``kv_transfer_params``.

    Attributes:
        id: by which the proxy knows the request on every engine.
        hop: which placement of it this is, from 0.
        generated: tokens at the end of the prompt that an earlier engine generated.
        max_tokens: what the client asked for, where the engine is asked for less (a prefill).
        copies: only the KV cache of the prompt is wanted, for a request that is to come.
        signature: the proxy's, see `rescheduler.transfer.params_signature`.
    """

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
    hop: Count = 0
    generated: Count = 0
    max_tokens: Count | None = None
    copies: bool = False
    signature: str | None = None


class ConnectorConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``headway`` entry of ``kv_connector_extra_config``.

    Attributes:
        control: ZMQ endpoint that the connector binds; with data parallelism its port is raised
            by the rank. None: requests do not move away from this engine (a prefill).
        keys: folder made by ``headway keys``, needed off the loopback.
        time_to_live: seconds that the KV cache of a frozen request is kept. Reads stop 5 s
            before.
    """

    control: str | None = None
    keys: str | None = None
    time_to_live: Annotated[float, msgspec.Meta(gt=5)] = 15.0


def connector_config(extra_config: dict[str, Any]) -> ConnectorConfig:
    """Read a connector's configuration.

    Raises:
        ValueError: an unknown or impossible entry, with its name.
    """
    try:
        return msgspec.convert(extra_config.get(MIGRATION_PARAMS, {}), ConnectorConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"kv_connector_extra_config.{MIGRATION_PARAMS}: {error}") from error
