"""What `headway doctor` says of the installation, a model, and an engine that it hears."""

import io
import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import zmq
from chosen_ports import free_port
from hypothesis import given
from hypothesis import strategies as st
from published_telemetry import Engine, endpoint_of, frames, publisher
from rich.console import Console

from data_collection import versions
from predictor.live.telemetry_messages import TelemetryError
from predictor.live.zmq_sockets import create_keys
from rescheduler.commands.command_line import main
from rescheduler.doctor import doctor as module
from rescheduler.doctor.doctor import Finding, forecast_screen, model_findings, next_commands
from rescheduler.telemetry.subscriber import first_snapshot
from rescheduler.telemetry.telemetry_view import TelemetryView

FULL, WINDOW = "full_attention", "sliding_attention"
MIMO = {"architectures": ["MiMoForCausalLM"]}
CONFIGS: list[tuple[dict[str, Any], tuple[str, str]]] = [
    ({"architectures": ["LlamaForCausalLM"]}, ("ok", "ok")),
    ({"layer_types": [FULL, FULL]}, ("ok", "ok")),
    ({"layer_types": [WINDOW, WINDOW]}, ("ok", "ok")),
    (MIMO, ("problem", "ok")),
    ({"text_config": {"layer_types": [FULL, WINDOW]}}, ("ok", "ok")),
    ({"layer_types": [FULL, "chunked_attention"]}, ("ok", "note")),
    ({"layer_types": ["linear_attention", FULL]}, ("ok", "problem")),
    ({"layers_block_type": ["mamba", "attention"]}, ("ok", "problem")),
    ({"hybrid_override_pattern": "M-M*-"}, ("ok", "problem")),
    ({"model_type": "falcon_mamba"}, ("ok", "problem")),
    ({"model_type": "gemma3_text", "num_hidden_layers": 12}, ("ok", "ok")),
    ({"model_type": "qwen3_next", "num_hidden_layers": 8}, ("ok", "problem")),
    ({"model_type": "jamba", "num_hidden_layers": 16}, ("ok", "problem")),
    ({"model_type": "unheard-of", "mamba_d_state": 16}, ("ok", "note")),
    ({"text_config": MIMO}, ("problem", "ok")),
    ({"architectures": ["KimiLinearForCausalLM"], "linear_attn_config": {}}, ("problem", "note")),
    ({"architectures": ["BertModel"]}, ("note", "ok")),
]


def write_config(folder: Path, config: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(("config", "states"), CONFIGS, ids=str)
def test_a_model_is_judged_by_its_configuration(
    tmp_path: Path, config: dict[str, Any], states: tuple[str, str]
) -> None:
    found = model_findings(write_config(tmp_path / "model", config))
    assert [one.what for one in found] == ["model", "hidden states", "moves"]
    assert (found[1].state, found[2].state) == states
    assert all((one.remedy == "") == (one.state == "ok") for one in found)


@pytest.mark.parametrize(
    ("meminfo", "state", "found"),
    [
        ("MemTotal: 9 kB\nMemAvailable:   20971520 kB\n", "ok", "20.0 GiB available"),
        ("MemAvailable:    4194304 kB\n", "note", "4.0 GiB available: three engines"),
        ("MemFree: 1 kB\n", "ok", "unknown"),
        (None, "ok", "unknown"),
    ],
)
def test_memory_is_what_new_processes_can_have(
    tmp_path: Path, meminfo: str | None, state: str, found: str
) -> None:
    if meminfo is not None:
        (tmp_path / "meminfo").write_text(meminfo)
    memory = module._memory(tmp_path / "meminfo")
    assert memory.state == state and memory.found.startswith(found)


def test_a_port_in_use_is_named_with_another_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        taken = module._port(port)
    assert (taken.state, taken.remedy) == ("note", f"serve with --proxy.port {port + 1}")
    assert module._port(free_port()).state == "ok"


@pytest.mark.parametrize(("gib", "state"), [(1, "note"), (50, "ok")])
def test_a_disk_that_is_nearly_full_is_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gib: int, state: str
) -> None:
    usage = SimpleNamespace(free=gib << 30)
    monkeypatch.setattr(module.shutil, "disk_usage", lambda folder: usage)
    assert module._disk(tmp_path).state == state


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=8,
)
KEYS = ["architectures", "layer_types", "hybrid_override_pattern", "text_config", "model_type"]


