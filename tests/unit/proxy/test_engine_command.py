"""The commands of engines: every flag and variable, and a shell that takes them back."""

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rescheduler.engines.deployment import Deployment, EngineOptions, Instance, read_deployment
from rescheduler.engines.engine_command import (
    IN_PROCESS,
    EngineCommand,
    LaunchError,
    engine_command,
    lone_engine_command,
)
from rescheduler.engines.proxy_options import ProxyOptions, TraceOptions

PREFILL = Instance("prefill-0", "prefill", "http://127.0.0.1:8100")
DECODE = Instance(
    "decode-0",
    "decode",
    "http://127.0.0.1:8110",
    control="tcp://127.0.0.1:8111",
    telemetry="tcp://127.0.0.1:8112",
)
ON_CPU = EngineOptions(
    dtype="float32", max_model_len=2048, enforce_eager=True, checkpoint="checkpoints/mine"
)


def deployment(*instances: Instance, engine: EngineOptions = ON_CPU, **fields: Any) -> Deployment:
    return Deployment(
        model="smollm2", instances=[*instances] or [PREFILL, DECODE], engine=engine, **fields
    )


def after(command: EngineCommand, flag: str) -> str:
    return command.arguments[command.arguments.index(flag) + 1]


def test_a_prefill_engine_on_a_cpu() -> None:
    command = engine_command(deployment(), PREFILL, "/models/smollm2", "/venv/bin/python")
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_connector_module_path": "rescheduler.transfer.vllm_connector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"headway": {"keys": None, "time_to_live": 15.0}},
    }
    forecasts = {"k": 20, "forecast": {"checkpoint": "checkpoints/mine", "telemetry": None}}
    assert command.arguments == [
        *("/venv/bin/python", "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", "/models/smollm2", "--served-model-name", "smollm2"),
        *("--host", "127.0.0.1", "--port", "8100", "--dtype", "float32"),
        *("--max-model-len", "2048", "--max-num-seqs", "16", "--block-size", "32"),
        *("--enforce-eager", "--max-num-batched-tokens", "32768"),
        *("--kv-transfer-config", json.dumps(transfer)),
        *("--worker-cls", "predictor.live.vllm_worker.LiveHeadwayWorker"),
        *("--scheduler-cls", "predictor.live.vllm_scheduler.LiveHeadwayScheduler"),
        *("--additional-config", json.dumps({"headway": forecasts})),
        *("--distributed-executor-backend", IN_PROCESS),
    ]
    assert command.environment == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5600",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_CI_ENV": "1",
        "UCX_TLS": "tcp,shm,self,cma",
        "UCX_NET_DEVICES": "lo",
    }


@pytest.mark.parametrize(
    ("endpoint", "protocol"),
    [("http://otel:4317", "grpc"), ("https://otel:4318/v1/traces", "http/protobuf")],
)
def test_traced_engines_record_what_the_proxy_records(endpoint: str, protocol: str) -> None:
    traced = deployment(proxy=ProxyOptions(traces=TraceOptions(endpoint=endpoint)))
    command = engine_command(traced, DECODE, "/models/smollm2", None)
    plain = engine_command(deployment(), DECODE, "/models/smollm2", None)
    assert command.arguments == [*plain.arguments, "--otlp-traces-endpoint", endpoint]
    assert command.environment == plain.environment | {
        "OTEL_SERVICE_NAME": "decode-0",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol,
        "OTEL_TRACES_SAMPLER": "parentbased_always_off",
    }


@pytest.mark.parametrize("keys", [None, "runs/keys"])
def test_a_decode_engine_can_be_moved_from_and_tells_its_forecasts(keys: str | None) -> None:
    command = engine_command(deployment(keys=keys), DECODE, "/models/smollm2", "/venv/bin/python")
    transfer = json.loads(after(command, "--kv-transfer-config"))
    assert transfer["kv_role"] == "kv_consumer"
    moves = {"control": "tcp://127.0.0.1:8111", "keys": keys, "time_to_live": 15.0}
    parses = {"parses_again": True}
    assert transfer["kv_connector_extra_config"]["headway"] == moves | parses
    resumes = "rescheduler.transfer.vllm_server.ResumedChatsMiddleware"
    assert after(command, "--middleware") == resumes, "without it the flag would be a lie"
    forecast = json.loads(after(command, "--additional-config"))["headway"]["forecast"]
    telemetry = {"bind": "tcp://127.0.0.1:8112", "instance": "decode-0", "keys": keys}
    assert forecast["telemetry"] == telemetry
    assert command.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5601"


