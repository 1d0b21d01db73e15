"""What to capture, as given to vLLM's own ``--additional-config``."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

Config = TypeVar("Config", bound="CaptureConfig")

SECTION = "headway"
"""Key of vLLM's additional configuration that holds Headway's."""

_OF_THE_SCHEDULER = ("batching", "order", "victim")
"""Keys of the section that the worker does not read."""


class RecordConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where and how captured rows are recorded.

    Attributes:
        path: folder of the dataset; created when absent, continued when it exists.
        dtype: type the vectors are stored in. float16 halves the dataset; a vector that
            leaves its range (±65,504) is refused and counted, never clipped.
        tokens: keep prompt and output token ids in the requests table. They are what
            text-based predictors train on; turn it off where traffic is private.
        queue_rows: rows that may wait for the writing thread; more are dropped and counted.
        shard_rows: rows in a Parquet shard.
        flush_seconds: longest time the rows of a finished request wait to be written.
        replays: requests may bring an answer to be computed as a prefill, see `Replay`. Never
            on for clients: they could write any length into the dataset.
    """

    path: str
    dtype: Literal["float16", "float32"] = "float16"
    tokens: bool = True
    queue_rows: Annotated[int, msgspec.Meta(ge=1)] = 65_536
    shard_rows: Annotated[int, msgspec.Meta(ge=1)] = 8_192
    flush_seconds: Annotated[float, msgspec.Meta(gt=0)] = 5.0
    replays: bool = False


class CaptureConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``headway`` section of ``--additional-config``.

    Attributes:
        k: a row is captured whenever the number of generated tokens is a multiple of k,
            from 0 (the end of prefill) on. STAR §4.4 uses 20.
        layer: states after so many of the model's layers; 0: after all and the final norm. null:
            as the checkpoint of forecasts was trained, or 0.
        state_half_life: tokens after which a state counts half in the average over an answer that
            is captured (`AveragedStates`); 0: the newest token's state alone. null: as for
            ``layer``.
        record: record the rows as a dataset.
    """

    k: Annotated[int, msgspec.Meta(ge=1)] = 20
    layer: Annotated[int, msgspec.Meta(ge=0, le=10_000)] | None = None
    state_half_life: Annotated[float, msgspec.Meta(ge=0, le=1e6)] | None = None
    record: RecordConfig | None = None


def read_capture_config(additional_config: Mapping[str, Any], config_type: type[Config]) -> Config:
    """Validate the ``headway`` section of vLLM's additional configuration, for one kind of worker.

    Raises:
        ValueError: the section is missing, a key is unknown (the message names the known
            ones) or a value is out of range.
    """
    if SECTION not in additional_config:
        raise ValueError(
            f"--additional-config has no {SECTION!r} section; give for example "
            f'\'{{"{SECTION}": {{"k": 20, "record": {{"path": "my-dataset"}}}}}}\''
        )
    section = additional_config[SECTION]
    if isinstance(section, Mapping):
        section = {key: value for key, value in section.items() if key not in _OF_THE_SCHEDULER}
    try:
        return msgspec.convert(section, config_type)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"--additional-config, section {SECTION!r}: {error}. Keys known to this worker: "
            f"{', '.join(config_type.__struct_fields__)}; "
            f"in 'record': {', '.join(RecordConfig.__struct_fields__)}"
        ) from error
