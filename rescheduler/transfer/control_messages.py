"""What a proxy and an engine say to each other about moving requests; never pickle.

A ZMQ message is two frames: `TOPIC`, which names the version of this schema, and one command or
reply as MessagePack. A reply carries the number of its command.

Whatever is beyond the bounds below is refused where it is read, so that no sum of what many
engines say overflows, and none makes a reader slow.
"""

from enum import IntEnum
from typing import Annotated, Any

import msgspec

TOPIC = b"headway-control/5"
"""The first frame of every message: name and version of the schema."""

DRAINING_FILE = "HEADWAY_DRAINING_FILE"
"""Variable that names a file to an engine: while it exists, the engine is being stopped.

Whoever stops an engine has its files, but not always the keys of its control socket.
"""

LARGEST_COMMAND = 1 << 20  # bytes
LARGEST_REPLY = 16 << 20
LARGEST_PARAMS = 4 << 20  # coded
LONGEST_REASON = 1000  # characters that say why something was not done
MOST_TOKENS = 1 << 21  # of a request
MOST_REQUESTS = 1 << 20  # that an engine runs, has waiting, or could run at a time
MOST_FOUND = 1024  # requests that one command may ask after
MOST_BLOCKS = 1 << 32  # of a KV cache
MOST_KV_TOKENS = 1 << 40  # in one: more than 10,000 times what any engine has today
MOST_RENEWED = 1024  # prefilled requests in one command
_MOST_KEPT = 1 << 16
_MOST_PARAMS = 64
_LONGEST_PATH = 4096

Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Requests = Annotated[int, msgspec.Meta(ge=0, le=MOST_REQUESTS)]
Blocks = Annotated[int, msgspec.Meta(ge=0, le=MOST_BLOCKS)]
Length = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
BlockSize = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], msgspec.Meta(max_length=MOST_TOKENS)]
Params = Annotated[dict[str, Any], msgspec.Meta(max_length=_MOST_PARAMS)]
Name = Annotated[str, msgspec.Meta(max_length=100)]
Ranks = Annotated[int, msgspec.Meta(ge=1, le=1 << 16)]
Id = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Reason = Annotated[str, msgspec.Meta(max_length=LONGEST_REASON)]


class ControlError(RuntimeError):
    """Raised when an engine does not answer, or not with a valid reply."""


class NotFrozenError(ControlError):
    """Raised when the engine did not freeze a request; nothing has moved."""


class _Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    number: Count


class Freeze(_Message, frozen=True, kw_only=True, tag="freeze"):
    """End a running request after its next token, and keep its KV cache for another engine.

    The ``id`` is its migration id, and ``hop`` says which of its placements is meant, from 0.
    """

    id: Id
    hop: Count


class Unfreeze(_Message, frozen=True, kw_only=True, tag="unfreeze"):
    """Take a freeze back while the request still runs."""

    id: Id


class Release(_Message, frozen=True, kw_only=True, tag="release"):
    """Free what is kept of a request that no engine will ask for, and keep nothing of it later.

    The placement ``hop`` is over, and so are those before it; one that still runs or is yet to
    arrive keeps nothing when it ends.
    """

    id: Id
    hop: Count


class Renew(_Message, frozen=True, kw_only=True, tag="renew"):
    """Keep the KV cache of prefilled requests, which still wait, for another whole lease."""

    ids: Annotated[list[Id], msgspec.Meta(max_length=MOST_RENEWED)]


class TakeSnapshot(_Message, frozen=True, kw_only=True, tag="snapshot"):
    """Keep the full blocks of a running request for another engine while it goes on."""

    id: Id


class GetState(_Message, frozen=True, kw_only=True, tag="state"):
    """Ask how full the engine is."""


class Find(_Message, frozen=True, kw_only=True, tag="find"):
    """Ask which requests the engine still has.

    The ``ids`` are migration ids, or what the engine's API calls requests that have none.
    """

    ids: Annotated[list[Id], msgspec.Meta(max_length=MOST_FOUND)]


class RequestStatus(IntEnum):
    """What an engine has of a request."""

    UNKNOWN = 0
    WAITING = 1
    RUNNING = 2


class Found(_Message, frozen=True, kw_only=True, tag="found"):
    """The status of each request that was asked after, and the steps of the engine by then."""

    statuses: Annotated[list[RequestStatus], msgspec.Meta(max_length=MOST_FOUND)]
    steps: Count


class Frozen(_Message, frozen=True, kw_only=True, tag="frozen"):
    """The request has ended here, and another engine may pull its KV cache with ``params``.

    The ``output_token_ids`` are everything generated so far, here and before.
    """

    output_token_ids: TokenIds
    params: Params


class NotFrozen(_Message, frozen=True, kw_only=True, tag="not_frozen"):
    """Nothing has moved."""

    reason: Reason


class Unfrozen(_Message, frozen=True, kw_only=True, tag="unfrozen"):
    """Whether the request goes on here as if nothing had been asked."""

    done: bool


class Released(_Message, frozen=True, kw_only=True, tag="released"):
    """Whether something was kept."""

    done: bool


