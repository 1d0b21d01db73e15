"""The scheduler's side of moving requests: freeze, keep, hand over, restore.

Written against vLLM 0.32; `tests/integration/test_transfer_contract.py` names what it reads.
"""

import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv
from vllm.v1.request import Request, RequestStatus

from data_collection.capture.refusals import refuse
from data_collection.capture.requests import MIGRATION_PARAMS
from predictor.live.zmq_sockets import shared_secret
from rescheduler.transfer.control_messages import (
    Command,
    ControlError,
    EngineState,
    Freeze,
    Frozen,
    GetState,
    NotFrozen,
    Release,
    Released,
    Reply,
    Snapshot,
    TakeSnapshot,
    Unfreeze,
    Unfrozen,
)
from rescheduler.transfer.control_server import Asked, ControlServer
from rescheduler.transfer.migration_params import MigrationParams, connector_config, is_signed
from rescheduler.transfer.sampling_state import restore_request, restores_runner_state

__all__ = ["RELEASED", "TAILS", "MigratingScheduler", "refuse_unsupported"]

logger = logging.getLogger(__name__)

_REMEMBERED_SECONDS = 120.0
"""For which a request that is over may still be on its way here."""
_MOST_REMEMBERED = 4096

RELEASED = "headway_released"
"""Attribute of the connector's metadata: ids whose blocks the workers shall let go."""
TAILS = "headway_tails"
"""Attribute of the connector's metadata: id -> tokens generated elsewhere."""


@dataclass(slots=True)
class _Freeze:
    """A freeze under way.

    Attributes:
        asked: who waits for it.
        max_tokens: of the request, before it was lowered to end it.
    """

    asked: Asked
    max_tokens: int


