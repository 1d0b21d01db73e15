"""What an engine that is none says of itself."""

from typing import Any

from rescheduler.transfer.control_messages import EngineState


def engine_state(**changes: Any) -> EngineState:
    """Return the state of an engine with 1,000 blocks, most of them free."""
    values: dict[str, Any] = {
        "number": 0,
        "version": "0.32.0",
        "model": "m",
        "dtype": "float32",
        "kv_dtype": "auto",
        "kv_groups": True,
        "tensor_parallel": 1,
        "block_size": 16,
        "max_num_seqs": 64,
        "max_model_len": 4096,
        "prefix_caching": True,
        "num_blocks": 1000,
        "free_blocks": 900,
        "running": 2,
        "waiting": 0,
        "frozen": [],
        "failed_loads": 0,
        "incarnation": "a",
        "steps": 1,
    }
    return EngineState(**(values | changes))
