"""Deployment files: what they say, and what is wrong with one."""

from pathlib import Path
from typing import Any

import pytest

from rescheduler.engines.deployment import Deployment, DeploymentError, read_deployment

LOCAL = Path(__file__).parents[3] / "configs" / "serve" / "local-pd.yaml"

PREFILL = "{name: p, role: prefill, url: 'http://127.0.0.1:1'}"
DECODE = "{name: d, role: decode, url: 'http://127.0.0.1:2'}"
ALONE = f"model: m\ninstances: [{DECODE}]\n"
BOTH = f"model: m\ninstances: [{PREFILL}, {DECODE}]\n"


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
