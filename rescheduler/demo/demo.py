"""`headway demo`: requests move between engines without interrupting client streams."""

import asyncio
import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rescheduler.demo.demo_figures import Objectives, load_figures
from rescheduler.demo.demo_load import LoadRequest, ServedRequest
from rescheduler.demo.demo_phase import Move, Phase, running_phase
from rescheduler.demo.demo_view import move_line, screen, stream_text, summary_line
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.launch_engines import LaunchProgress, launched
from rescheduler.engines.launch_local import free_ports, local_deployment

__all__ = ["demo"]

_ENGINE = EngineOptions(
    dtype="float32",
    max_model_len=1024,
    max_num_seqs=16,
    kv_blocks=72,  # of 32 tokens: five of the long answers
    enforce_eager=True,
    checkpoint=str(Path(__file__).parents[2] / "checkpoints" / "smollm2-135m-instruct"),
    k=10,
)
_HEROES = (
    "a lighthouse keeper who finds a letter from the future",
    "two sisters who restore an old sailing boat",
    "a robot gardener on a space station",
    "a baker whose bread makes people tell the truth",
    "a detective who is afraid of the dark",
    "a village where it has not rained for ten years",
    "a chess player who meets her younger self",
    "a train that stops at a station nobody knows",
    "a cartographer who draws a river that does not exist yet",
    "a night guard in a museum of lost things",
    "a family that moves to the bottom of the sea",
    "a violin that was built without a sound post",
)
_MIGRATION = {
    "name": "survival",
    "interval_seconds": 1.0,
    "handshake_seconds": 0.2,
    "bandwidth": 5e8,
    "kv_bytes_per_token": 46_080,
    "horizon": 300,
    "stride": 10,
}
_LONG_TOKENS, _SHORT_TOKENS = 400, 40
_PAIRS = 10
_APART_SECONDS = 0.8
_TTFT_TIMES, _TPOT_TIMES = 20.0, 4.0
_REFRESH_SECONDS = 0.25
_LINE_SECONDS = 5.0

_QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Is water wet? Answer yes or no.",
    "What is 7 + 5? Give only the number.",
)


def demo(
    config: Deployment | None = None, logs: Path = Path("runs/demo/logs"), pairs: int = _PAIRS
) -> None:
    """Show running requests that move between two decode engines without interrupting streams.

    Starts a small deployment of the embedded model on this machine's CPU and sends it the same
    load twice: long and short answers, placed in turn, so that all long ones meet on one engine,
    whose KV cache holds half of them. First nothing moves; then the planner moves requests. Takes
    about four minutes and 10 GiB of memory on two cores. With --config it uses engines that are
    already running. It prints the address of a page that shows the same in a browser.

    Args:
        config: deployment whose engines are already running.
        logs: folder of the engines' logs.
        pairs: number of long and number of short requests.

    Raises:
        ValueError: ``pairs`` is out of its range.
    """
    if not 1 <= pairs <= len(_HEROES):
        raise ValueError(f"--pairs must be between 1 and {len(_HEROES)}, not {pairs}")
    console = Console()
    with ExitStack() as stack:
        if config is not None:
            deployment = _on_free_port(config)
        else:
            deployment = local_deployment("smollm2", _ENGINE, migration=_MIGRATION)
            print(
                f"Starting one prefill and two decode engines, logs in {logs}",
                file=sys.stderr,
                flush=True,
            )
            progress = stack.enter_context(LaunchProgress(logs))
            stack.enter_context(launched(deployment, logs, report=progress.report))
            progress.finish()
        asyncio.run(_show(deployment, skewed_load(pairs), console))


def skewed_load(pairs: int = _PAIRS) -> list[LoadRequest]:
    """Return long and short requests in turn: round robin puts all long ones on one engine."""
    load = []
    for number in range(2 * pairs):
        pair, is_short = divmod(number, 2)
        if is_short:
            name, tokens = f"short-{pair}", _SHORT_TOKENS
            text = _QUESTIONS[pair % len(_QUESTIONS)]
        else:
            name, tokens = f"long-{pair}", _LONG_TOKENS
            text = f"Write a long story about {_HEROES[pair]}."
        load.append(LoadRequest(name, text, tokens, number, _APART_SECONDS * number))
    return load


async def _show(deployment: Deployment, load: list[LoadRequest], console: Console) -> None:
    placed = msgspec.structs.replace(deployment, routing={"name": "round_robin"})
    still = msgspec.structs.replace(placed, migration=None)
    moving = msgspec.structs.replace(placed, migration=placed.migration or _MIGRATION)
    token = secrets.token_urlsafe(32)  # one for all phases, so that the page finds each
    print(f"See it in a browser: {still.admin_url}/ui#token={token}", file=sys.stderr, flush=True)
    objectives = await _objectives(still, token)
    columns, phases = [], []
    for number, (title, serves) in enumerate(
        [("without rescheduling", still), ("with rescheduling", moving)], 1
    ):
        name = f"{number} of 2: {title}"
        async with running_phase(name, serves, load, token) as (phase, answers):
            await _watch(phase, answers, console)
            served = await answers
        columns.append(load_figures(served, phase.run.seconds, objectives))
        phases.append(phase)
    console.print(_moved_stream(phases[1]))
    console.print(_table(columns, phases, objectives))


