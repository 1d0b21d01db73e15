"""Deployments whose engines are emulated: commands, times, and what is refused."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from data_collection.models import identify
from rescheduler.emulation.emulate_options import (
    EMULATE_SECTION,
    EmulateOptions,
    StepSeconds,
    emulated_model,
)
from rescheduler.engines.deployment import (
    CoordinatorOptions,
    Deployment,
    DeploymentError,
    ProxyOptions,
    read_deployment,
)
from rescheduler.engines.emulated_deployment import emulated, in_real_time
from rescheduler.engines.engine_command import EngineCommand, engine_command
from rescheduler.engines.launch_local import write_deployment
from rescheduler.placement.guarded_policy import deployed_planner

SHIPPED = Path("configs/serve/local-pd.yaml")


def after(command: EngineCommand, flag: str) -> str:
    return after_flag(command.arguments, flag)


def after_flag(arguments: Sequence[str], flag: str) -> str:
    return arguments[arguments.index(flag) + 1]


def fleet(**options: Any) -> Deployment:
    deployment = read_deployment(SHIPPED)
    emulate = EmulateOptions(profile="h100-llama-8b", **options)
    return replace(deployment, engine=replace(deployment.engine, emulate=emulate))


def test_an_engine_of_any_deployment_can_be_emulated() -> None:
    deployment = emulated(read_deployment(SHIPPED), "h100-llama-8b")
    prefill, decode = deployment.instances[:2]
    command = engine_command(deployment, decode, "/m", "python")
    assert after(command, "--worker-cls") == "rescheduler.emulation.vllm_worker.EmulatedWorker"
    assert after(command, "--load-format") == "dummy"
    assert after(command, "--num-gpu-blocks-override") == str(860_320 // 32 + 1)
    assert after(command, "--max-num-batched-tokens") == "8192"
    transfer = json.loads(after(command, "--kv-transfer-config"))
    assert transfer["kv_connector_module_path"] == "rescheduler.emulation.vllm_connector"
    section = json.loads(after(command, "--additional-config"))
    assert "forecast" not in section["headway"], "the checkpoint reads hidden states"
    assert section[EMULATE_SECTION]["telemetry"]["bind"] == decode.telemetry
    assert section[EMULATE_SECTION]["step_time"]["constant"] == 4.55e-3
    other = json.loads(
        after(engine_command(deployment, prefill, "/m", "python"), "--additional-config")
    )
    assert other[EMULATE_SECTION]["telemetry"]["instance"] == prefill.name


def test_flags_that_say_how_a_gpu_computes_are_left_out() -> None:
    deployment = fleet()
    flags = ["--tensor-parallel-size", "4", "-q=fp8", "--stream-interval", "8", "--dtype", "half"]
    flags += ["--gpu_memory_utilization", "0.9", "--enable-expert-parallel", "--max-logprobs", "5"]
    own = ["--tensor-parallel", "2", "-O3", "--worker-cls", "x.Y", "-tp=4", "--seed", "3"]
    instances = [replace(one, arguments=own) for one in deployment.instances]
    deployment = replace(deployment, engine=replace(deployment.engine, arguments=flags))
    deployment = replace(deployment, instances=instances)
    arguments = engine_command(deployment, deployment.decode[0], "/m", "python").arguments
    assert arguments[-6:-4] == ["--seed", "3"] and not {"2", "-O3", "x.Y", "-tp=4"} & {*arguments}
    assert arguments[-4:-2] == ["--load-format", "dummy"]
    assert "--tensor-parallel-size" not in arguments and "-q=fp8" not in arguments
    assert arguments.count("--dtype") == 1 and "half" not in arguments
    assert "--gpu_memory_utilization" not in arguments and "0.9" not in arguments
    kept = arguments[arguments.index("--stream-interval") :]
    assert kept[:4] == ["--stream-interval", "8", "--max-logprobs", "5"]


def test_a_flag_s_value_goes_with_the_flag() -> None:
    flags = ["-O", "3", "-ep", "--seed", "4"]
    deployment = fleet()
    deployment = replace(deployment, engine=replace(deployment.engine, arguments=flags))
    arguments = engine_command(deployment, deployment.decode[0], "/m", "python").arguments
    assert not {"-O", "3", "-ep"} & {*arguments} and after_flag(arguments, "--seed") == "4"


def test_an_unknown_size_of_the_cache_is_refused() -> None:
    times = StepSeconds(constant=0.02, per_new=0, per_context=0)
    deployment = fleet()
    emulate = EmulateOptions(step_time=times)
    engine = replace(deployment.engine, emulate=emulate, kv_blocks=None)
    with pytest.raises(DeploymentError, match=r"holds: set engine\.emulate\.kv_tokens"):
        replace(deployment, engine=engine).check()
    known = replace(engine, emulate=replace(emulate, kv_tokens=6_400))
    command = engine_command(
        replace(deployment, engine=known), deployment.decode[0], "/m", "python"
    )
    assert after(command, "--num-gpu-blocks-override") == "201"


def test_blocks_that_a_cpu_cannot_have_hold_as_many_tokens() -> None:
    deployment = fleet()
    small = replace(deployment.engine, block_size=16, kv_blocks=401)
    command = engine_command(replace(deployment, engine=small), deployment.decode[0], "/m", "p")
    assert after(command, "--block-size") == "32"
    assert after(command, "--num-gpu-blocks-override") == str(400 * 16 // 32 + 1)


def test_every_wait_is_dilated_once_and_what_is_written_is_not(tmp_path: Path) -> None:
    coordinator = CoordinatorOptions(endpoint="tcp://127.0.0.1:5700")
    given = replace(fleet(dilation=4), coordinator=coordinator)
    real = in_real_time(given)
    for field in ProxyOptions.__struct_fields__:
        before, after_it = getattr(given.proxy, field), getattr(real.proxy, field)
        assert after_it == (4 * before if field.endswith("_seconds") else before), field
    assert real.migration is not None and real.migration["interval_seconds"] == 4.0
    assert real.coordinator is not None
    assert real.coordinator.silent_seconds == 4 * coordinator.silent_seconds
    write_deployment(given, tmp_path / "deployment.yaml")
    assert read_deployment(tmp_path / "deployment.yaml") == given
    plain = read_deployment(SHIPPED)
    assert in_real_time(plain) is plain
    command = engine_command(given, given.decode[0], "/m", "python")
    transfer = json.loads(after(command, "--kv-transfer-config"))
    kept = transfer["kv_connector_extra_config"]["headway"]["time_to_live"]
    assert kept == 4 * 15.0


def test_an_order_s_rate_is_dilated_in_the_proxy_and_in_the_engines() -> None:
    order = {"name": "boost", "gamma": 0.5}
    given = replace(fleet(dilation=4), order=order)
    given = replace(given, engine=replace(given.engine, order=order))
    assert in_real_time(given).order == {"name": "boost", "gamma": 0.125}
    command = engine_command(given, given.decode[0], "/m", "python")
    section = json.loads(after(command, "--additional-config"))
    assert section["headway"]["order"] == {"name": "boost", "gamma": 0.125}
    for other in ({"name": "boost"}, {"name": "boost", "gamma": "fast"}):
        assert in_real_time(replace(given, order=other)).order == other


def test_what_a_move_costs_is_dilated_as_the_steps_are() -> None:
    plain, slow = fleet(), fleet(dilation=4)
    found = [deployed_planner(deployment) for deployment in (plain, slow)]
    assert found[0] is not None and found[1] is not None
    context = np.array([100.0, 4_000.0])
    assert found[1][0].move_steps(context) == pytest.approx(4 * found[0][0].move_steps(context))


def test_another_machine_replaces_only_what_is_a_machine_s() -> None:
    before = fleet(dilation=2, kv_tokens=77, logs="x")
    emulate = emulated(before, "rtx4090d-qwen-7b").engine.emulate
    assert emulate is not None
    assert (emulate.dilation, emulate.logs, emulate.kv_tokens) == (2, "x", None)
    assert emulate.resolved().kv_tokens == 190_000


def test_a_machine_that_does_not_say_how_much_it_holds_holds_what_the_deployment_says(
    tmp_path: Path,
) -> None:
    times = {"constant": 0.02, "per_new": 0.0, "per_context": 0.0}
    machine = {"machine": "m", "model": "n", "source": "s", "step_time": times}
    (tmp_path / "mine.yaml").write_text(json.dumps(machine))
    emulate = emulated(fleet(kv_tokens=77), str(tmp_path / "mine.yaml")).engine.emulate
    assert emulate is not None and emulate.resolved().kv_tokens == 77


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"emulate": {"profile": "nothing"}}, "engine.emulate: nothing: no such file"),
        ({"emulate": {"profile": "h100-llama-8b", "dilation": 0}}, "engine.emulate.dilation"),
        ({"emulate": {"step_time": {"constant": 1}}}, "engine.emulate.step_time"),
        ({"emulate": {"x": 1}}, "engine.emulate"),
        ({"emulate": {"profile": "h100-llama-8b", "lengths": {"median": 0}}}, "lengths.median"),
        (
            {
                "emulate": {"profile": "h100-llama-8b"},
                "batching": {"profile": "p", "ttft_s": 1.0, "tpot_s": 0.1},
            },
            "engine.emulate: not with engine.batching",
        ),
    ],
)
def test_a_wrong_section_is_named(engine: dict[str, Any], words: str) -> None:
    instance = {"name": "a", "role": "decode", "url": "http://127.0.0.1:8000"}
    with pytest.raises(DeploymentError, match=words):
        Deployment.from_values({"model": "m", "instances": [instance], "engine": engine})


def test_a_rank_of_a_group_is_not_emulated() -> None:
    instance = {"name": "a", "role": "decode", "url": "http://h:1", "data_parallel_rank": 0}
    engine = {"emulate": {"profile": "h100-llama-8b"}}
    with pytest.raises(DeploymentError, match="data-parallel group"):
        Deployment.from_values({"model": "m", "instances": [instance], "engine": engine})


@pytest.mark.parametrize("flag", ["--data-parallel-size", "--data_parallel_rank=1", "-dp", "-dpn"])
@pytest.mark.parametrize("of_all", [True, False])
def test_a_group_of_ranks_in_one_engine_is_not_emulated(flag: str, of_all: bool) -> None:
    deployment = fleet()
    if of_all:
        engine = replace(deployment.engine, arguments=[flag, "2"])
        deployment = replace(deployment, engine=engine)
    else:
        instances = [replace(one, arguments=[flag, "2"]) for one in deployment.instances]
        deployment = replace(deployment, instances=instances)
    with pytest.raises(DeploymentError, match=f"one rank: remove {flag}"):
        deployment.check()


def test_decode_engines_behind_a_barrier_share_a_file_and_have_a_rank_each() -> None:
    deployment = fleet(barrier=True, dilation=4)
    sections = {
        one.name: json.loads(
            after(engine_command(deployment, one, "/m", "python"), "--additional-config")
        )["headway_emulate"]["barrier"]
        for one in deployment.instances
    }
    decode = [one.name for one in deployment.decode]
    assert [sections[name]["rank"] for name in decode] == list(range(len(decode)))
    assert len({sections[name]["file"] for name in decode}) == 1
    assert {sections[name]["patience_s"] for name in decode} == {0.2}
    assert all(sections[one.name] is None for one in deployment.prefill)
    others = replace(deployment, instances=deployment.instances[:-1])
    command = engine_command(others, others.decode[0], "/m", "python")
    other = json.loads(after(command, "--additional-config"))["headway_emulate"]["barrier"]
    assert other["file"] != sections[decode[0]]["file"], "of another deployment"


def test_a_barrier_of_more_engines_than_it_has_places_is_refused() -> None:
    instances = [
        {"name": f"d{i}", "role": "decode", "url": f"http://127.0.0.1:{9000 + i}"}
        for i in range(65)
    ]
    engine = {"emulate": {"profile": "h100-llama-8b", "barrier": True}}
    with pytest.raises(DeploymentError, match=r"engine.emulate.barrier: of 64 decode instances"):
        Deployment.from_values({"model": "m", "instances": instances, "engine": engine})


def test_a_barrier_of_two_machines_is_refused() -> None:
    instances = [{"name": h, "role": "decode", "url": f"http://{h}:80"} for h in ("one", "two")]
    engine = {"emulate": {"profile": "h100-llama-8b", "barrier": True}}
    with pytest.raises(DeploymentError, match="of engines on one machine, not of one and two"):
        Deployment.from_values({"model": "m", "instances": instances, "engine": engine})


def test_the_model_is_small_and_has_the_tokenizer_and_name_of_the_other(smollm2: Path) -> None:
    folder = emulated_model(str(smollm2))
    assert folder == emulated_model(str(smollm2))
    config = json.loads((folder / "config.json").read_text())
    assert config["num_hidden_layers"] == 1 and config["vocab_size"] == 49_152
    assert (folder / "tokenizer.json").read_bytes() == (smollm2 / "tokenizer.json").read_bytes()
    assert identify(str(folder)).name == identify(str(smollm2)).name
    assert not list(folder.glob("*.safetensors"))


def test_defaults_of_a_model_s_generation_are_not_asked_of_clients(
    tmp_path: Path, smollm2: Path
) -> None:
    for name in ("tokenizer.json", "config.json"):
        (tmp_path / name).write_bytes((smollm2 / name).read_bytes())
    generation = {"eos_token_id": [2, 3], "repetition_penalty": 1.1, "temperature": 0.6}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    folder = emulated_model(str(tmp_path))
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [2, 3]}
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "another"}')
    assert emulated_model(str(tmp_path)) != folder


@pytest.mark.parametrize("eos", [0, [0, 5]])
def test_an_answer_ends_also_where_no_generation_says_with_what(
    tmp_path: Path, smollm2: Path, eos: object
) -> None:
    (tmp_path / "tokenizer.json").write_bytes((smollm2 / "tokenizer.json").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9, "eos_token_id": eos}))
    folder = emulated_model(str(tmp_path))
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["eos_token_id"] == eos


def test_a_model_without_a_tokenizer_or_an_end_is_refused(tmp_path: Path, smollm2: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json"):
        emulated_model(str(tmp_path))
    (tmp_path / "tokenizer.json").write_bytes((smollm2 / "tokenizer.json").read_bytes())
    with pytest.raises(ValueError, match="cannot be read"):
        emulated_model(str(tmp_path))
    for eos in ("", ', "eos_token_id": []', ', "eos_token_id": "x"'):
        (tmp_path / "config.json").write_text(f'{{"vocab_size": 9{eos}}}')
        with pytest.raises(ValueError, match="eos_token_id"):
            emulated_model(str(tmp_path))
