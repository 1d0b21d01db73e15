"""Deployment files: what they say, what is wrong with one, and those of emulated engines."""

import json
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
    Instance,
    read_deployment,
)
from rescheduler.engines.emulated_deployment import emulated, in_real_time
from rescheduler.engines.engine_command import engine_command
from rescheduler.engines.launch_local import write_deployment
from rescheduler.engines.proxy_options import ProxyOptions
from rescheduler.placement.guarded_policy import deployed_planner

LOCAL = Path(__file__).parents[3] / "configs" / "serve" / "local-pd.yaml"

PREFILL = "{name: p, role: prefill, url: 'http://127.0.0.1:1'}"
DECODE = "{name: d, role: decode, url: 'http://127.0.0.1:2'}"
ALONE = f"model: m\ninstances: [{DECODE}]\n"
BOTH = f"model: m\ninstances: [{PREFILL}, {DECODE}]\n"


EMULATED = "engine: {emulate: {profile: h100-llama-8b"


def instances(*urls: str) -> str:
    """Decode instances at these addresses."""
    rows = (f"{{name: d{i}, role: decode, url: '{url}'}}" for i, url in enumerate(urls))
    return f"model: m\ninstances: [{', '.join(rows)}]\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "deployment.yaml"
    path.write_text(text)
    return path


def test_the_local_example_is_one_prefill_and_two_decode_instances() -> None:
    deployment = read_deployment(LOCAL)
    assert [instance.name for instance in deployment.prefill] == ["prefill-0"]
    assert [instance.name for instance in deployment.decode] == ["decode-0", "decode-1"]
    assert deployment.decode[1].port == 8120
    assert deployment.served_name == "smollm2"
    assert deployment.proxy_url == "http://127.0.0.1:8000"


def test_the_replicas_example_prefills_and_decodes_in_one_place() -> None:
    deployment = read_deployment(LOCAL.with_name("local-replicas.yaml"))
    assert not deployment.prefill
    assert [instance.name for instance in deployment.decode] == ["replica-0", "replica-1"]
    assert deployment.routing == {"name": "pab"}
    assert deployment.engine.batching is not None
    assert deployment.engine.batching["admission"]