class Renewed(_Message, frozen=True, kw_only=True, tag="renewed"):
    """Of these requests it keeps the KV cache for so many seconds from now.

    That is until a time of the engine's clock, which is what those who read it are told.
    """

    ids: Annotated[list[Id], msgspec.Meta(max_length=MOST_RENEWED)]
    seconds: Annotated[float, msgspec.Meta(ge=0, le=86_400)]
    until: float


class Snapshot(_Message, frozen=True, kw_only=True, tag="snapshot_taken"):
    """Full blocks of a running request, kept for another engine.

    The ``token_ids`` are those in them, a multiple of the block size, and the next one, which is
    computed: of a sliding window vLLM caches what comes before a prompt's last token. ``params``
    are for a request of these tokens.
    """

    token_ids: TokenIds
    params: Params


class EngineState(_Message, frozen=True, kw_only=True, tag="engine_state"):
    """What an engine runs, and how full it is.

    Attributes:
        version: of vLLM.
        model: as vLLM was given it; NIXL takes another path of the same model for another model.
        kv_dtype: of its KV cache, as vLLM was given it.
        kv_groups: whether layers of several kinds have KV caches of their own.
        tensor_parallel: ranks that share each layer.
        block_size: tokens in a block of the KV cache.
        max_num_seqs: requests in a batch at most.
        max_model_len: tokens of a request at most.
        num_blocks: blocks that requests can have.
        free_blocks: those that none has; all of them when the engine is idle.
        frozen: migration ids whose KV cache is kept for another engine.
        failed_loads: reads of another engine's KV cache, since it started, that failed; what they
            were of was computed again.
        incarnation: another one each time the engine starts.
        steps: that it has made since it started.
        draining: it is about to be stopped: its launcher waits for what runs.
        parses_again: it can go on with chats whose text another engine has begun to parse.
    """

    version: Name
    model: Annotated[str, msgspec.Meta(max_length=_LONGEST_PATH)]
    dtype: Name
    kv_dtype: Name
    kv_groups: bool
    tensor_parallel: Ranks
    block_size: BlockSize
    max_num_seqs: Requests
    max_model_len: Length
    prefix_caching: bool
    num_blocks: Blocks
    free_blocks: Blocks
    running: Requests
    waiting: Requests
    frozen: Annotated[list[Id], msgspec.Meta(max_length=_MOST_KEPT)]
    failed_loads: Count
    incarnation: Name = ""
    steps: Count = 0
    draining: bool = False
    parses_again: bool = False

    @property
    def kind(self) -> tuple[object, ...]:
        """What two engines must have in common to read each other's KV cache.

        The values of `KIND`; of a prefill instance the last one may be another.
        """
        return tuple(getattr(self, name) for name in KIND)


KIND = {
    "version": "vLLM",
    "model": "model",
    "dtype": "dtype",
    "kv_dtype": "KV cache dtype",
    "kv_groups": "hybrid KV cache manager",
    "block_size": "block size",
    "tensor_parallel": "tensor-parallel size",
}
"""What is compared of engines, in words."""


class Refused(_Message, frozen=True, kw_only=True, tag="refused"):
    """The message is not a command."""

    reason: Reason


Command = Freeze | Unfreeze | Release | Renew | TakeSnapshot | GetState | Find
Reply = (
    Frozen | NotFrozen | Unfrozen | Released | Renewed | Snapshot | EngineState | Found | Refused
)

_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_replies = msgspec.msgpack.Decoder(Reply)


class _Numbered(msgspec.Struct):
    number: Count


_numbers = msgspec.msgpack.Decoder(_Numbered)


def encode(message: Command | Reply) -> list[bytes]:
    """Return the frames of a message."""
    return [TOPIC, _encoder.encode(message)]


def decode_command(frames: list[bytes]) -> Command:
    """Read a command, or raise `ControlError`: another version of the schema, or no command."""
    command: Command = _decoded(frames, _commands)
    return command


def decode_reply(frames: list[bytes]) -> Reply:
    """Read a reply.

    Raises:
        ControlError: another version of the schema, no reply, or one beyond the bounds.
    """
    reply: Reply = _decoded(frames, _replies)
    if isinstance(reply, EngineState):
        _check_state(reply)
    elif isinstance(reply, Frozen | Snapshot) and len(_encoder.encode(reply.params)) > (
        LARGEST_PARAMS
    ):
        raise ControlError(f"invalid control message: params of more than {LARGEST_PARAMS} bytes")
    return reply


def number_of_reply(frames: list[bytes]) -> int | None:
    """Return whose reply a message is, also if nothing else of it can be read; None: unknown."""
    try:
        return _numbers.decode(frames[-1]).number if len(frames) == 2 else None
    except (msgspec.DecodeError, RecursionError, ValueError):
        return None


def _check_state(state: EngineState) -> None:
    if state.free_blocks > state.num_blocks:
        wrong = f"free_blocks: {state.free_blocks}, of num_blocks: {state.num_blocks}"
    elif state.num_blocks * state.block_size > MOST_KV_TOKENS:
        wrong = (
            f"num_blocks: {state.num_blocks}, of block_size: {state.block_size}, "
            f"are more than {MOST_KV_TOKENS} tokens"
        )
    else:
        return
    raise ControlError(f"invalid control message: {wrong}")


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
        raise ControlError(f"invalid control message: {str(error)[:LONGEST_REASON]}") from error
