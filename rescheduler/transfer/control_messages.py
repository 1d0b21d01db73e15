"""What a proxy and an engine say to each other about moving requests; never pickle.

A ZMQ message is two frames: `TOPIC`, which names the version of this schema, and one command or
reply as MessagePack. A reply carries the number of its command.
"""

from typing import Annotated, Any

import msgspec

__all__ = [
    "TOPIC",
    "Command",
    "ControlError",
    "EngineState",
    "Freeze",
    "Frozen",
    "GetState",
    "NotFrozen",
    "NotFrozenError",
    "Refused",
    "Release",
    "Released",
    "Reply",
    "Snapshot",
    "TakeSnapshot",
    "Unfreeze",
    "Unfrozen",
    "decode_command",
    "decode_reply",
    "encode",
]

TOPIC = b"headway-control/3"
"""The first frame of every message: name and version of the schema."""

Count = Annotated[int, msgspec.Meta(ge=0)]
Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class ControlError(RuntimeError):
    """Raised when an engine does not answer, or not with a valid reply."""


class NotFrozenError(ControlError):
    """Raised when the engine did not freeze a request; nothing has moved."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    number: Count


class Freeze(_Message, frozen=True, kw_only=True, tag="freeze"):
    """End a running request after its next token, and keep its KV cache for another engine.

    Attributes:
        id: the request's migration id.
        hop: which of its placements is meant, from 0.
    """

    id: Id
    hop: Count


class Unfreeze(_Message, frozen=True, kw_only=True, tag="unfreeze"):
    """Take a freeze back while the request still runs."""

    id: Id


class Release(_Message, frozen=True, kw_only=True, tag="release"):
    """Free what is kept of a request that no engine will ask for, and keep nothing of it later.

    Attributes:
        id: the request's migration id.
        hop: placement that is over, and so are those before it; one that still runs or is yet to
            arrive keeps nothing when it ends.
    """

    id: Id
    hop: Count


class TakeSnapshot(_Message, frozen=True, kw_only=True, tag="snapshot"):
    """Keep the full blocks of a running request for another engine while it goes on."""

    id: Id


class GetState(_Message, frozen=True, kw_only=True, tag="state"):
    """Ask how full the engine is."""


class Frozen(_Message, frozen=True, kw_only=True, tag="frozen"):
    """The request has ended here, and another engine may pull its KV cache.

    Attributes:
        output_token_ids: everything generated so far, here and before.
        params: ``kv_transfer_params`` of the request at the engine that takes over.
    """

    output_token_ids: list[int]
    params: dict[str, Any]


class NotFrozen(_Message, frozen=True, kw_only=True, tag="not_frozen"):
    """Nothing has moved."""

    reason: str


class Unfrozen(_Message, frozen=True, kw_only=True, tag="unfrozen"):
    """Whether the request goes on here as if nothing had been asked."""

    done: bool


class Released(_Message, frozen=True, kw_only=True, tag="released"):
    """Whether something was kept."""

    done: bool


class Snapshot(_Message, frozen=True, kw_only=True, tag="snapshot_taken"):
    """Full blocks of a running request, kept for another engine.

    Attributes:
        token_ids: in those blocks, a multiple of the block size.
        params: ``kv_transfer_params`` of a request for them.
    """

    token_ids: list[int]
    params: dict[str, Any]


class EngineState(_Message, frozen=True, kw_only=True, tag="engine_state"):
    """How full an engine is.

    Attributes:
        version: of vLLM.
        block_size: tokens in a block of the KV cache.
        max_num_seqs: requests in a batch at most.
        max_model_len: tokens of a request at most.
        prefix_caching: whether requests share the blocks of a prompt they both begin with.
        num_blocks: blocks that requests can have.
        free_blocks: those that none has; all of them when the engine is idle.
        running: requests in the batch.
        waiting: requests that wait to be scheduled.
        frozen: migration ids whose KV cache is kept for another engine.
    """

    version: str
    block_size: Count
    max_num_seqs: Count
    max_model_len: Count
    prefix_caching: bool
    num_blocks: Count
    free_blocks: Count
    running: Count
    waiting: Count
    frozen: list[str]


class Refused(_Message, frozen=True, kw_only=True, tag="refused"):
    """The message is not a command."""

    reason: str


Command = Freeze | Unfreeze | Release | TakeSnapshot | GetState
Reply = Frozen | NotFrozen | Unfrozen | Released | Snapshot | EngineState | Refused

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_replies = msgspec.msgpack.Decoder(Reply)


def encode(message: Command | Reply) -> list[bytes]:
    """Return the frames of a message."""
    return [TOPIC, _encoder.encode(message)]


def decode_command(frames: list[bytes]) -> Command:
    """Read a command.

    Raises:
        ControlError: another version of the schema, or no command.
    """
    command: Command = _decoded(frames, _commands)
    return command


def decode_reply(frames: list[bytes]) -> Reply:
    """Read a reply.

    Raises:
        ControlError: another version of the schema, or no reply.
    """
    reply: Reply = _decoded(frames, _replies)
    return reply


def _decoded(frames: list[bytes], decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    if len(frames) != 2:
        raise ControlError(f"{len(frames)} frames, not a topic and a message")
    if frames[0] != TOPIC:
        raise ControlError(
            f"the other side speaks {frames[0][:40]!r}, this one {TOPIC.decode()}: update one"
        )
    try:
        return decoder.decode(frames[1])
    except (msgspec.DecodeError, RecursionError, ValueError) as error:  # ValueError: UTF-8
        raise ControlError(f"invalid control message: {error}") from error
