"""Engines with every part of Headway, for any version of vLLM and any model."""

import asyncio
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from batching_profile import profile_of
from forecast_messages import write_all_reading
from listening import Listener, listener
from move_cases import CASES
from moving import GREEDY, STORY, Engine, Generation, Run, copied_ahead, finish, moved, runner_on
from msgspec.structs import replace
from recorded_requests import wait_until_recorded
from running_deployment import ENGINE, recording

from predictor.training.row_table import RowTable, load_rows
from rescheduler.demo.load import metric_in
from rescheduler.engines.deployment import Deployment, Instance
from rescheduler.engines.launch_engines import launched
from rescheduler.engines.launch_local import local_deployment
from rescheduler.step_time.profile import BatchTime

_NAMES = (
    *("greedy", "seed", "top-p-top-k", "repetition-penalty", "other-penalties"),
    *("seed-and-penalties", "logprobs", "bad-words", "logit-bias"),
)
_LONG = {"prompt": STORY * 8}
"""Shorter ones are sooner computed again than read."""
MOVED = {name: dataclasses.replace(CASES[name], body=CASES[name].body | _LONG) for name in _NAMES}
_TIMES = BatchTime(constant=0.05, per_new=0.001, per_context=1e-6)
_BATCHED_TOKENS, _REQUESTS, _GENERATED = 64, 6, 28
_WHOLE_PROMPTS = ["--max-num-batched-tokens", "512"]
_WHOLE_PROMPTS += ["--scheduler-cls", "predictor.live.vllm_scheduler.LiveHeadwayScheduler"]
"""Of engines between which requests move: part of a seeded prompt ends vLLM's on a CPU."""


@dataclass(frozen=True)
class PartsEngines:
    """One engine that records, forecasts and forms batches, and two that requests move between."""

    deployment: Deployment
    folder: Path
    heard: Listener

    @property
    def checkpoint(self) -> Path:
        return self.folder / "predictor"

    def on_both(self) -> Run:
        """Return what runs a coroutine on the two engines between which requests move."""
        return runner_on(self.deployment.decode[1:])

    def printed(self) -> str:
        return "".join(log.read_text() for log in sorted((self.folder / "logs").iterdir()))

    def recorded(self) -> RowTable:
        """Return rows of prompts in parts, in batches formed by deadlines, with preemption."""

        async def work(engine: list[Engine]) -> str:
            async def generate(i: int) -> Generation:
                prompt = [(1000 + 37 * i + 11 * j) % 20_000 for j in range(150)]
                body = {"prompt": prompt, "max_tokens": _GENERATED, "temperature": 0}
                return await moved(engine, body | {"ignore_eos": True}, [])

            answers = await asyncio.gather(*map(generate, range(_REQUESTS)))
            assert all(len(one.tokens) == _GENERATED for one in answers)
            async with engine[0].session.get(engine[0].url + "/metrics") as response:
                return await response.text()

        first = self.deployment.decode[0]
        if first.control is None:  # Mamba's state takes no more room as a request goes on
            asyncio.run(_alone(first, work))
        else:
            metrics = runner_on([first])(work)
            assert metric_in(metrics, "vllm:num_preemptions_total") > 0
        dataset = self.folder / "decode-0-dataset"
        wait_until_recorded(dataset, _REQUESTS)
        return load_rows(dataset)

    def read_by_a_move(self) -> float:
        """Move a request of a prompt that is cached nowhere; return how much of it was read.

        As a share of its context.
        """
        source = "external_kv_transfer"

        async def work(both: list[Engine]) -> float:
            for number in range(20):  # on a busy machine a request may end before it is frozen
                before = await both[1].prompt_tokens()
                body = GREEDY | {"prompt": f"Number {number}. " + STORY * 8}
                generation = await moved(both, body, [12])
                after = await both[1].prompt_tokens()
                if generation.hops == 1:
                    context = len(generation.prompt) + generation.cut_at[0]
                    return (after[source] - before.get(source, 0)) / context
            raise AssertionError("the request ended before each of its moves")

        read: float = self.on_both()(work)
        return read

    def handed_over(self, tokens: int) -> tuple[Generation, Generation]:
        """Generate from a prompt of so many tokens, and where another engine has prefilled it."""
        body = {"prompt": [1000 + 13 * i % 20_000 for i in range(tokens)], "max_tokens": 8}
        body |= {"temperature": 0, "logprobs": 1, "ignore_eos": True}
        remote = {"do_remote_decode": True, "do_remote_prefill": False}
        prefill = body | {"model": "smollm2", "max_tokens": 1, "kv_transfer_params": remote}

        async def work(both: list[Engine]) -> tuple[Generation, Generation]:
            url = f"{both[0].url}/v1/completions"
            async with both[0].session.post(url, json=prefill) as response:
                assert response.status == 200, await response.text()
                params = (await response.json())["kv_transfer_params"]
            read = Generation()
            await finish(both[1], body, read, params, 0)
            return await moved(both[:1], body, []), read

        found: tuple[Generation, Generation] = self.on_both()(work)
        return found

    def cached_by_a_copy(self) -> float:
        """Move a request of which a copy was made; return how much of the copy was used.

        The tokens are those of a request that stays.
        """
        used = "local_cache_hit"

        async def work(both: list[Engine]) -> float:
            body = GREEDY | {"prompt": "A copy. " + STORY * 8, "max_tokens": 150}
            body, generation, copied, frozen, before = await copied_ahead(*both, body)
            body["max_tokens"] = len(generation.tokens) + 20
            await finish(both[1], body, generation, frozen.params, 1)
            after = await both[1].prompt_tokens()
            assert generation.tokens == (await moved(both, body, [])).tokens
            return (after[used] - before.get(used, 0)) / copied

        cached: float = self.on_both()(work)
        return cached


@contextmanager
def parts_engines(
    model: Path, folder: Path, flags: Sequence[str] = (), moves: bool = True, kv_blocks: int = 24
) -> Iterator[PartsEngines]:
    """Run engines of a model, which write into a folder, with the flags that it needs.

    If its requests cannot move, only the first engine runs, without a control socket.
    """
    options = replace(
        ENGINE,
        checkpoint=str(write_all_reading(folder / "predictor", model)),
        max_model_len=512,
        kv_blocks=kv_blocks,
        k=1,
        batching={
            "profile": str(profile_of(model, folder / "profile.yaml", _TIMES)),
            "recalibrate": False,
        },
        arguments=["--max-num-batched-tokens", str(_BATCHED_TOKENS), *flags],
    )
    with listener() as heard:
        described = local_deployment(
            str(model), options, 3 if moves else 1, 0, routing={"name": "pab"}
        )
        first, *others = described.instances
        if not moves:
            first = replace(first, control=None)
            described = replace(described, instances=[first])
        dataset = folder / f"{first.name}-dataset"
        arguments = recording(described, first, dataset, heard.endpoint)
        first = replace(first, arguments=arguments)
        instances = [first, *(replace(one, arguments=_WHOLE_PROMPTS) for one in others)]
        deployment = replace(described, instances=instances, served_model_name="smollm2")
        with launched(deployment, folder / "logs"):
            yield PartsEngines(deployment, folder, heard)


async def _alone(instance: Instance, work: Any) -> Any:
    """Run a coroutine on an engine that has no control socket."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as session:
        engine: Any = Engine(instance.url, None, session)  # type: ignore[arg-type]
        return await work([engine])
