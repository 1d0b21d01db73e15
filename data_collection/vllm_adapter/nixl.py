"""The two sides of vLLM's NIXL connector, with what requests need that move while they decode."""

import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from vllm import __version__ as vllm_version
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import (
    NixlPullConnectorScheduler,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.nixl_utils import NixlWrapper
from vllm.platforms import current_platform
from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import Request

from data_collection.capture.requests import LEASE_SECONDS
from data_collection.vllm_adapter.requests import (
    restores_runner_state,
    watch_runner,
    written_tokens,
)
from data_collection.vllm_adapter.support import REPORTS_FAILED_READS

logger = logging.getLogger(__name__)

LAYOUT = "headway_layout"
"""Entry of ``kv_transfer_params``: the layout of the blocks that are to be read."""
RELEASED = "headway_released"
"""Attribute of the connector's metadata: ids whose blocks the workers shall let go."""
TAILS = "headway_tails"
"""Attribute of the connector's metadata: id -> tokens generated elsewhere."""

_PROGRESS_DELAY_US = 1000
_LONGEST_VALUE = 100


class KeepingScheduler(NixlPullConnectorScheduler):  # type: ignore[misc]
    """NIXL's scheduler side, which can keep blocks under any name for another engine to pull.

    Attributes:
        manager: of the KV cache; None before it is bound.
        layout: what an engine must have in common with this one to read its KV cache.
        failed_loads: reads of another engine's KV cache that failed or could not be begun, or for
            which blocks had been freed here, so that it was computed again.
    """

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, engine_id, kv_cache_config)
        self.failed_loads = 0
        self.layout = _layout(vllm_config, kv_cache_config)
        self.manager: Any = None
        self._windows = [
            group.kv_cache_spec.sliding_window
            if isinstance(group.kv_cache_spec, SlidingWindowSpec)
            else None
            for group in kv_cache_config.kv_cache_groups
        ]
        self._pinned: dict[str, tuple[str, list[Any]]] = {}

    @property
    def copied(self) -> set[str]:
        """Running requests whose full blocks are kept: none of these is freed if they go."""
        return {name for name, _ in self._pinned.values()}

    def bind(self, manager: Any) -> None:
        """Learn of the cache manager, which is made after the connector.

        Of a prompt that was read whole vLLM computes the last token again. It looks back to one
        token more than the next one does: windows are kept that much longer.
        """
        self.manager = manager
        for group in manager.coordinator.single_type_managers:
            if isinstance(group, SlidingWindowManager):
                group.extra_retained_tokens = max(1, group.extra_retained_tokens)

    def on_new_request(self, request: Request) -> None:
        """Have a request computed here whose KV cache, elsewhere, has another layout.

        NIXL would read it: of another block size it makes garbage in silence.
        """
        given = request.kv_transfer_params
        unlike = _unlike(self.layout, given) if given and given.get("do_remote_prefill") else ""
        if given and unlike:
            given["do_remote_prefill"] = False
            self.failed_loads += 1
            logger.error(
                "%s: computed again, since its KV cache has %s", request.request_id, unlike
            )
        super().on_new_request(request)

    def update_connector_output(self, connector_output: Any) -> None:
        """Free copies that have been read or have expired; vLLM knows of requests only."""
        super().update_connector_output(connector_output)
        if REPORTS_FAILED_READS:
            self.failed_loads += len(connector_output.failed_recving)
        else:
            self.failed_loads += bool(connector_output.invalid_block_ids)
        for name in list(connector_output.finished_sending or ()):
            if name in self._pinned:
                connector_output.finished_sending.discard(name)
                _, blocks = self._pinned.pop(name)
                self.manager.block_pool.free_blocks(reversed(blocks))

    def has_pending_push_work(self) -> bool:
        """Keep the engine stepping while a copy is kept: it is freed in a step."""
        return bool(self._pinned)

    def announce(self, name: str) -> None:
        """Let the workers heed a read of blocks under a name, and a lease of them later.

        A request is announced with the step in which it is being frozen, not once it has ended:
        under asynchronous scheduling another step is in flight by then, and a read that comes
        before the workers hear of the request would be lost.
        """
        self._reqs_not_processed.discard(name)
        self._reqs_in_batch.add(name)

    def take_back(self, name: str) -> None:
        """Let the workers forget what was announced."""
        self._reqs_not_processed.add(name)

    def keep(self, name: str, seconds: float) -> float:
        """Let the workers keep blocks under a name until they are read or expire; return when."""
        deadline = time.perf_counter() + seconds
        self.keep_until(name, deadline)
        return deadline

    def keep_until(self, name: str, deadline: float) -> None:
        """Let the workers keep blocks under a name until a time, unless they are read before."""
        self._reqs_need_send[name] = deadline

    def kept_until(self, name: str) -> float:
        """Return until when the workers keep the blocks of a request that has just ended."""
        return float(self._reqs_need_send[name])

    @property
    def lease_seconds(self) -> float:
        """Return for how long the blocks of a prefill are kept."""
        return float(self._kv_lease_duration)

    def request_finished(
        self, request: Request, block_ids: Any
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep a prefill's blocks as usual; tell their reader until when, and their layout.

        The proxy is told how long that is. vLLM tells its reader no deadline: it would read
        whatever is there then.
        """
        keeps, remote = super().request_finished(request, block_ids)
        if keeps and remote is not None:
            remote[LAYOUT] = self.layout
            remote["remote_blocks_expiry_time"] = self._reqs_need_send[request.request_id]
            remote[LEASE_SECONDS] = self.lease_seconds
        return keeps, remote

    def forget(self, name: str) -> None:
        """Keep nothing of a request that has ended."""
        self.take_back(name)
        self._reqs_need_save.pop(name, None)
        self._stop_heartbeat(name)

    def keep_full_blocks(self, request: Request, alias: str, seconds: float) -> tuple[int, Any]:
        """Keep the full blocks of a running request under a name of their own.

        Returns:
            Tokens in those blocks, 0 if they cannot be kept, and what a request for them carries.
        """
        tokens = written_tokens(request) // self.block_size * self.block_size
        held = self.manager.get_blocks(request.request_id).blocks
        kept = self._blocks_to_pull(held, tokens)
        if not tokens or any(block.is_null for group in kept for block in group):
            return 0, None
        every = [block for group in kept for block in group]
        self.manager.block_pool.touch(every)
        self._pinned[alias] = request.request_id, every
        self.announce(alias)
        deadline = self.keep(alias, seconds)
        block_ids = [[block.block_id for block in group] for group in kept]
        return tokens, self._pull_params(alias, block_ids, tokens, deadline)

    def remote_params(
        self, name: str, block_ids: Any, tokens: int, deadline: float
    ) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` of a request that pulls these blocks.

        Args:
            name: under which they are kept.
            block_ids: of each group, of the whole request.
            tokens: in them.
            deadline: until when they are kept.
        """
        read = self._blocks_to_pull(block_ids, tokens)
        null = self.manager.block_pool.null_block.block_id
        if any(null in group for group in read):  # freed: all is computed again
            self.failed_loads += 1
            tokens = 0
        return self._pull_params(name, read, tokens, deadline)

    def _blocks_to_pull(self, blocks: Any, tokens: int) -> list[list[Any]]:
        """Return the blocks of each group of which another engine that has these tokens has need.

        Of a sliding window these are the ones to which the last token looks back: others have
        been freed, and will not be allocated there.
        """
        read = []
        for group, window in zip(blocks, self._windows, strict=True):
            start = 0 if window is None else max(0, tokens - window) // self.block_size
            read.append(list(group[start : cdiv(tokens, self.block_size)]))
        return read

    def _pull_params(
        self, name: str, block_ids: list[list[int]], tokens: int, deadline: float
    ) -> dict[str, Any]:
        parallel = self.vllm_config.parallel_config
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": block_ids,
            "remote_engine_id": self.engine_id,
            "remote_request_id": name,
            "remote_host": self.side_channel_host,
            "remote_port": self.side_channel_port,
            "tp_size": getattr(self, "transfer_tp_size", parallel.tensor_parallel_size),  # 0.30
            "dcp_size": parallel.decode_context_parallel_size,
            "pp_size": parallel.pipeline_parallel_size,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": deadline,
            "transfer_mode": self._TRANSFER_MODE,
            LAYOUT: self.layout,
        }
        if hasattr(self, "_registration_generation"):  # since 0.33
            params["remote_registration_generation"] = self._registration_generation
        return params

    def blocks(self) -> tuple[int, int]:
        """Return the blocks that requests can have, and those that none has, of each group.

        Groups share one pool, and a request has as many blocks of each, but for windows.
        """
        pool, groups = self.manager.block_pool, len(self._windows)
        # Block 0 is the null block.
        return (pool.num_gpu_blocks - 1) // groups, pool.get_num_free_blocks() // groups


