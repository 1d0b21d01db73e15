"""The KV connector of an emulated engine, whose transfers take as long as the emulated ones.

Given to vLLM as ``kv_connector_module_path`` ``rescheduler.emulation.vllm_connector``.
"""

import time
from typing import Any

from data_collection.vllm_adapter.nixl import KeepingWorker
from rescheduler.emulation.emulate_options import KVTransfer, read_emulate_config
from rescheduler.transfer import vllm_connector


class NixlConnector(vllm_connector.NixlConnector):
    """Headway's connector, with an emulated network."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        emulated = read_emulate_config(vllm_config.additional_config)
        worker = self.connector_worker
        if isinstance(worker, PacedWorker) and emulated.transfer is not None:
            worker.emulate(emulated.transfer, emulated.dilation)

    def make_worker(self, vllm_config: Any, kv_cache_config: Any) -> KeepingWorker:
        """Return the side of the connector that transfers."""
        return PacedWorker(vllm_config, self.engine_id, kv_cache_config)


class PacedWorker(KeepingWorker):
    """Reports what has been read once the emulated bytes would have arrived.

    Transfers to an engine queue: its network card is theirs one after the other.
    """

    _transfer: KVTransfer | None = None
    _dilation = 1.0

    def emulate(self, transfer: KVTransfer, dilation: float) -> None:
        """Begin to emulate a network."""
        self._transfer, self._dilation = transfer, dilation
        self._free_at = 0.0
        self._due: dict[str, float] = {}
        self._held: set[str] = set()

    def start_load_kv(self, metadata: Any) -> None:
        """Start reads as usual, and note when each would be over."""
        if self._transfer is not None:
            now = time.perf_counter()
            for name, read in metadata.reqs_to_recv.items():
                if not read.awaiting_kvs and not any(read.local_block_ids):
                    continue  # it is all here already, or has been aborted
                groups = [len(group) for group in read.local_block_ids]
                blocks = sum(groups) // max(1, len(groups))  # each of a part of the layers
                seconds = self._dilation * self._transfer.seconds(blocks * self.block_size)
                self._free_at = max(self._free_at, now) + seconds
                self._due[name] = self._free_at
        super().start_load_kv(metadata)

    def get_transfer_results(self) -> Any:
        """Return what is over, both here and where it is emulated."""
        results = super().get_transfer_results()
        if self._transfer is None:
            return results
        received = results.finished_recving
        self._held |= received
        now = time.perf_counter()
        failed = set(results.failed_recving or ())
        ready = {name for name in self._held if name in failed or self._due.get(name, 0.0) <= now}
        self._held -= ready
        for name in ready | failed:
            self._due.pop(name, None)
        received.clear()
        received |= ready
        return results
