"""`headway profile`: how long an engine's steps take, in a file that other verbs read."""

import asyncio
import json
import secrets
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import matplotlib
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace
from tqdm import tqdm

from data_collection.files import replace_file
from data_collection.models import config_file, resolve_model
from rescheduler.commands.event_loop import ending_signals_raised
from rescheduler.engines.deployment import EngineOptions
from rescheduler.engines.engine_command import check_versions, cpu_interpreter, lone_engine_command
from rescheduler.engines.launch_local import free_ports
from rescheduler.engines.launch_process import ServerGroup, ServerProcess
from rescheduler.engines.launch_progress import LaunchProgress
from rescheduler.step_time.profile import (
    EngineDescription,
    Profile,
    fit_batch_time,
    fit_gradients,
    fit_quality,
    read_engine,
    read_steps,
    typical_steps,
    write_profile,
)

_DECODED = 10
_SHORTEST = 8
_REPEATS = 3
_TOKENS = 10_000
"""Prompts' token ids are below; every model's vocabulary is larger."""
_LONGEST_SECONDS = 600.0


@dataclass(frozen=True)
class Cell:
    """Requests that are sent at once.

    Attributes:
        requests: how many.
        prompt_tokens: of each.
        output_tokens: of each.
        late_prompt_tokens: of one more request, sent while the others decode; 0 for none.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    late_prompt_tokens: int = 0


def grid(engine: EngineDescription, points: int = 5) -> list[Cell]:
    """Return what an engine is driven through: prompts alone, decodes alone, both together.

    Sizes are spread geometrically, from a prompt of 8 tokens to the longest context, and from
    one request to as many as the engine runs at a time.
    """
    longest = engine.max_model_len - _DECODED - 1
    lengths = np.unique(np.geomspace(_SHORTEST, longest, points).astype(int)).tolist()
    batches = np.unique(np.geomspace(1, engine.max_num_seqs, points).astype(int)).tolist()
    cells = [Cell(1, length, 1) for length in lengths] * _REPEATS
    for batch in batches:
        cells += [Cell(batch, length, _DECODED) for length in lengths]
        if batch < engine.max_num_seqs:
            cells += [Cell(batch, lengths[1], 2 * _DECODED, length) for length in lengths[1:]]
    return cells


async def drive(url: str, cells: Sequence[Cell], seed: int) -> AsyncIterator[Cell]:
    """Send the cells' requests, one cell after another; yield each cell when it is answered.

    Prompts are random tokens, so that nothing of them is cached.

    Raises:
        ValueError: no server is there, or it rejected a request.
    """
    generator = np.random.default_rng(seed)
    limit = aiohttp.ClientTimeout(total=_LONGEST_SECONDS)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    try:
        async with aiohttp.ClientSession(timeout=limit, connector=connector) as session:
            async with session.get(f"{url}/v1/models") as response:
                response.raise_for_status()
                model = (await response.json())["data"][0]["id"]
            for cell in cells:
                await _send(session, url, model, cell, generator)
                yield cell
    except (aiohttp.ClientError, TimeoutError) as error:
        raise ValueError(f"{url}: {error or type(error).__name__}") from error


async def _send(
    session: aiohttp.ClientSession, url: str, model: str, cell: Cell, generator: np.random.Generator
) -> None:
    """Send a cell's requests, and wait for all answers."""
    first_token = asyncio.Event()

    async def ask(prompt_tokens: int, output_tokens: int) -> None:
        body = {
            "model": model,
            "prompt": generator.integers(1000, _TOKENS, prompt_tokens).tolist(),
            "max_tokens": output_tokens,
            "min_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
        }
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status != 200:
                text = (await response.text())[:500]
                raise ValueError(f"{url} rejected a request: {response.status} {text}")
            async for _ in response.content:
                first_token.set()

    async def ask_later() -> None:
        await first_token.wait()
        await ask(cell.late_prompt_tokens, 1)

    asking = [ask(cell.prompt_tokens, cell.output_tokens) for _ in range(cell.requests)]
    # The first of several failures is raised as it is.
    await asyncio.gather(*asking, *([ask_later()] if cell.late_prompt_tokens else []))


