"""A whole deployment of emulated engines on ::1."""

import asyncio
import json
import socket
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace
from running_deployment import PATIENT

from rescheduler.demo.demo_load import metric_total
from rescheduler.demo.scripted_load import EmulatedRequest, changed_answers, serve_load
from rescheduler.emulation.emulate_options import AnswerLengths, EmulateOptions
from rescheduler.engines.deployment import Deployment, EngineOptions
from rescheduler.engines.emulated_deployment import model_to_load
from rescheduler.engines.launch_engines import launched
from rescheduler.engines.launch_local import local_deployment
from rescheduler.serving.admin_client import drain_instance, undrain_instance
from rescheduler.telemetry.subscriber import TelemetrySubscriber

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def on_ipv6() -> Deployment:
    """A prefill and two decode engines, and their proxy."""
    lengths = AnswerLengths(median=60, sigma=0.7, longest=900)
    engine = EngineOptions(
        max_num_seqs=32,
        block_size=16,
        kv_blocks=400,
        max_model_len=2_048,
        emulate=EmulateOptions(profile="h100-llama-8b", lengths=lengths),
    )
    made = local_deployment("smollm2", engine)
    ports = {"port": made.proxy.port, "admin_port": made.proxy.admin_port}
    made = replace(made, proxy=replace(PATIENT, **ports))
    values = json.loads(msgspec.json.encode(made).replace(b"127.0.0.1", b"[::1]"))
    values["proxy"]["host"] = "::1"
    return Deployment.from_values(values)


async def test_it_serves_moves_and_reports(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    deployment = on_ipv6()
    url, admin = deployment.proxy_url, deployment.admin_url
    with launched(deployment, tmp_path / "logs", serve=True, tethered=True):
        # They last six seconds and more, and either instance has room for all of them.
        load = [EmulatedRequest(i, 100, 900, 0.0) for i in range(4)]
        asked = asyncio.ensure_future(serve_load(url, deployment.served_name, load, 1.0, 4, 1_000))
        with TelemetrySubscriber([str(one.telemetry) for one in deployment.decode]) as heard:
            while not asked.done():
                for one in deployment.decode:
                    await asyncio.to_thread(drain_instance, admin, one.name)
                    await asyncio.sleep(1.0)
                    await asyncio.to_thread(undrain_instance, admin, one.name)
            assert len(heard.view.instances) == 2
        answers = await asked
        assert [one.error for one in answers if one.error] == []
        assert changed_answers(answers, Path(model_to_load(deployment))) == 0
        metrics, name = f"{url}/metrics", "headway_proxy_migrations_total"
        assert metric_total(metrics, name, outcome="moved") > 0
        # Prompts and caches came over NIXL, whose side channel is on ::1, too.
        assert metric_total(metrics, "headway_proxy_recomputed_requests_total") == 0
        assert metric_total(metrics, "headway_proxy_kv_load_failures_total") == 0
