"""A KV connector between whose engines requests move while they decode.

Given to vLLM as ``kv_connector_module_path`` ``rescheduler.transfer.vllm_connector`` with the
name ``NixlConnector``, which vLLM's own checks look for.
"""

import logging
import os
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector
from vllm.v1.request import Request

from data_collection.capture.requests import MIGRATION_PARAMS, parse_request_id
from data_collection.vllm_adapter import requests
from data_collection.vllm_adapter.nixl import RELEASED, TAILS, KeepingScheduler, KeepingWorker
from data_collection.vllm_adapter.requests import restore_request, restores_runner_state
from data_collection.vllm_adapter.support import (
    BINDS_CACHE_MANAGER,
    TELLS_CUT_CALLS,
    refuse_other_version,
    refuse_unsupported,
)
from predictor.live.zmq_sockets import raised_port, shared_secret
from rescheduler.transfer import control_messages as messages
from rescheduler.transfer.control_messages import (
    Command,
    ControlError,
    NotFrozen,
    Reply,
    RequestStatus,
)
from rescheduler.transfer.control_server import Asked, ControlServer
from rescheduler.transfer.migration_params import MigrationParams, connector_config, is_signed

logger = logging.getLogger(__name__)

_REMEMBERED_SECONDS = 120.0
"""For which a request that is over may still be on its way here."""
_MOST_REMEMBERED = 4096
_RENEWABLE_SECONDS = 8.0
"""Left of a lease that is renewed: more than the steps in flight take."""


class NixlConnector(NixlPullConnector):  # type: ignore[misc]
    """NIXL's pull connector, whose requests can be frozen, kept, and gone on with elsewhere.

    Raises:
        ValueError: another version of vLLM, or a model or configuration that cannot be served.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        refuse_other_version()
        # Past the parent, which would make vLLM's own two sides.
        super(NixlPullConnector, self).__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = MigratingScheduler(
                vllm_config, self.engine_id, kv_cache_config
            )
        else:
            self.connector_worker = self.make_worker(vllm_config, kv_cache_config)

    def make_worker(self, vllm_config: Any, kv_cache_config: Any) -> KeepingWorker:
        """Return the side of the connector that transfers."""
        return KeepingWorker(vllm_config, self.engine_id, kv_cache_config)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Hand the cache manager on: commands need its blocks."""
        if BINDS_CACHE_MANAGER:
            super().bind_kv_cache_manager(kv_cache_manager)
        self.connector_scheduler.bind(kv_cache_manager)


class _Freeze(NamedTuple):
    """A freeze under way: who waits for it, and the request's cap before it was lowered."""

    asked: Asked
    max_tokens: int


class _Kept(NamedTuple):
    """What is kept of a placement: its hop, the engine's id of it, and until when."""

    hop: int
    name: str
    until: float