@given(st.dictionaries(st.sampled_from(KEYS), json_values) | json_values)
def test_a_configuration_of_any_kind_is_judged_or_refused(
    tmp_path_factory: pytest.TempPathFactory, config: Any
) -> None:
    folder = tmp_path_factory.mktemp("model")
    assert model_findings(write_config(folder, config))[0].what == "model"


@pytest.mark.parametrize("model", ["no/such/folder", "./nothing", "unheard-of"])
def test_a_model_that_is_not_there_is_a_problem(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--model", model]) == 1
    assert "give an id or a folder" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "known"),
    [(f"{one}.0", True) for one in versions.SUPPORTED_VLLM]
    + [(one, False) for one in ("0.28.0", "0.34.0", "0.3", "1.32.0", "nonsense")],
)
def test_versions_outside_the_tested_ones_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, found: str, known: bool
) -> None:
    monkeypatch.setattr(module, "vllm_version", lambda: found)
    monkeypatch.setattr(module, "installed_version", lambda name: found if name == "vllm" else None)
    finding = module._vllm()
    assert (finding.state == "ok") == known
    if not known:
        assert "0.29 to 0.33" in finding.found
        assert finding.remedy == "pip install 'vllm==0.33.0'"


def rendered(view: TelemetryView, height: int = 50) -> str:
    console = Console(record=True, width=140, file=io.StringIO())
    console.print(forecast_screen(view, 140, height))
    return console.export_text()


def view_of(engine: Engine, requests: int) -> TelemetryView:
    view = TelemetryView()
    for _ in range(requests):
        view.receive(frames(engine.start()), 0.0)
        engine.decode(10)
    view.receive(frames(engine.snapshot()), 0.0)
    return view


def line_with(text: str, shown: str) -> str:
    return next(line for line in shown.splitlines() if text in line)


def test_running_requests_are_shown_soonest_first() -> None:
    shown = rendered(view_of(Engine(), 3))
    assert line_with("gpu0", shown).split() == ["gpu0", "0", "3", "2", "25%", "30"]
    rows = [line for line in shown.splitlines() if line.startswith("request-")]
    # The curves' means are 30 tokens and one for each generated.
    assert [row.split()[0] for row in rows] == ["request-3", "request-2", "request-1"]
    name, prompt, generated, median, ends, bar = rows[0].split()
    assert (name, prompt, generated) == ("request-3", "7", "10")
    # Of e^(-h/40) at the edges 20 and 100, linear between.
    assert (median, ends) == ("36", "79%")
    assert bar.strip("━") == "●"


def test_engines_that_reckon_a_prefill_budget_show_it() -> None:
    engine, view = Engine(), TelemetryView()
    snapshot = engine.snapshot()
    assert "prefill budget" not in rendered(view_of(engine, 1))
    tight = msgspec.structs.replace(snapshot.gauges, prefill_budget=-1_234.5)
    view.receive(frames(msgspec.structs.replace(snapshot, gauges=tight)), 0.0)
    shown = rendered(view)
    assert "prefill budget" in shown
    assert line_with("gpu0", shown).split()[5] == "-1,234"


def test_bars_share_one_scale() -> None:
    shown = rendered(view_of(Engine(), 3))
    medians = [row.index("●") for row in shown.splitlines() if row.startswith("request-")]
    ends = [row.rindex("━") for row in shown.splitlines() if row.startswith("request-")]
    assert medians == sorted(medians)
    assert ends == sorted(ends)
    assert max(ends) > min(ends)


def test_more_requests_than_lines_are_counted() -> None:
    shown = rendered(view_of(Engine(max_tokens=4_000), 40), height=30)
    assert sum(line.startswith("request-") for line in shown.splitlines()) == 22
    assert "and 18 more" in shown
    assert len(shown.splitlines()) < 30


def test_an_idle_engine_is_shown() -> None:
    shown = rendered(view_of(Engine(), 0))
    assert "gpu0" in shown
    assert "no request runs" in shown


def test_names_from_the_wire_cannot_steer_the_terminal() -> None:
    engine, wild = Engine(), "[red]\x1b[2J\n[/x]"
    engine.start()
    engine.running[wild] = msgspec.structs.replace(engine.running["request-1"], request_id=wild)
    engine.generated[wild] = 0
    shown = rendered(view_of(engine, 0))
    assert "\x1b" not in shown
    assert "[red]\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}[/x]" in shown


