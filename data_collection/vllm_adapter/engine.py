"""vLLM's engine, as a collection drives it."""

import os
from collections.abc import AsyncIterator
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError

__all__ = ["AsyncLLM", "EngineDeadError", "answered_tokens", "start_engine"]

_KV_CACHE_GIB = 4
"""Memory of the KV cache on a CPU, unless VLLM_CPU_KVCACHE_SPACE says otherwise."""


def start_engine(arguments: dict[str, Any]) -> AsyncLLM:
    """Start an engine within a running event loop; on a CPU it is not compiled, unless asked for.

    Raises:
        RuntimeError: it does not start.
        ValueError: it does not take the arguments.
    """
    if current_platform.is_cpu():
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(_KV_CACHE_GIB))
        arguments = {"enforce_eager": True, **arguments}
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


async def answered_tokens(
    engine: AsyncLLM, name: str, prompt: list[int], sampling: dict[str, Any]
) -> AsyncIterator[int]:
    """Serve a request; yield how many tokens of its answers come, as they come."""
    params = SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA, **sampling)
    async for output in engine.generate(TokensPrompt(prompt_token_ids=prompt), params, name):
        yield sum(len(answer.token_ids) for answer in output.outputs)