def refuse_unsupported(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse, by name, engines whose requests cannot move while they decode.

    Raises:
        ValueError: speculative decoding, a pooling or diffusion model, pipeline or prefill
            context parallelism, or a cache of several groups.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    groups = len(kv_cache_config.kv_cache_groups)
    checks = {
        "speculative decoding is on, and its drafts are not handed over; drop "
        "--speculative-config": vllm_config.speculative_config is not None,
        "this is a pooling or diffusion model, which does not generate a token per step; serve "
        "an autoregressive one": model.runner_type == "pooling" or model.is_diffusion,
        "pipeline parallelism is on, and a freeze is not known to reach every stage in time; use "
        "--tensor-parallel-size": parallel.pipeline_parallel_size > 1,
        "prefill context parallelism is on, and no rank holds a whole context's KV cache; drop "
        "--prefill-context-parallel-size": parallel.prefill_context_parallel_size > 1,
        f"its KV cache has {groups} groups (hybrid attention), and only one is supported": (
            groups != 1
        ),
    }
    refuse(
        "requests of this engine cannot move",
        checks,
        "or remove `control` to serve it without migration",
    )


class MigratingScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """Lets a proxy end a running request here and go on with it at another engine.

    Commands arrive in the control server's thread and are carried out in the scheduler's, when
    it builds the connector's metadata at the end of each step.

    Raises:
        ValueError: an impossible configuration, or a model whose cache has several groups.
    """

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._config = connector_config(
            vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        )
        self._manager: Any = None
        self._live: dict[str, Request] = {}  # all, by the engine's id
        self._requests: dict[str, Request] = {}  # those that can move, by migration id
        self._params: dict[str, MigrationParams] = {}
        self._freezes: dict[str, _Freeze] = {}
        self._kept: dict[str, tuple[int, str]] = {}  # hop and the engine's id, by migration id
        self._over: dict[str, tuple[int, float]] = {}  # hop and until when, by migration id
        self._pinned: dict[str, list[Any]] = {}
        self._snapshots = 0
        self._taken: deque[tuple[int, Asked, Snapshot]] = deque()
        self._steps_in_flight = vllm_config.max_concurrent_batches - 1
        self._step = 0
        self._released: set[str] = set()
        self._restores_runner_state = restores_runner_state(vllm_config)
        keys = self._config.keys
        self._secret = None if keys is None else shared_secret(keys, "engine")
        self._server: ControlServer | None = None
        if self._config.control is not None:
            refuse_unsupported(vllm_config, kv_cache_config)
            rank = vllm_config.parallel_config.data_parallel_index
            self._server = ControlServer(
                _raised_port(self._config.control, rank), self._config.keys, self._answer
            )

    def bind(self, manager: Any) -> None:
        """Learn of the cache manager, which is made after the connector."""
        self._manager = manager

    def shutdown(self) -> None:
        """Close the control socket, then shut down as usual."""
        if self._server is not None:
            self._server.close()
        super().shutdown()

    def on_new_request(self, request: Request) -> None:
        """Remember what a request carries for moving it; ignore what the proxy has not signed."""
        given = request.kv_transfer_params
        if given and self._secret is not None and not is_signed(given, self._secret):
            logger.warning(
                "%s: kv_transfer_params without the proxy's signature are ignored",
                request.request_id,
            )
            request.kv_transfer_params = None
        super().on_new_request(request)
        self._live[request.request_id] = request
        carried = (request.kv_transfer_params or {}).get(MIGRATION_PARAMS)
        if carried is None:
            return
        try:
            params = msgspec.convert(carried, MigrationParams)
        except msgspec.ValidationError as error:
            logger.error(
                "%s: kv_transfer_params.%s: %s; it cannot move",
                request.request_id,
                MIGRATION_PARAMS,
                error,
            )
            return
        if params.copies:
            return
        self._params[request.request_id] = params
        self._requests[params.id] = request

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Count what another engine's decoding has left to pull: all tokens but the last.

        What a pre-copy has left is sooner computed than pulled: a pull takes a step of its own.
        """
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill") and self._generated(request):
            remote = min(params.get("remote_num_tokens") or 0, request.num_tokens - 1)
            count = remote - num_computed_tokens
            pulls = count >= max(1, self.kv_recompute_threshold)
            return (count, True) if pulls else (0, False)
        counted: tuple[int, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return counted

    def request_finished(
        self, request: Request, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep a frozen request's blocks for the engine that takes over; else as usual."""
        name = request.request_id
        self._live.pop(name, None)
        params = self._params.pop(name, None)
        if params is not None and self._requests.get(params.id) is request:
            del self._requests[params.id]
        freeze = self._freezes.pop(name, None)
        if params is not None and self._is_over(params):
            if freeze is not None:
                self._reply(freeze.asked, _not_frozen(freeze.asked, "it was released"))
            self._reqs_not_processed.add(name)
            self._reqs_need_save.pop(name, None)
            self._stop_heartbeat(name)
            return False, None
        if freeze is None:
            keeps, remote = super().request_finished(request, block_ids)
            if keeps and params is not None:
                self._kept[params.id] = params.hop, name
            if keeps and remote is not None:
                # vLLM tells a prefill's reader no deadline: it would read whatever is there then.
                remote["remote_blocks_expiry_time"] = self._reqs_need_send[name]
            return keeps, remote
        assert params is not None
        if request.status != RequestStatus.FINISHED_LENGTH_CAPPED:
            self._reqs_not_processed.add(name)
            self._reply(freeze.asked, _not_frozen(freeze.asked, "it ended by itself"))
            return super().request_finished(request, block_ids)  # type: ignore[no-any-return]
        self._stop_heartbeat(name)
        # Of the last token there is no KV yet, and in-flight steps have not written theirs.
        tokens = min(
            request.num_tokens - 1, request.num_computed_tokens - request.num_in_flight_tokens
        )
        deadline = self._keep(name)
        self._kept[params.id] = params.hop, name
        remote = self._remote_params(name, block_ids[0], tokens, deadline)
        reply = Frozen(
            number=freeze.asked.command.number,
            output_token_ids=list(request.output_token_ids),
            params=remote,
        )
        self._reply(freeze.asked, reply)
        return True, None

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Restore the requests that start here, carry out commands, then build as usual."""
        tails = self._restored(scheduler_output.scheduled_new_reqs)
        self._step += 1
        if self._server is not None:
            for asked in self._server.take():
                reply = self._carry_out(asked)
                if reply is not None:
                    self._reply(asked, reply)
        while self._taken and self._taken[0][0] <= self._step:
            _, asked, snapshot = self._taken.popleft()
            self._reply(asked, snapshot)
        meta = super().build_connector_meta(scheduler_output)
        if self._released:
            setattr(meta, RELEASED, self._released)
            self._released = set()
        if tails and self._restores_runner_state:
            setattr(meta, TAILS, tails)
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        """Free snapshots that have been read or have expired; vLLM knows of requests only."""
        super().update_connector_output(connector_output)
        for name in list(connector_output.finished_sending or ()):
            if name in self._pinned:
                connector_output.finished_sending.discard(name)
                self._manager.block_pool.free_blocks(reversed(self._pinned.pop(name)))
        sent = connector_output.finished_sending or ()
        for id, (_, name) in list(self._kept.items()):
            if name in sent:
                del self._kept[id]

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping while a snapshot is kept: it is freed in a step."""
        return bool(self._pinned)

    def _restored(self, new_requests: list[Any]) -> dict[str, list[int]]:
        """Make output of the tokens that another engine generated, as a request starts.

        Until then it waits with all of them as its prompt: vLLM counts on that while it looks
        for what is cached, also again after a load that failed.

        Returns:
            The tokens by request id.
        """
        tails = {}
        for new in new_requests:
            params = self._params.get(new.req_id)
            if params is not None and params.generated:
                tails[new.req_id] = restore_request(self._requests[params.id], params.generated)
                self._params[new.req_id] = msgspec.structs.replace(params, generated=0)
        return tails

    def _generated(self, request: Request) -> int:
        params = self._params.get(request.request_id)
        return params.generated if params is not None else 0

    def _answer(self, command: Command) -> Reply | None:
        """Answer what needs no scheduler, in the control server's thread."""
        number = command.number
        if isinstance(command, GetState):
            return self._state(number)
        if command.id in self._requests:
            return None
        if isinstance(command, Release):
            if command.id in self._kept:
                return None
            self._remember_over(command)
            return Released(number=number, done=False)
        if isinstance(command, Unfreeze):
            return Unfrozen(number=number, done=False)
        return NotFrozen(number=number, reason=f"no request {command.id} runs here")

    def _carry_out(self, asked: Asked) -> Reply | None:
        """Carry out a command in the scheduler's thread; None: the reply comes later."""
        command = asked.command
        if isinstance(command, Freeze):
            return self._freeze(asked, command)
        if isinstance(command, TakeSnapshot):
            return self._take_snapshot(asked, command)
        if isinstance(command, Unfreeze):
            return Unfrozen(number=command.number, done=self._unfreeze(command.id))
        if isinstance(command, Release):
            return Released(number=command.number, done=self._release(command))
        return self._state(command.number)

    def _release(self, command: Release) -> bool:
        """Free what is kept; return whether there was anything."""
        self._remember_over(command)
        hop, name = self._kept.get(command.id, (command.hop + 1, ""))
        if hop > command.hop:
            return False
        del self._kept[command.id]
        self._released.add(name)
        return True

    def _remember_over(self, command: Release) -> None:
        """Remember that placements are over, in either thread."""
        now = time.monotonic()
        if len(self._over) >= _MOST_REMEMBERED:
            for id, (_, until) in list(self._over.items()):
                if until < now:
                    self._over.pop(id, None)
        self._over[command.id] = command.hop, now + _REMEMBERED_SECONDS

    def _is_over(self, params: MigrationParams) -> bool:
        """Return whether nobody will ask for what this placement leaves."""
        hop, until = self._over.get(params.id, (-1, 0.0))
        return params.hop <= hop and time.monotonic() < until

    def _freeze(self, asked: Asked, command: Freeze) -> Reply | None:
        request = self._requests.get(command.id)
        reason = self._why_not(request, command)
        if reason is not None:
            return _not_frozen(asked, reason)
        assert request is not None
        name = request.request_id
        if name in self._freezes:
            return _not_frozen(asked, "it is being frozen already")
        self._freezes[name] = _Freeze(asked, request.max_tokens)
        self._expect_reader(name)
        request.max_tokens = request.num_output_tokens + 1
        assert request.kv_transfer_params is not None
        request.kv_transfer_params[MIGRATION_PARAMS]["frozen"] = True
        return None

    def _why_not(self, request: Request | None, command: Freeze) -> str | None:
        """Return why a request cannot be frozen, or None."""
        if request is None or request.is_finished():
            return f"no request {command.id} runs here"
        params, sampling = self._params[request.request_id], request.sampling_params
        if params.hop != command.hop:
            return f"this is hop {params.hop} of it, not {command.hop}"
        if request.status != RequestStatus.RUNNING:
            return f"it does not decode now ({RequestStatus(request.status).name.lower()})"
        known = request.num_output_tokens
        if known + 1 >= request.max_tokens or request.num_tokens + 1 >= self._max_model_len():
            return "it is about to end"
        structured = request.structured_output_request
        if structured is not None and structured.reasoner is not None:
            return "its grammar waits for the end of its reasoning, which cannot be restored"
        seeded = sampling is not None and sampling.seed is not None
        if seeded and self._restores_runner_state and not current_platform.is_cpu():
            return "its generator cannot be restored on the V1 runner of a GPU"
        return None

    def _unfreeze(self, id: str) -> bool:
        request = self._requests.get(id)
        if request is None:
            return False
        freeze = self._freezes.pop(request.request_id, None)
        if freeze is None:
            return False
        request.max_tokens = freeze.max_tokens
        assert request.kv_transfer_params is not None
        del request.kv_transfer_params[MIGRATION_PARAMS]["frozen"]
        self._reqs_not_processed.add(request.request_id)
        self._reply(freeze.asked, _not_frozen(freeze.asked, "it was unfrozen"))
        return True

    def _take_snapshot(self, asked: Asked, command: TakeSnapshot) -> Reply | None:
        """Keep the full blocks of a request under a name of their own.

        The reply waits until the steps have ended that were in flight without knowing the name:
        a read that comes before the workers know it would be lost.
        """
        request = self._requests.get(command.id)
        if request is None or request.status != RequestStatus.RUNNING:
            return NotFrozen(number=command.number, reason=f"no request {command.id} decodes here")
        written = request.num_computed_tokens - request.num_in_flight_tokens
        full = written // self.block_size
        if full == 0:
            return NotFrozen(number=command.number, reason="it fills no block yet")
        (blocks,) = self._manager.get_blocks(request.request_id).blocks
        kept = list(blocks[:full])
        self._manager.block_pool.touch(kept)
        self._snapshots += 1
        alias = f"{request.request_id}-snapshot-{self._snapshots}"
        self._pinned[alias] = kept
        self._expect_reader(alias)
        deadline = self._keep(alias)
        tokens = full * self.block_size
        params = self._remote_params(alias, [block.block_id for block in kept], tokens, deadline)
        token_ids = list(request.all_token_ids[:tokens])
        snapshot = Snapshot(number=command.number, token_ids=token_ids, params=params)
        self._taken.append((self._step + self._steps_in_flight, asked, snapshot))
        return None

    def _expect_reader(self, name: str) -> None:
        """Let the workers heed a read of blocks under a name, and a lease of them later.

        A request is announced with the step in which it is being frozen, not once it has ended:
        under asynchronous scheduling another step is in flight by then, and a read that comes
        before the workers hear of the request would be lost.
        """
        self._reqs_not_processed.discard(name)
        self._reqs_in_batch.add(name)

    def _keep(self, name: str) -> float:
        """Let the workers keep blocks under a name until they are read or expire."""
        deadline = time.perf_counter() + self._config.time_to_live
        self._reqs_need_send[name] = deadline
        return deadline

    def _remote_params(
        self, name: str, block_ids: list[int], tokens: int, deadline: float
    ) -> dict[str, Any]:
        parallel = self.vllm_config.parallel_config
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(block_ids[: cdiv(tokens, self.block_size)])],
            "remote_engine_id": self.engine_id,
            "remote_request_id": name,
            "remote_host": self.side_channel_host,
            "remote_port": self.side_channel_port,
            "tp_size": self.transfer_tp_size,
            "dcp_size": parallel.decode_context_parallel_size,
            "pp_size": parallel.pipeline_parallel_size,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": deadline,
            "transfer_mode": self._TRANSFER_MODE,
        }

    def _state(self, number: int) -> EngineState:
        if self._manager is None:
            raise ControlError("the engine is still starting")
        pool = self._manager.block_pool
        scheduler = self.vllm_config.scheduler_config
        live = [request.status for request in list(self._live.values())]
        running = sum(status == RequestStatus.RUNNING for status in live)
        return EngineState(
            number=number,
            version=vllm_version,
            block_size=self.block_size,
            max_num_seqs=scheduler.max_num_seqs,
            max_model_len=self._max_model_len(),
            prefix_caching=bool(self._manager.enable_caching),
            num_blocks=pool.num_gpu_blocks - 1,  # block 0 is the null block
            free_blocks=pool.get_num_free_blocks(),
            running=running,
            waiting=len(live) - running,
            frozen=list(self._kept),
        )

    def _max_model_len(self) -> int:
        return int(self.vllm_config.model_config.max_model_len)

    def _reply(self, asked: Asked, reply: Reply) -> None:
        assert self._server is not None
        self._server.reply(asked.peer, reply)


def _not_frozen(asked: Asked, reason: str) -> NotFrozen:
    return NotFrozen(number=asked.command.number, reason=reason)


def _raised_port(endpoint: str, rank: int) -> str:
    """Raise the port of a TCP endpoint by the data-parallel rank."""
    address, _, port = endpoint.rpartition(":")
    return f"{address}:{int(port) + rank}" if rank and port.isdigit() else endpoint