def test_what_is_left_out_has_a_default(tmp_path: Path) -> None:
    path = write(tmp_path, f"model: smollm2\ninstances: [{PREFILL}, {DECODE}]")
    deployment = read_deployment(path)
    assert deployment.served_name == "smollm2"
    assert deployment.routing == {"name": "jsq_load"}
    assert deployment.migration is None
    assert deployment.proxy.pool == 256


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "invalid YAML"),
        ("[1, 2]", "Expected `object`"),
        (
            f"{ALONE}proxy: {{traces: {{endpoint: 'otel:4317'}}}}",
            "proxy.traces.endpoint: 'otel:4317' is not like http://127.0.0.1:4317",
        ),
        (
            f"{ALONE}proxy: {{traces: {{endpoint: 'http://me:secret@otel:4318/v1/traces'}}}}",
            "proxy.traces.endpoint: must not hold a name or a password",
        ),
        (
            f"{ALONE}proxy: {{traces: {{sample: 0.1}}}}",
            "proxy.traces: Object missing required field `endpoint`",
        ),
        (
            f"{ALONE}proxy: {{traces: {{endpoint: 'http://otel:4317', sample: 10}}}}",
            "proxy.traces.sample: Expected `float` <= 1",
        ),
        (
            f"{ALONE}proxy: {{traces: {{endpoint: 'http://o:1'}}}}\n"
            "engine: {arguments: [--disable-log-stats]}",
            "remove --disable-log-stats",
        ),
        (f"model: m\ninstances: [{PREFILL}]", "at least one must have the role decode"),
        (
            f"{BOTH}engine: {{batching: {{}}}}",
            "engine.batching: requires engines that both prefill and decode, but p",
        ),
        (
            f"{ALONE}engine: {{batching: {{admission: true}}}}",
            "yaml: engine.batching: admission needs to know how long a batch takes",
        ),
        (
            f"{ALONE}engine: {{batching: {{profil: a}}}}",
            "yaml: engine.batching: .*`profil`.*Known keys: .*profile",
        ),
        ("model: m\ninstances: [{name: p, role: both, url: x}]", r"instances\[0\].role"),
        (f"{BOTH}ports: 1", "ports"),
        (f"{BOTH}proxy: {{port: 99999}}", "proxy.port"),
        (f"{BOTH}proxy: {{pool: 0}}", "proxy.pool"),
        (f"{BOTH}routing: {{}}", "routing.name"),
        (f"{BOTH}migration: {{name: a, interval_seconds: 0}}", "migration.interval_seconds"),
        (f"model: m\ninstances: [{PREFILL}, {PREFILL}]", r"instances\[1\].name: p is also"),
        (BOTH.replace("http://127.0.0.1:2", "ftp://h:1"), r"instances\[1\].url"),
        (BOTH.replace("name: d", "name: d/e"), r"instances\[1\].name"),
        (
            BOTH.replace("role: decode", "role: decode, control: 'tcp://10.0.0.1:5'"),
            r"instances\[1\].control: .*headway keys",
        ),
        ('model: m\n"li\\nne": 1\ninstances: []', "unknown field `li ne`"),
        (f"{ALONE}engine: {{emulate: {{profile: nothing}}}}", "engine.emulate: nothing: no such f"),
        (f"{ALONE}{EMULATED}, dilation: 0}}}}", "engine.emulate.dilation"),
        (f"{ALONE}engine: {{emulate: {{step_time: {{constant: 1}}}}}}", "engine.emulate.step_time"),
        (f"{ALONE}engine: {{emulate: {{x: 1}}}}", "engine.emulate"),
        (f"{ALONE}{EMULATED}, lengths: {{median: 0}}}}}}", "lengths.median"),
        (
            f"{ALONE}{EMULATED}}}, batching: {{profile: p, ttft_s: 1.0, tpot_s: 0.1}}}}",
            "engine.emulate: not with engine.batching",
        ),
        (
            ALONE.replace("role: decode", "role: decode, data_parallel_rank: 0") + EMULATED + "}}",
            "data-parallel group",
        ),
        (
            f"{instances(*(f'http://127.0.0.1:{9000 + i}' for i in range(65)))}"
            f"{EMULATED}, barrier: true}}}}",
            "engine.emulate.barrier: of 64 decode instances",
        ),
        (
            f"{instances('http://one:80', 'http://two:80')}{EMULATED}, barrier: true}}}}",
            "of engines on one machine, not of one and two",
        ),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_and_field(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(DeploymentError, match=message) as caught:
        read_deployment(write(tmp_path, text))
    assert "deployment.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "*", "[::]", "[0::0]", "[::ffff:0.0.0.0]"])
@pytest.mark.parametrize(
    ("field", "endpoint"),
    [
        (r"instances\[0\].url", "http://{}:8100"),
        (r"instances\[0\].url", "http://{}"),
        (r"instances\[0\].control", "tcp://{}:8101"),
        (r"instances\[0\].telemetry", "tcp://{}:8102"),
        ("coordinator.endpoint", "tcp://{}:5700"),
        ("proxy.traces.endpoint", "http://{}:4317"),
    ],
)
def test_an_address_that_only_a_server_may_name_is_refused(
    field: str, endpoint: str, host: str
) -> None:
    instance = {"name": "d", "role": "decode", "url": "http://127.0.0.1:2"}
    values: dict[str, Any] = {"model": "m", "keys": "keys", "instances": [instance]}
    wrong = endpoint.format(host)
    if field.startswith("instances"):
        instance[field.rpartition(".")[2]] = wrong
    elif field.startswith("coordinator"):
        values["coordinator"] = {"endpoint": wrong}
    else:
        values["proxy"] = {"traces": {"endpoint": wrong}}
    with pytest.raises(DeploymentError, match=f"^{field}: .*write the address .* such as 127"):
        Deployment.from_values(values)


@pytest.mark.parametrize("port", ["*", "0", "", "99999"])
def test_an_endpoint_whose_port_nobody_knows_is_refused(tmp_path: Path, port: str) -> None:
    text = ALONE.replace("role: decode", f"role: decode, control: 'tcp://127.0.0.1:{port}'")
    with pytest.raises(DeploymentError, match=r"instances\[0\].control: .* tcp://127.0.0.1:5557"):
        read_deployment(write(tmp_path, text))


def test_the_proxy_may_listen_everywhere(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "'::'"):
        deployment = read_deployment(write(tmp_path, f"{ALONE}proxy: {{host: {host}}}"))
        assert deployment.proxy_url == "http://127.0.0.1:8000"


def test_a_missing_file_is_reported() -> None:
    with pytest.raises(DeploymentError, match=r"nowhere.yaml: cannot be read: No such file"):
        read_deployment("nowhere.yaml")


def after(deployment: Deployment, flag: str, instance: Instance | None = None) -> str:
    """What follows a flag in the command of an instance, by default of the first that decodes."""
    arguments = arguments_of(deployment, instance)
    return arguments[arguments.index(flag) + 1]


def arguments_of(deployment: Deployment, instance: Instance | None = None) -> list[str]:
    return engine_command(deployment, instance or deployment.decode[0], "/m", "p").arguments


def section_of(deployment: Deployment, instance: Instance | None = None) -> dict[str, Any]:
    """What an engine is told of Headway."""
    section: dict[str, Any] = json.loads(after(deployment, "--additional-config", instance))
    return section


def fleet(**options: Any) -> Deployment:
    deployment = read_deployment(LOCAL)
    emulate = EmulateOptions(profile="h100-llama-8b", **options)
    return replace(deployment, engine=replace(deployment.engine, emulate=emulate))


def test_an_engine_of_any_deployment_can_be_emulated() -> None:
    deployment = emulated(read_deployment(LOCAL), "h100-llama-8b")
    prefill, decode = deployment.instances[:2]
    assert after(deployment, "--worker-cls") == "rescheduler.emulation.vllm_worker.EmulatedWorker"
    assert after(deployment, "--load-format") == "dummy"
    assert after(deployment, "--num-gpu-blocks-override") == str(860_320 // 32 + 1)
    assert after(deployment, "--max-num-batched-tokens") == "8192"
    transfer = json.loads(after(deployment, "--kv-transfer-config"))
    assert transfer["kv_connector_module_path"] == "rescheduler.emulation.vllm_connector"
    section = section_of(deployment)
    assert "forecast" not in section["headway"], "the checkpoint reads hidden states"
    assert section[EMULATE_SECTION]["telemetry"]["bind"] == decode.telemetry
    assert section[EMULATE_SECTION]["step_time"]["constant"] == 4.55e-3
    other = section_of(deployment, prefill)
    assert other[EMULATE_SECTION]["telemetry"]["instance"] == prefill.name


def test_flags_that_say_how_a_gpu_computes_are_left_out() -> None:
    deployment = fleet()
    flags = ["--tensor-parallel-size", "4", "-q=fp8", "--stream-interval", "8", "--dtype", "half"]
    flags += ["--gpu_memory_utilization", "0.9", "--enable-expert-parallel", "--max-logprobs", "5"]
    own = ["--tensor-parallel", "2", "-O3", "--worker-cls", "x.Y", "-tp=4", "--seed", "3"]
    instances = [replace(one, arguments=own) for one in deployment.instances]
    deployment = replace(deployment, engine=replace(deployment.engine, arguments=flags))
    deployment = replace(deployment, instances=instances)
    arguments = arguments_of(deployment)
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
    arguments = arguments_of(deployment)
    assert not {"-O", "3", "-ep"} & {*arguments} and after(deployment, "--seed") == "4"


def test_an_unknown_size_of_the_cache_is_refused() -> None:
    times = StepSeconds(constant=0.02, per_new=0, per_context=0)
    deployment = fleet()
    emulate = EmulateOptions(step_time=times)
    engine = replace(deployment.engine, emulate=emulate, kv_blocks=None)
    with pytest.raises(DeploymentError, match=r"holds: set engine\.emulate\.kv_tokens"):
        replace(deployment, engine=engine).check()
    known = replace(engine, emulate=replace(emulate, kv_tokens=6_400))
    assert after(replace(deployment, engine=known), "--num-gpu-blocks-override") == "201"


def test_blocks_that_a_cpu_cannot_have_hold_as_many_tokens() -> None:
    deployment = fleet()
    small = replace(deployment.engine, block_size=16, kv_blocks=401)
    deployment = replace(deployment, engine=small)
    assert after(deployment, "--block-size") == "32"
    assert after(deployment, "--num-gpu-blocks-override") == str(400 * 16 // 32 + 1)


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
    plain = read_deployment(LOCAL)
    assert in_real_time(plain) is plain
    transfer = json.loads(after(given, "--kv-transfer-config"))
    kept = transfer["kv_connector_extra_config"]["headway"]["time_to_live"]
    assert kept == 4 * 15.0


def test_each_engine_keeps_a_past_of_its_own() -> None:
    order = {"name": "boost", "past_file": "~/.cache/past"}
    given = fleet(dilation=4)
    given = replace(given, engine=replace(given.engine, order=order))
    kept = section_of(given)["headway"]["order"]["past_file"]
    assert kept == f"~/.cache/past-{given.decode[0].name}"
    assert given.engine.order == order


def test_an_order_s_rate_is_dilated_in_the_proxy_and_in_the_engines() -> None:
    order = {"name": "boost", "gamma": 0.5}
    given = replace(fleet(dilation=4), order=order)
    given = replace(given, engine=replace(given.engine, order=order))
    assert in_real_time(given).order == {"name": "boost", "gamma": 0.125}
    assert section_of(given)["headway"]["order"] == {"name": "boost", "gamma": 0.125}
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
        one.name: section_of(deployment, one)[EMULATE_SECTION]["barrier"]
        for one in deployment.instances
    }
    decode = [one.name for one in deployment.decode]
    assert [sections[name]["rank"] for name in decode] == list(range(len(decode)))
    assert len({sections[name]["file"] for name in decode}) == 1
    assert {sections[name]["patience_s"] for name in decode} == {0.2}
    assert all(sections[one.name] is None for one in deployment.prefill)
    others = replace(deployment, instances=deployment.instances[:-1])
    other = section_of(others)[EMULATE_SECTION]["barrier"]
    assert other["file"] != sections[decode[0]]["file"], "of another deployment"


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
