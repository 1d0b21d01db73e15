"""The worker's side of moving requests: reads that heed expiry, releases, and CPU remedies.

Written against vLLM 0.32.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.distributed.nixl_utils import NixlWrapper
from vllm.platforms import current_platform

from rescheduler.transfer.sampling_state import restores_runner_state, watch_runner
from rescheduler.transfer.vllm_connector_scheduler import RELEASED, TAILS

__all__ = ["MigratingWorker"]

_PROGRESS_DELAY_US = 1000


class MigratingWorker(NixlPullConnectorWorker):  # type: ignore[misc]
    """NIXL's worker for engines that requests move between."""

    def __init__(self, vllm_config: Any, engine_id: str, kv_cache_config: Any) -> None:
        if current_platform.is_cpu():
            with _kept_affinity(), _resting_progress_thread():
                super().__init__(vllm_config, engine_id, kv_cache_config)
        else:
            super().__init__(vllm_config, engine_id, kv_cache_config)
        # Blocks whose lease has run out may hold another request by now. This switch lets reads
        # check the lease; without it they return garbage in silence.
        self._bidirectional_kv_xfer_enabled = True
        self._released: set[str] = set()
        if restores_runner_state(vllm_config):
            from vllm.v1.worker.gpu_model_runner import GPUModelRunner

            watch_runner(GPUModelRunner, TAILS)

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
def _kept_affinity() -> Iterator[None]:
    """Keep the process on its cores: NIXL's worker binds all of it to the last one."""
    before = os.sched_getaffinity(0)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _resting_progress_thread() -> Iterator[None]:
    """Let NIXL's progress thread rest between two looks: it spins, and takes a core."""
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