def draw_profile(profile: Profile, steps: npt.NDArray[np.float64], out: Path) -> None:
    """Draw estimated over measured seconds, and the errors, of steps [n, 3] as a PNG."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    new, context, seconds = steps.T
    batch = profile.batch
    estimate = batch.constant + batch.per_new * new + batch.per_context * context
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    decodes = new <= profile.engine.max_num_seqs
    for kind, name in ((decodes, "decode"), (~decodes, "with a prompt")):
        left.loglog(1e3 * seconds[kind], 1e3 * estimate[kind], ".", label=name, alpha=0.6)
        right.semilogx(
            1e3 * seconds[kind], 100 * (estimate / seconds - 1)[kind], ".", label=name, alpha=0.6
        )
    ends = 1e3 * np.array([seconds.min(), seconds.max()])
    left.plot(ends, ends, "k-", linewidth=0.8)
    right.axhline(0.0, color="k", linewidth=0.8)
    left.set(xlabel="measured, ms", ylabel="a + b·new + c·context, ms")
    right.set(xlabel="measured, ms", ylabel="error, %")
    left.legend()
    engine = profile.engine
    figure.suptitle(f"{engine.model}, {engine.dtype}, {engine.machine}: seconds of a step")
    with replace_file(out) as temporary:
        figure.savefig(temporary, format="png", dpi=110)
    pyplot.close(figure)


FloatArray = npt.NDArray[np.float64]

_ENGINE = "engine"
_SCHEDULER = "rescheduler.batching.vllm_scheduler.FairBatchingScheduler"
_POINTS, _QUICK_POINTS = 6, 3


def profile(
    out: Path,
    model: str = "smollm2",
    dtype: str = "auto",
    max_model_len: int | None = None,
    max_num_seqs: int = 16,
    max_num_batched_tokens: int = 2048,
    kv_cache_gb: int = 1,
    threads: int = 1,
    enforce_eager: bool | None = None,
    arguments: list[str] | None = None,
    url: str | None = None,
    steps: Path | None = None,
    quick: bool = False,
) -> None:
    """Measure the steps of an engine over a grid of new tokens and context, and fit them.

    Starts an engine on this machine, or drives one that runs: give its `url` and the `steps`
    file that it writes. Writes `profile.yaml`, `steps.csv` and `profile.png` into `out`; the
    scheduler, `headway simulate` and the migration planners read `profile.yaml`.

    Args:
        out: folder to write to.
        model: an embedded model's name, a folder, or a Hugging Face id.
        dtype: Type of the weights and the KV cache.
        max_model_len: longest context in tokens.
        max_num_seqs: most requests that the engine runs at a time.
        max_num_batched_tokens: most tokens in a step.
        kv_cache_gb: memory of the KV cache on a CPU, GiB.
        threads: CPU threads of the engine.
        enforce_eager: Neither compile nor record CUDA graphs. If not set, only on a CPU, where
            compiling takes minutes. The profile belongs to engines with the same setting.
        arguments: further flags of `vllm serve`, such as
            `["--load-format", "dummy"]` for weights that are drawn, not loaded.
        url: Measure this running server, instead of starting one.
        steps: file that this server writes its steps to (`headway.batching.steps`).
        quick: a coarse grid.

    Raises:
        ValueError: the server does not answer or writes no steps, or only one of `url` and `steps`
            is given.
        LaunchError: the engine does not start.
    """
    if (url is None) != (steps is None):
        raise ValueError("give both --url and --steps: a server, and the file of its steps")
    if url is None:
        config_file(resolve_model(model))
    out.mkdir(parents=True, exist_ok=True)
    points = _QUICK_POINTS if quick else _POINTS
    options = EngineOptions(
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        kv_cache_gb=kv_cache_gb,
        threads=threads,
        enforce_eager=cpu_interpreter() is not None if enforce_eager is None else enforce_eager,
        arguments=["--max-num-batched-tokens", str(max_num_batched_tokens), *(arguments or [])],
    )
    with ExitStack() as stack:
        if url is None or steps is None:
            steps, start = out / "steps.csv", 0
            url = stack.enter_context(profiled_engine(model, options, steps, out))
        else:
            start = steps.stat().st_size
        engine = read_engine(steps)
        asyncio.run(_drive(url, engine, points))
        measured = read_steps(steps, start)
    found = fitted_profile(engine, measured)
    write_profile(found, out / "profile.yaml")
    draw_profile(found, typical_steps(measured), out / "profile.png")
    print(_summary(found, out))


def fitted_profile(engine: EngineDescription, measured: FloatArray) -> Profile:
    """Return the profile of an engine whose steps [n, 3] were measured."""
    steps = typical_steps(measured[measured[:, 0] > 0])
    batch = fit_batch_time(steps)
    return Profile(
        engine=engine,
        batch=batch,
        gradients=fit_gradients(steps, engine.max_num_seqs),
        quality=fit_quality(steps, batch),
    )


@contextmanager
def profiled_engine(model: str, options: EngineOptions, steps: Path, logs: Path) -> Iterator[str]:
    """Run an engine that orders its work as vLLM does and writes its steps; yield its URL.

    Raises:
        LaunchError: vLLM is missing or of another version, or the engine does not start.
    """
    check_versions(moves=False)
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    section = {"headway": {"batching": {"formation": "vllm", "steps": str(steps.resolve())}}}
    flags = ["--scheduler-cls", _SCHEDULER, "--additional-config", json.dumps(section)]
    options = replace(options, arguments=[*options.arguments, *flags])
    command = lone_engine_command(options, resolve_model(model), model, url, cpu_interpreter())
    with ending_signals_raised(), LaunchProgress(logs) as progress:
        server = ServerProcess(_ENGINE, command, url, logs / f"{_ENGINE}.log", tethered=True)
        with closing(ServerGroup([server], progress.report)) as group:
            group.start([_ENGINE])
            progress.finish()
            yield url


async def _drive(url: str, engine: EngineDescription, points: int) -> None:
    cells = grid(engine, points)
    with tqdm(total=len(cells), unit="cell", desc="profiling") as bar:
        async for _ in drive(url, cells, secrets.randbits(32)):
            bar.update()


def _summary(found: Profile, out: Path) -> str:
    a, b, c = found.batch
    quality = found.quality
    return (
        f"a step takes {1e3 * a:.3g} ms + {1e3 * b:.3g} ms per new token + "
        f"{1e6 * c:.3g} µs per context token\n"
        f"{quality.steps} kinds of steps: the estimate is off by {quality.error_p50:.1%} in the "
        f"median ({quality.new_only_error_p50:.1%} without context), by at most "
        f"{quality.error_p95:.1%} in 95%; R² {quality.r2:.4f}\n"
        f"wrote {out / 'profile.yaml'}, profile.png and steps.csv"
    )
