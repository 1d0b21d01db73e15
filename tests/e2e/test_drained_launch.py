"""A launcher of emulated engines is stopped, or upgraded, while streams run: none is cut."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest
from running_deployment import patient

from benchmarks.support.deployments import proxy
from benchmarks.upgrade import Ledger, Upgrades
from rescheduler.demo.load import EmulatedRequest, changed_answers, metric_total, serve_load
from rescheduler.emulation.emulate_options import EmulateOptions
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.emulated_deployment import model_to_load
from rescheduler.engines.launch_local import local_deployment, write_deployment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PINNED = {"n": 2, "max_tokens": 400, "ignore_eos": True, "seed": 3, "temperature": 0.8}


@contextmanager
def launch(file: Path, *only: str) -> Iterator["subprocess.Popen[str]"]:
    """`headway launch` of some engines, which are ready."""
    command = [sys.executable, "-m", "rescheduler", "launch", "--config", str(file)]
    process = subprocess.Popen(
        [*command, "--logs", str(file.parent / f"logs-{only[0]}"), "--only", *only],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        while "Ctrl-C stops them" not in (line := process.stdout.readline()):
            assert line, "it did not start"
        yield process
    finally:
        process.terminate()
        process.terminate()  # at once
        process.communicate()


@pytest.fixture
def deployment() -> Deployment:
    engine = EngineOptions(
        max_num_seqs=32,
        block_size=16,
        kv_blocks=2_000,
        max_model_len=4_096,
        emulate=EmulateOptions(profile="h100-llama-8b"),
    )
    return patient(local_deployment("smollm2", engine))


async def test_a_launcher_that_is_stopped_cuts_no_stream(
    deployment: Deployment, tmp_path: Path
) -> None:
    file = tmp_path / "deployment.yaml"
    write_deployment(deployment, file)
    url, name = deployment.proxy_url, deployment.served_name

    async def pinned(session: aiohttp.ClientSession, salt: int) -> str:
        body = {"model": name, "prompt": f"One two {salt}", "stream": True, **PINNED}
        async with session.post(f"{url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            return (await response.read()).decode()

    with (
        launch(file, "prefill-0", "decode-0"),
        launch(file, "decode-1") as stopping,
        proxy(deployment, tmp_path),
    ):
        async with aiohttp.ClientSession() as session:
            load = [EmulatedRequest(i, 100, 3_000, 0.0) for i in range(6)]
            serving = asyncio.create_task(serve_load(url, name, load, 1.0, 7, 3_100))
            staying = [asyncio.create_task(pinned(session, i)) for i in range(4)]
            await asyncio.sleep(2.0)
            stopping.terminate()
            status = await asyncio.to_thread(stopping.wait)
            assert status == 0
            metrics = f"{url}/metrics"
            assert metric_total(metrics, "headway_proxy_migrations_total", outcome="moved") > 0
            assert metric_total(metrics, "headway_proxy_recomputed_requests_total") == 0
            for text in await asyncio.gather(*staying):
                assert "error" not in text and text.count('"finish_reason":"length"') == 2
                assert text.endswith("data: [DONE]\n\n")
            answers = await serving
    assert [one.error for one in answers if one.error] == []
    assert changed_answers(answers, Path(model_to_load(deployment))) == 0


async def test_an_upgrade_goes_through_a_deployment_and_cuts_no_stream(tmp_path: Path) -> None:
    upgrades, ledger = Upgrades(tmp_path, "h100-llama-8b", quick=True), Ledger()
    with upgrades.launched():
        before = upgrades.servers()
        await upgrades.under_load(ledger, rounds=1, seed=1)
        assert len(before) == 4 and not before & upgrades.servers(), "each has started anew"
    assert ledger.counts["streams"] > 20
    failed = {name: count for name, count in ledger.counts.items() if name != "streams" and count}
    assert failed == {}, ledger.notes
    assert upgrades.moves() > 0