@pytest.mark.parametrize(
    "flags",
    [
        ["--distributed-executor-backend", "mp"],
        ["--distributed_executor_backend=mp"],
        ["--tensor-parallel-size", "2"],
        ["--tensor-parallel", "2"],
        ["--data-parallel-backend", "ray"],
        ["-pp", "2"],
        ["-tp=2"],
    ],
)
def test_a_cpu_engine_runs_its_model_itself_unless_a_flag_may_need_more(flags: list[str]) -> None:
    def executors(engine: EngineOptions, decode: Instance = DECODE) -> list[bool]:
        url = "http://127.0.0.1:8100"
        commands = (
            engine_command(deployment(PREFILL, decode, engine=engine), decode, "m", "python"),
            lone_engine_command(engine, "m", "m", url, "python"),
        )
        return [IN_PROCESS in command.arguments for command in commands]

    assert executors(ON_CPU) == [True, True]
    assert executors(replace(ON_CPU, arguments=["--enable-prefix-caching", "-q"])) == [True, True]
    bound = {"VLLM_CPU_OMP_THREADS_BIND": "0-15"}  # vLLM binds worker processes only
    assert executors(replace(ON_CPU, environment=bound)) == [False, False]
    assert executors(replace(ON_CPU, arguments=flags)) == [False, False]
    assert executors(ON_CPU, replace(DECODE, arguments=flags)) == [False, True]
    assert IN_PROCESS not in engine_command(deployment(), DECODE, "m", None).arguments


CUDA, HIP, ROCR = "CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"