def _layout(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """Return what two engines must have in common to read each other's KV cache."""
    model = vllm_config.model_config
    return {
        "version": vllm_version,
        "model": f"{model.model}@{model.revision}" if model.revision else str(model.model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_dtype": str(vllm_config.cache_config.cache_dtype),
        "kv_groups": not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager,
        "block_size": vllm_config.cache_config.block_size,
        "layers": [len(group.layer_names) for group in kv_cache_config.kv_cache_groups],
    }


def _unlike(layout: dict[str, Any], given: dict[str, Any]) -> str:
    """Return in words how the layout of another engine's blocks differs; empty: it does not.

    An engine of another version of Headway may not say all of it.
    """
    theirs = given.get(LAYOUT, {})
    if not isinstance(theirs, dict):
        return "an unreadable layout"
    return ", ".join(
        f"{name} {str(theirs[name])[:_LONGEST_VALUE]} and not {mine}"
        for name, mine in layout.items()
        if theirs.get(name, mine) != mine
    )


class KeepingWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """NIXL's worker side, whose reads heed expiry, and which lets go what is released."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        with _sharing_cores() if current_platform.is_cpu() else nullcontext():
            super().__init__(vllm_config, engine_id, kv_cache_config)
        # Blocks whose lease has run out may hold another request by now. This switch lets reads
        # check the lease; without it they return garbage in silence.
        self._bidirectional_kv_xfer_enabled = True
        self._released: set[str] = set()
        if restores_runner_state(vllm_config):
            watch_runner(TAILS)

    def start_load_kv(self, metadata: Any) -> None:
        """Start reads as usual, and note what need not be kept any more."""
        super().start_load_kv(metadata)
        self._released |= getattr(metadata, RELEASED, set())

    def _get_new_notifs(self) -> set[str]:
        """Return what has been read, or released."""
        done: set[str] = super()._get_new_notifs()
        for name in self._released:
            if name in self._reqs_to_send:
                del self._reqs_to_send[name]
                self._reqs_to_process.discard(name)
                done.add(name)
        self._released.clear()
        return done


@contextmanager
def _sharing_cores() -> Iterator[None]:
    """Leave the cores to the engine while NIXL's worker is made.

    It binds the whole process to the last core, and its progress thread spins: here it rests
    between two looks.
    """
    before = os.sched_getaffinity(0)
    bindings = sys.modules[NixlWrapper.__module__].nixlBind
    original = bindings.nixlAgent

    def agent(name: str, config: Any) -> Any:
        config.pthrDelay = _PROGRESS_DELAY_US
        return original(name, config)

    bindings.nixlAgent = agent
    try:
        yield
    finally:
        bindings.nixlAgent = original
        os.sched_setaffinity(0, before)