@contextmanager
def publishing(*messages: list[bytes], keys: Path | None = None) -> Iterator[str]:
    """Publish the same messages all the time; yield the endpoint."""
    done = threading.Event()
    with publisher(keys, bind=True) as sender:

        def publish() -> None:
            while not done.wait(0.02):
                for message in messages:
                    sender.send_multipart(message)

        thread = threading.Thread(target=publish)
        thread.start()
        try:
            yield endpoint_of(sender)
        finally:
            done.set()
            thread.join()


def running_engine() -> list[bytes]:
    """The snapshot of an engine that runs two requests."""
    engine = Engine()
    for _ in range(2):
        engine.start()
    engine.decode(10)
    return frames(engine.snapshot())


def test_the_command_shows_an_engine_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with publishing(running_engine()) as endpoint:
        assert main(["doctor", "--telemetry", endpoint]) == 0
    shown = capsys.readouterr().out
    assert line_with("gpu0", shown).split()[:3] == ["gpu0", "0", "2"]
    assert "request-1" in shown and "request-2" in shown
    create_keys(tmp_path / "keys")
    with publishing(running_engine(), keys=tmp_path / "keys") as endpoint:
        assert main(["doctor", "--telemetry", endpoint, "--keys", str(tmp_path / "keys")]) == 0
    assert "request-2" in capsys.readouterr().out


def test_the_command_says_in_a_line_why_it_shows_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for arguments, why in (
        (["--telemetry", "tcp://10.0.0.1:5557"], "leaves the machine only with keys"),
        (["--telemetry", "127.0.0.1:5557"], "not a ZMQ endpoint"),
        (["--telemetry", "tcp://127.0.0.1:port"], "not a ZMQ endpoint"),
        (["--telemetry", "tcp://127.0.0.1:9", "--keys", str(tmp_path)], "no such key"),
        (["--keys", str(tmp_path)], "give its endpoint, too"),
        (["--telemetry", "tcp://127.0.0.1:9", "--model", "smollm2"], "not both"),
    ):
        assert main(["doctor", *arguments]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("headway doctor: ")
        assert why in line


def test_an_endpoint_where_nothing_listens_is_told_from_one_that_is_silent() -> None:
    endpoint = f"tcp://127.0.0.1:{free_port()}"
    with pytest.raises(TelemetryError, match=rf"^{endpoint}: nothing listens there"):
        first_snapshot(endpoint, seconds=0.5)
    with (
        publishing() as silent,
        pytest.raises(TelemetryError, match=rf"^{silent}: connected, but no snapshot came"),
    ):
        first_snapshot(silent, seconds=0.5)


def test_what_is_no_telemetry_is_said_to_be_none() -> None:
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as control:
        control.bind("tcp://127.0.0.1:*")
        with pytest.raises(TelemetryError, match="no telemetry endpoint"):
            first_snapshot(endpoint_of(control), seconds=1.0)
    context.term()
    with (
        publishing([frames(Engine().snapshot())[0], b"junk"]) as other,
        pytest.raises(TelemetryError, match="version of Headway"),
    ):
        first_snapshot(other, seconds=1.0)


def test_wrong_keys_are_said_to_be_wrong(tmp_path: Path) -> None:
    for name in ("engines", "others"):
        create_keys(tmp_path / name)
    with publishing(running_engine(), keys=tmp_path / "engines") as endpoint:
        assert first_snapshot(endpoint, tmp_path / "engines", seconds=60.0).instances
        with pytest.raises(TelemetryError, match="are not those of the engine"):
            first_snapshot(endpoint, tmp_path / "others", seconds=1.0)
        with pytest.raises(TelemetryError, match="give their folder as --keys"):
            first_snapshot(endpoint, seconds=1.0)
    with (
        publishing(running_engine()) as open_endpoint,
        pytest.raises(TelemetryError, match=re.escape(str(tmp_path / "others"))),
    ):
        first_snapshot(open_endpoint, tmp_path / "others", seconds=1.0)


@pytest.mark.parametrize(
    ("vllm", "device", "first"),
    [
        ("ok", "NVIDIA H200", "python -m benchmarks.gpu_check"),
        ("ok", "CPU", "headway advise"),
        ("note", "CPU", "headway advise"),
    ],
)
def test_the_doctor_says_what_to_type_next(vllm: Any, device: str, first: str) -> None:
    findings = [Finding("torch", "ok", f"2, device: {device}"), Finding("vLLM", vllm, "")]
    commands = next_commands(findings)
    assert commands[0].startswith(first)
    assert ("make install" in commands) is (vllm == "note")
    assert any("launch" in command for command in commands) is (vllm == "ok")
