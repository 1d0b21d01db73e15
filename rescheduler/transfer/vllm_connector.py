"""A KV connector between which requests move while they decode.

Given to vLLM as ``kv_connector_module_path`` ``rescheduler.transfer.vllm_connector`` with the
name ``NixlConnector``, which vLLM's own checks look for.
"""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import NixlPullConnector

from data_collection.versions import SUPPORTED_VLLM, vllm_version
from rescheduler.transfer.vllm_connector_scheduler import MigratingScheduler
from rescheduler.transfer.vllm_connector_worker import MigratingWorker

__all__ = ["NixlConnector"]


class NixlConnector(NixlPullConnector):  # type: ignore[misc]
    """NIXL's pull connector, whose requests can be frozen, kept, and gone on with elsewhere.

    Raises:
        ValueError: another version of vLLM, or a model or configuration that cannot be served.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        found = vllm_version() or "unknown"
        if not found.startswith(SUPPORTED_VLLM):
            raise ValueError(
                f"migration knows the inside of vLLM {SUPPORTED_VLLM}x, not of {found}"
            )
        # Past the parent, which would make vLLM's own two sides.
        super(NixlPullConnector, self).__init__(vllm_config, role, kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self.connector_scheduler = MigratingScheduler(
                vllm_config, self.engine_id, kv_cache_config
            )
        else:
            self.connector_worker = MigratingWorker(vllm_config, self.engine_id, kv_cache_config)

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Hand the cache manager on: commands need its blocks."""
        super().bind_kv_cache_manager(kv_cache_manager)
        self.connector_scheduler.bind(kv_cache_manager)
