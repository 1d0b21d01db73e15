"""Which blocks of a sliding window another engine reads, by vLLM's own rules of the window."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from vllm.utils.math_utils import cdiv
from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

from data_collection.vllm_adapter.nixl import KeepingScheduler

BLOCK, NULL = 16, 0


def scheduler(window: int) -> Any:
    """A connector of a model with whole attention beside a window, without an engine."""
    made: Any = object.__new__(KeepingScheduler)
    made._windows = [None, window]
    made.block_size = BLOCK
    made.failed_loads = 0
    made.manager = SimpleNamespace(
        block_pool=SimpleNamespace(null_block=SimpleNamespace(block_id=NULL))
    )
    parallel = SimpleNamespace(
        tensor_parallel_size=1, decode_context_parallel_size=1, pipeline_parallel_size=1
    )
    made.vllm_config = SimpleNamespace(parallel_config=parallel)
    made.layout = {"block_size": BLOCK}
    made.engine_id = "a"
    made.side_channel_host = "127.0.0.1"
    made.side_channel_port = 1
    return made


def first_kept(window: int, computed: int) -> int:
    """The first block of a window that vLLM has not freed, or does not allocate."""
    manager: Any = object.__new__(SlidingWindowManager)
    manager.sliding_window, manager.extra_retained_tokens = window, 1
    skipped: int = manager.get_num_skipped_tokens(computed)
    return skipped // BLOCK


def held(window: int, computed: int) -> list[list[int]]:
    """Block ids of a request's groups, as the scheduler has them."""
    number = cdiv(computed + 1, BLOCK)
    freed = first_kept(window, computed)
    windows = [NULL] * freed + [1000 + i for i in range(freed, number)]
    return [[100 + i for i in range(number)], windows]


@given(window=st.integers(2, 200), tokens=st.integers(1, 600))
def test_a_frozen_request_offers_what_its_reader_allocates(window: int, tokens: int) -> None:
    """Its last token is of the step before: one token less was computed when blocks were freed."""
    made = scheduler(window)
    offered = made.remote_params("x", held(window, max(0, tokens - 1)), tokens, 0.0)
    whole, windows = offered["remote_block_ids"]
    number = cdiv(tokens, BLOCK)
    assert offered["remote_num_tokens"] == tokens and made.failed_loads == 0
    assert whole == [100 + i for i in range(number)]
    assert windows == [1000 + i for i in range(first_kept(window, tokens), number)]


@given(window=st.integers(2, 200), tokens=st.integers(1, 600), later=st.integers(0, 100))
def test_no_freed_block_is_ever_offered(window: int, tokens: int, later: int) -> None:
    made = scheduler(window)
    offered = made.remote_params("x", held(window, tokens + later), tokens, 0.0)
    freed = any(NULL in group for group in offered["remote_block_ids"])
    assert offered["remote_num_tokens"] == (0 if freed else tokens)
    assert made.failed_loads == freed
