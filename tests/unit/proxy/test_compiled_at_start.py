"""What numba compiles is compiled before the first request."""

import gc
from typing import Any

import pytest
from numba.core.dispatcher import Dispatcher
from scripted_cluster import PROMPT, cluster
from tokenizers import Tokenizer

from predictor.past import length_memory
from rescheduler.engines.launch_local import free_ports
from rescheduler.openai.openai_request import CHAT, COMPLETIONS

CHECKPOINT = "checkpoints/smollm2-135m-instruct-prompt"
ASKED = {"model": "m", "max_tokens": 6}


def compiled() -> dict[str, int]:
    """Return how many kinds of arguments each function is compiled for."""
    functions = [one for one in gc.get_objects() if issubclass(type(one), Dispatcher)]
    return {
        f"{one.py_func.__module__}.{one.py_func.__qualname__}": len(one.signatures)
        for one in functions
    }


@pytest.mark.parametrize(
    "options",
    [
        {"order": {"name": "boost", "fairness": 1.0}},
        {"order": {"name": "boost", "fairness": 1.0}, "prompt_checkpoint": CHECKPOINT},
        {"order": {"name": "shortest"}, "routing": {"name": "headroom"}},
        {"order": {"name": "fcfs"}, "routing": {"name": "bfio"}},
        {"order": {"name": "boost"}, "migration": {"name": "survival"}},
    ],
    ids=["past", "prompt", "headroom", "bfio", "survival"],
)
async def test_no_request_waits_for_a_compiler(
    tokenizer: Tokenizer, options: dict[str, Any]
) -> None:
    published = {f"decode-{i}": f"tcp://127.0.0.1:{port}" for i, port in enumerate(free_ports(2))}
    async with cluster(tokenizer, 2, telemetry=published, **options) as it:
        before = compiled()
        message = {"role": "user", "content": PROMPT}
        for stream in (False, True):
            prompts = {COMPLETIONS: {"prompt": PROMPT}, CHAT: {"messages": [message]}}
            for path, prompt in prompts.items():
                body = {**ASKED, **prompt, "stream": stream}
                async with it.session.post(it.url + path, json=body) as response:
                    assert response.status == 200
                    await response.read()
        promised = {**ASKED, "prompt": "1 2 3 " * 500, "finish_in_s": 60, "finish_level": 0.9}
        assert (await it.post(promised))[0] in (200, 400)
        after = compiled()
    assert {name: count for name, count in after.items() if count > before.get(name, 0)} == {}
    assert after[f"{length_memory.__name__}.walk"] <= 1, "prompts' keys are of one kind"