def shown_devices(devices: list[int | str], **further: str) -> dict[str, str]:
    """What an engine sees that is given these devices."""
    decode = replace(DECODE, devices=devices)
    made = deployment(PREFILL, decode, engine=EngineOptions(environment=further))
    environment = engine_command(made, decode, "m", None).environment
    return {name: value for name, value in environment.items() if name in (CUDA, HIP, ROCR)}


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set what the launcher sees."""

    def show(**variables: str) -> None:
        for name in (CUDA, HIP, ROCR):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return show


@pytest.mark.parametrize(
    ("variables", "devices", "shown"),
    [
        ({}, [2, 3], {CUDA: "2,3"}),
        ({}, ["GPU-8932f937"], {CUDA: "GPU-8932f937"}),
        ({CUDA: "4,5"}, [0], {CUDA: "4"}),
        ({CUDA: "4, 5,"}, ["1", 0], {CUDA: "5,4"}),
        ({CUDA: "GPU-aa11,MIG-bb22"}, [1], {CUDA: "MIG-bb22"}),
        ({CUDA: "GPU-aa11,MIG-bb22"}, ["GPU-aa11"], {CUDA: "GPU-aa11"}),
        ({CUDA: "GPU-aa11,MIG-bb22"}, ["GPU-aa"], {CUDA: "GPU-aa"}),
        ({CUDA: "GPU-aa"}, ["GPU-aa11"], {CUDA: "GPU-aa11"}),
        ({CUDA: "4,5"}, ["GPU-aa11"], {CUDA: "GPU-aa11"}),
        ({HIP: "4,5"}, [1], {CUDA: "5", HIP: "5"}),
        ({HIP: "4,5", CUDA: "4,5"}, [1], {CUDA: "5", HIP: "5"}),
        ({ROCR: "4,5"}, [1], {CUDA: "1"}),
        ({ROCR: "4,5,6", HIP: "1,2"}, [0], {CUDA: "1", HIP: "1"}),
    ],
)
def test_devices_are_counted_among_the_visible_ones(
    visible: Callable[..., None],
    variables: dict[str, str],
    devices: list[int | str],
    shown: dict[str, str],
) -> None:
    visible(**variables)
    assert shown_devices(devices) == shown


def test_devices_are_counted_among_those_that_the_file_shows(visible: Callable[..., None]) -> None:
    visible(**{CUDA: "0,1,2,3"})
    assert shown_devices([1], **{CUDA: "2,3"}) == {CUDA: "3"}


@pytest.mark.parametrize(
    ("variables", "device", "said"),
    [
        ({CUDA: "4,5"}, 2, r"decode-0's devices: no device 2 .* shows 2 \(4,5\)"),
        ({CUDA: ""}, 0, "CUDA_VISIBLE_DEVICES shows none"),
        ({CUDA: "NoDevFiles"}, 0, "CUDA_VISIBLE_DEVICES shows none"),
        ({CUDA: "4,-1,5"}, 1, "shows 1"),
        ({CUDA: "4,5"}, -1, "no device -1"),
        ({CUDA: "GPU-aa11"}, "GPU-bb22", "no device GPU-bb22"),
        ({HIP: "4"}, 1, "HIP_VISIBLE_DEVICES shows 1"),
        ({ROCR: "4"}, 1, "ROCR_VISIBLE_DEVICES shows 1"),
    ],
)
def test_a_device_that_is_not_visible_is_refused(
    visible: Callable[..., None], variables: dict[str, str], device: int | str, said: str
) -> None:
    visible(**variables)
    with pytest.raises(LaunchError, match=said):
        shown_devices([device])


def test_on_gpus_nothing_of_the_cpu_remains(visible: Callable[..., None]) -> None:
    visible()
    decode = replace(DECODE, devices=[2, 3], arguments=["--tensor-parallel-size", "2"])
    engine = EngineOptions(arguments=["--enable-prefix-caching"], environment={"UCX_TLS": "all"})
    command = engine_command(deployment(PREFILL, decode, engine=engine), decode, "me/model", None)
    assert command.arguments[:3] == ["vllm", "serve", "me/model"]
    assert command.arguments[-3:] == ["--enable-prefix-caching", "--tensor-parallel-size", "2"]
    assert command.environment == {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "5601",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "UCX_TLS": "all",
    }
    left_out = (
        "--max-model-len",
        "--max-num-batched-tokens",
        "--enforce-eager",
        "--num-gpu-blocks-override",
        "--worker-cls",
    )
    assert not set(left_out) & set(command.arguments)


def test_transfers_stay_on_the_loopback_only_where_all_engines_are_on_it() -> None:
    far = Instance("decode-1", "decode", "http://10.0.0.2:8110", "tcp://10.0.0.2:8111")
    command = engine_command(deployment(PREFILL, far, keys="k"), PREFILL, "m", "python")
    assert not {"UCX_TLS", "UCX_NET_DEVICES"} & set(command.environment)
    command = engine_command(deployment(PREFILL, far, keys="k"), far, "m", "python")
    assert command.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "10.0.0.2"
    assert after(command, "--host") == "10.0.0.2"


def test_a_data_parallel_rank_listens_where_the_deployment_says() -> None:
    """vLLM and the telemetry add the rank to the ports they are given."""
    second = replace(DECODE, data_parallel_rank=1)
    command = engine_command(deployment(PREFILL, second), second, "m", None)
    assert after(command, "--data-parallel-rank") == "1"
    assert command.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] == "5600", "5601 with the rank"
    forecast = json.loads(after(command, "--additional-config"))["headway"]["forecast"]
    assert forecast["telemetry"]["bind"] == "tcp://127.0.0.1:8111", "8112 with the rank"
    transfer = json.loads(after(command, "--kv-transfer-config"))
    control = transfer["kv_connector_extra_config"]["headway"]["control"]
    assert control == "tcp://127.0.0.1:8110", "8111 with the rank"


def test_a_replica_forms_its_batches_and_turns_requests_away() -> None:
    batching = {"profile": "profile.yaml", "admission": True}
    described = deployment(DECODE, engine=replace(ON_CPU, batching=batching))
    command = engine_command(described, DECODE, "m", "python")
    scheduler = "rescheduler.batching.vllm_scheduler.FairBatchingScheduler"
    assert after(command, "--scheduler-cls") == scheduler
    assert after(command, "--middleware") == "rescheduler.batching.admission.AdmissionMiddleware"
    assert after(command, "--worker-cls") == "predictor.live.vllm_worker.LiveHeadwayWorker"
    section = json.loads(after(command, "--additional-config"))["headway"]
    assert section["batching"] == batching
    assert section["forecast"]["telemetry"]["bind"] == DECODE.telemetry
    assert "--max-num-batched-tokens" not in command.arguments
    without = engine_command(
        deployment(DECODE, engine=EngineOptions(batching=batching)), DECODE, "m", "python"
    )
    assert "--worker-cls" not in without.arguments
    assert after(without, "--scheduler-cls") == scheduler
    assert json.loads(after(without, "--additional-config")) == {"headway": {"batching": batching}}


def test_a_decode_instance_suspends_whom_it_is_told() -> None:
    described = deployment(engine=replace(ON_CPU, victim="rest"))
    command = engine_command(described, DECODE, "m", "python")
    scheduler = "rescheduler.ordering.vllm_scheduler.SuspendingHeadwayScheduler"
    assert after(command, "--scheduler-cls") == scheduler
    assert json.loads(after(command, "--additional-config"))["headway"]["victim"] == "rest"
    ordered = deployment(engine=replace(ON_CPU, victim="context", order={"name": "boost"}))
    command = engine_command(ordered, DECODE, "m", "python")
    scheduler = "rescheduler.ordering.vllm_scheduler.OrderedSuspendingHeadwayScheduler"
    assert after(command, "--scheduler-cls") == scheduler
    section = json.loads(after(command, "--additional-config"))["headway"]
    assert (section["victim"], section["order"]) == ("context", {"name": "boost"})


@pytest.mark.parametrize(
    ("migration", "victim", "suspended"),
    [
        (None, None, "newest"),
        ({"name": "survival", "shadow": True}, None, "newest"),
        ({"name": "survival"}, None, "age"),
        ({"name": "survival"}, "newest", "newest"),
        (None, "rest", "rest"),
    ],
)
def test_where_requests_are_moved_engines_suspend_by_age(
    migration: dict[str, Any] | None, victim: Any, suspended: str
) -> None:
    described = replace(deployment(engine=replace(ON_CPU, victim=victim)), migration=migration)
    assert described.victim == suspended
    command = engine_command(described, DECODE, "m", "python").arguments
    assert ("SuspendingHeadwayScheduler" in " ".join(command)) == (suspended != "newest")
    assert (f'"victim": "{suspended}"' in " ".join(command)) == (suspended != "newest")


def test_a_small_kv_cache_is_asked_for_in_blocks() -> None:
    engine = EngineOptions(kv_blocks=64, block_size=16, kv_cache_gb=2, threads=4)
    command = engine_command(deployment(engine=engine), DECODE, "m", "python")
    assert after(command, "--num-gpu-blocks-override") == "64"
    assert after(command, "--block-size") == "16"
    assert command.environment["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert command.environment["OMP_NUM_THREADS"] == "4"
    assert "VLLM_CPU_CI_ENV" not in command.environment, "compiling needs the warm-up"


@pytest.mark.parametrize("python", ["/with space/python", None])
def test_a_shell_reads_the_same_command(python: str | None) -> None:
    engine = EngineOptions(environment={"NOTE": "it's $HOME; `ls`"})
    command = engine_command(deployment(engine=engine), DECODE, "/my models/a'b", python)
    words = shlex.split(command.shell().replace("\\\n", ""))
    assigned = [f"{name}={value}" for name, value in command.environment.items()]
    assert words == [*assigned, *command.arguments]


@pytest.mark.parametrize("part", ["Run on GPUs", "Data and expert parallelism"])
def test_the_pages_deployments_can_be_started(part: str, tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "deploy.md").read_text()
    text = page.split(f"\n## {part}\n")[1].split("\n## ")[0]
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        (tmp_path / "page.yaml").write_text(block)
        described = read_deployment(tmp_path / "page.yaml")
        listening = []
        for instance in described.instances:
            command = engine_command(described, instance, described.model, None)
            side_channel = int(command.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"])
            rank = instance.data_parallel_rank or 0
            listening += [instance.url, (instance.host, side_channel + rank)]
        assert len(set(listening)) == len(listening), "no two listen on one port"