async def _objectives(deployment: Deployment, token: str) -> Objectives:
    """Measure the latency of requests that have the engines to themselves."""
    text = f"Write a story about {_HEROES[0]}."
    alone = [LoadRequest(f"alone-{i}", text, 30, i, 5.0 * i) for i in range(4)]
    async with running_phase("alone", deployment, alone, token) as (_, answers):
        served = (await answers)[2:]  # the first two shake hands with the prefill engine
    if any(s.error or not s.tpot or not s.ttft for s in served):
        raise RuntimeError(f"a request sent alone was not served: {served[0].error}")
    ttft = sum(s.ttft or 0.0 for s in served) / len(served)
    tpot = sum(s.tpot or 0.0 for s in served) / len(served)
    return Objectives(_TTFT_TIMES * ttft, _TPOT_TIMES * tpot)


async def _watch(
    phase: Phase, answers: "asyncio.Task[list[ServedRequest]]", console: Console
) -> None:
    """Show a phase until its last answer is there."""
    live = None
    with ExitStack() as stack:
        if console.is_terminal and not console.is_dumb_terminal:
            live = stack.enter_context(Live(console=console, auto_refresh=False))
        else:
            print(phase.title, flush=True)
        reported, next_line = 0, time.monotonic() + _LINE_SECONDS
        while True:
            done = answers.done()
            if live is not None:
                live.update(screen(phase, console.width), refresh=True)
            else:
                while reported < len(phase.moves) and (
                    done or _has_landed(phase, phase.moves[reported])
                ):
                    print(f"moved  {move_line(phase, phase.moves[reported])}", flush=True)
                    reported += 1
                if done or time.monotonic() >= next_line:
                    print(summary_line(phase), flush=True)
                    next_line = time.monotonic() + _LINE_SECONDS
            if done:
                return
            await asyncio.wait([answers], timeout=_REFRESH_SECONDS)


def _has_landed(phase: Phase, move: Move) -> bool:
    """Return whether the client has read more of a request since it moved."""
    served = phase.run.served.get(move.request)
    return served is not None and served.tokens > move.tokens


def _moved_stream(phase: Phase) -> Text:
    """Return the whole answer of the client whose request moved nearest to its middle."""
    if not phase.moves:
        return Text("\nNo request moved: the engines were never out of balance for long.")

    def tokens_on_shorter_side(move: Move) -> int:
        return min(move.tokens, phase.run.served[move.request].tokens - move.tokens)

    client = phase.run.served[max(phase.moves, key=tokens_on_shorter_side).request]
    text = Text(f"\nWhat the client of {client.request.name} read, in one stream:\n", style="bold")
    return Text().append_text(text).append_text(stream_text(client, phase.moves))


def _table(
    columns: Sequence[dict[str, float]], phases: Sequence[Phase], objectives: Objectives
) -> Table:
    without, moved = columns
    table = Table(
        title="\nThe same requests at the same times",
        caption=(
            f"in time: first token within {objectives.ttft_s:.1f} s, then at most "
            f"{1e3 * objectives.tpot_s:.0f} ms per token; {_TTFT_TIMES:g} and {_TPOT_TIMES:g} "
            "times the latency of a request sent alone"
        ),
        title_justify="left",
        caption_justify="left",
    )
    table.add_column("")
    for title in ("without rescheduling", "with rescheduling"):
        table.add_column(title, justify="right")
    rows = [
        ("goodput, requests in time per minute", "goodput", 60.0, ".1f"),
        ("requests in time", "met", 100.0, ".0f"),
        ("TPOT P50, ms", "tpot_p50", 1e3, ".0f"),
        ("TPOT P99, ms", "tpot_p99", 1e3, ".0f"),
        ("longest pause of a stream, P99, s", "gap_p99", 1.0, ".1f"),
        ("TTFT P99, s", "ttft_p99", 1.0, ".1f"),
        ("total time, s", "seconds", 1.0, ".0f"),
    ]
    for label, name, scale, spec in rows:
        unit = "%" if name == "met" else ""
        table.add_row(label, *(f"{scale * figures[name]:{spec}}{unit}" for figures in columns))
    table.add_row("preemptions", *(str(phase.preempted) for phase in phases))
    table.add_row("migrations", *(str(len(phase.moves)) for phase in phases))
    if without["failed"] or moved["failed"]:
        table.add_row("failed requests", *(f"{figures['failed']:.0f}" for figures in columns))
    return table


def _on_free_port(deployment: Deployment) -> Deployment:
    """Return a deployment whose proxy is another than the one that may run."""
    port, admin_port = free_ports(2)
    proxy = msgspec.structs.replace(
        deployment.proxy, host="127.0.0.1", port=port, admin_port=admin_port
    )
    return msgspec.structs.replace(deployment, proxy=proxy)