class MigratingScheduler(KeepingScheduler):
    """Lets a proxy end a running request here and go on with it at another engine.

    Commands arrive in the control server's thread and are carried out in the scheduler's, when
    it builds the connector's metadata at the end of each step.

    Raises:
        ValueError: an impossible configuration, or a model whose requests cannot move.
    """

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self._config = connector_config(
            vllm_config.kv_transfer_config.kv_connector_extra_config or {}
        )
        self._live: dict[str, Request] = {}  # all, by the engine's id
        self._requests: dict[str, Request] = {}  # those that can move, by migration id
        self._named: Counter[str] = Counter()  # by what the engine's API calls them
        self._incarnation = uuid4().hex
        self._params: dict[str, MigrationParams] = {}
        self._copies: set[str] = set()
        self._freezes: dict[str, _Freeze] = {}
        self._kept: dict[str, _Kept] = {}  # by migration id
        self._renewed: dict[str, float] = {}  # until when, by migration id
        self._renewals: deque[tuple[str, float]] = deque()  # that the workers do not know of
        self._over: dict[str, tuple[int, float]] = {}  # hop and until when, by migration id
        self._snapshots = 0
        self._taken: deque[tuple[int, Asked, messages.Snapshot]] = deque()
        self._steps_in_flight = vllm_config.max_concurrent_batches - 1
        self._step = 0
        self._released: set[str] = set()
        self._restores_runner_state = restores_runner_state(vllm_config)
        self._max_model_len = int(vllm_config.model_config.max_model_len)
        keys = self._config.keys
        self._secret = None if keys is None else shared_secret(keys, "engine")
        file = os.environ.get(messages.DRAINING_FILE)
        self._draining_file = None if file is None else Path(file)
        self._server: ControlServer | None = None
        if self._config.control is not None:
            refuse_unsupported("moves", vllm_config, kv_cache_config.kv_cache_groups)
            rank = vllm_config.parallel_config.data_parallel_index
            self._server = ControlServer(
                raised_port(self._config.control, rank), keys, self._answer
            )

    def shutdown(self) -> None:
        """Close the control socket, then shut down as usual."""
        if self._server is not None:
            self._server.close()
        super().shutdown()

    def on_new_request(self, request: Request) -> None:
        """Remember what a request carries for moving it; ignore what the proxy has not signed."""
        given, name = request.kv_transfer_params, request.request_id
        if given and self._secret is not None and not is_signed(given, self._secret):
            logger.warning("%s: kv_transfer_params without the proxy's signature are ignored", name)
            request.kv_transfer_params = None
        super().on_new_request(request)
        self._live[name] = request
        self._named[parse_request_id(name).external_id] += 1
        carried = requests.migration_entry(request)
        if carried is None:
            return
        try:
            params = msgspec.convert(carried, MigrationParams)
        except msgspec.ValidationError as error:
            key = f"kv_transfer_params.{MIGRATION_PARAMS}"
            logger.error("%s: %s: %s; it cannot move", name, key, error)
            return
        if params.copies:
            self._copies.add(name)
        else:
            self._params[name] = params
            self._requests[params.id] = request

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Count what another engine's decoding has left to pull: all tokens but the last.

        What a pre-copy has left is sooner computed than pulled: a pull takes a step of its own.
        """
        given, name = request.kv_transfer_params or {}, request.request_id
        params = self._params.get(name)
        decoded = name in self._copies or (params is not None and params.generated)
        if given.get("do_remote_prefill") and decoded:
            remote = min(given.get("remote_num_tokens") or 0, request.num_tokens - 1)
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
        if self._live.pop(name, None) is not None:
            self._forget_name(parse_request_id(name).external_id)
        self._copies.discard(name)
        params = self._params.pop(name, None)
        if params is not None and self._requests.get(params.id) is request:
            del self._requests[params.id]
        freeze = self._freezes.pop(name, None)
        if params is not None and self._is_over(params):
            if freeze is not None:
                self._refuse(freeze.asked, "it was released")
            self.forget(name)
            return False, None
        if freeze is None:
            keeps, remote = super().request_finished(request, block_ids)
            if keeps and params is not None:
                self._kept[params.id] = _Kept(params.hop, name, self.kept_until(name))
            return keeps, remote
        assert params is not None
        if not requests.ended_at_its_cap(request):
            self.take_back(name)
            self._refuse(freeze.asked, "it ended by itself")
            return super().request_finished(request, block_ids)
        self._stop_heartbeat(name)
        # Of the last token there is no KV yet.
        tokens = min(request.num_tokens - 1, requests.written_tokens(request))
        deadline = self.keep(name, self._config.time_to_live)
        self._kept[params.id] = _Kept(params.hop, name, deadline)
        remote = self.remote_params(name, block_ids, tokens, deadline)
        frozen = messages.Frozen(
            number=freeze.asked.command.number,
            output_token_ids=list(request.output_token_ids),
            params=remote,
        )
        self._reply(freeze.asked, frozen)
        return True, None

    def _forget_name(self, name: str) -> None:
        self._named[name] -= 1
        if self._named[name] <= 0:
            del self._named[name]

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """Restore the requests that start here, carry out commands, then build as usual."""
        tails = self._restored(scheduler_output.scheduled_new_reqs)
        self._step += 1
        while self._renewals:
            id, until = self._renewals.popleft()
            if id in self._kept:
                self.keep_until(self._kept[id].name, until)
        for asked in self._server.take() if self._server is not None else ():
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
        """Forget what has been read or has expired."""
        super().update_connector_output(connector_output)
        sent = connector_output.finished_sending or ()
        for id, kept in list(self._kept.items()):
            if kept.name in sent:
                del self._kept[id]

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

    def _answer(self, command: Command) -> Reply | None:
        """Answer what needs no scheduler, in the control server's thread."""
        number = command.number
        if isinstance(command, messages.GetState):
            return self._state(number)
        if isinstance(command, messages.Find):
            statuses = list(map(self._status, command.ids))
            return messages.Found(number=number, statuses=statuses, steps=self._step)
        if isinstance(command, messages.Renew):
            return self._renew(command)
        if command.id in self._requests:
            return None
        if isinstance(command, messages.Release):
            if command.id in self._kept:
                return None
            self._remember_over(command)
            return messages.Released(number=number, done=False)
        if isinstance(command, messages.Unfreeze):
            return messages.Unfrozen(number=number, done=False)
        return NotFrozen(number=number, reason=f"no request {command.id} runs here")

    def _status(self, id: str) -> RequestStatus:
        """Return what this engine has of a request, by its migration id or its name."""
        request = self._requests.get(id)
        if request is not None:
            decodes = requests.is_decoding(request)
            return RequestStatus.RUNNING if decodes else RequestStatus.WAITING
        return RequestStatus.RUNNING if id in self._named else RequestStatus.UNKNOWN

    def _renew(self, command: messages.Renew) -> messages.Renewed:
        """Renew leases, in the control server's thread: an idle engine has no steps.

        The workers hear of it with the next step, before they look for leases that have ended.
        Those that end until then, in the steps in flight, are not renewed.
        """
        now, kept = time.perf_counter(), dict(self._kept)
        until, renewed = now + self.lease_seconds, self._renewed
        ids = [
            id
            for id in command.ids
            if id in kept and max(kept[id].until, renewed.get(id, 0.0)) - now > _RENEWABLE_SECONDS
        ]
        self._renewals.extend((id, until) for id in ids)
        self._renewed = {id: renewed[id] for id in renewed if id in kept} | dict.fromkeys(
            ids, until
        )
        seconds = self.lease_seconds
        return messages.Renewed(number=command.number, ids=ids, seconds=seconds, until=until)

    def _carry_out(self, asked: Asked) -> Reply | None:
        """Carry out a command in the scheduler's thread; None: the reply comes later."""
        command = asked.command
        if isinstance(command, messages.Freeze):
            reason = self._freeze(asked, command)
        elif isinstance(command, messages.TakeSnapshot):
            reason = self._take_snapshot(asked, command)
        elif isinstance(command, messages.Unfreeze):
            return messages.Unfrozen(number=command.number, done=self._unfreeze(command.id))
        elif isinstance(command, messages.Release):
            return messages.Released(number=command.number, done=self._release(command))
        else:
            return self._state(command.number)
        return None if reason is None else NotFrozen(number=command.number, reason=reason)

    def _release(self, command: messages.Release) -> bool:
        """Free what is kept; return whether there was anything."""
        self._remember_over(command)
        kept = self._kept.get(command.id)
        if kept is None or kept.hop > command.hop:
            return False
        del self._kept[command.id]
        self._released.add(kept.name)
        return True

    def _remember_over(self, command: messages.Release) -> None:
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

    def _freeze(self, asked: Asked, command: messages.Freeze) -> str | None:
        """End a request after its next token; return why not, or None."""
        request = self._requests.get(command.id)
        if request is None or request.is_finished():
            return f"no request {command.id} runs here"
        name = request.request_id
        hop = self._params[name].hop
        if hop != command.hop:
            return f"this is hop {hop} of it, not {command.hop}"
        reason = requests.why_not_ended(request, self._max_model_len, self._restores_runner_state)
        if reason is not None:
            return reason
        if name in self._freezes:
            return "it is being frozen already"
        self.announce(name)
        self._freezes[name] = _Freeze(asked, requests.end_after_next_token(request))
        return None

    def _unfreeze(self, id: str) -> bool:
        request = self._requests.get(id)
        freeze = self._freezes.pop(request.request_id, None) if request is not None else None
        if request is None or freeze is None:
            return False
        requests.go_on(request, freeze.max_tokens)
        self.take_back(request.request_id)
        self._refuse(freeze.asked, "it was unfrozen")
        return True

    def _take_snapshot(self, asked: Asked, command: messages.TakeSnapshot) -> str | None:
        """Keep the full blocks of a request under a name of their own; return why not, or None.

        The reply waits until the steps have ended that were in flight without knowing the name:
        a read that comes before the workers know it would be lost.
        """
        request = self._requests.get(command.id)
        if request is None or not requests.is_decoding(request):
            return f"no request {command.id} decodes here"
        alias = f"{request.request_id}-snapshot-{self._snapshots + 1}"
        tokens, params = self.keep_full_blocks(request, alias, self._config.time_to_live)
        if tokens == 0:
            return "it fills no block yet, or what its window needs is freed"
        self._snapshots += 1
        token_ids = list(request.all_token_ids[: tokens + 1])
        snapshot = messages.Snapshot(number=command.number, token_ids=token_ids, params=params)
        self._taken.append((self._step + self._steps_in_flight, asked, snapshot))
        return None

    def _state(self, number: int) -> messages.EngineState:
        if self.manager is None:
            raise ControlError("the engine is still starting")
        num_blocks, free_blocks = self.blocks()
        live, layout = list(self._live.values()), self.layout
        running = sum(requests.is_decoding(request) for request in live)
        return messages.EngineState(
            number=number,
            version=layout["version"],
            model=layout["model"],
            dtype=layout["dtype"],
            kv_dtype=layout["kv_dtype"],
            kv_groups=layout["kv_groups"],
            tensor_parallel=self.vllm_config.parallel_config.tensor_parallel_size,
            block_size=layout["block_size"],
            max_num_seqs=self.vllm_config.scheduler_config.max_num_seqs,
            max_model_len=self._max_model_len,
            prefix_caching=bool(self.manager.enable_caching),
            num_blocks=num_blocks,
            free_blocks=free_blocks,
            running=running,
            waiting=len(live) - running,
            frozen=list(self._kept),
            failed_loads=self.failed_loads,
            incarnation=self._incarnation,
            steps=self._step,
            draining=self._draining_file is not None and self._draining_file.exists(),
            parses_again=self._config.parses_again and TELLS_CUT_CALLS,
        )

    def _reply(self, asked: Asked, reply: Reply) -> None:
        assert self._server is not None
        self._server.reply(asked.peer, reply)

    def _refuse(self, asked: Asked, reason: str) -> None:
        self._reply(asked, NotFrozen(number=asked.command.number, reason=reason))
