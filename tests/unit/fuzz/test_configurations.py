"""Configuration files, damaged: each is read, or refused in a line that says why."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_for import command_for
from damage import ODD_VALUES, changed, damaged_bytes
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from measured_profiles import TRUE, profile_of

from data_collection.capture.capture_config import read_capture_config
from predictor.live.engine_forecasts import LiveConfig
from rescheduler.batching.batching_config import read_batching_config
from rescheduler.commands import command
from rescheduler.commands.command_line import main
from rescheduler.engines.deployment import DeploymentError, read_deployment
from rescheduler.step_time.profile import load_profile, write_profile
from rescheduler.transfer.migration_params import connector_config

CONFIGS = Path(__file__).parents[3] / "configs"

ODD_YAML = [
    "2001-13-01",
    "0000-01-01",
    '!!int ""',
    "!!bool x",
    "!!timestamp x",
    "!!python/name:os.system",
    "!!binary é",
    "0x_",
    "0b_",
    ".inf",
    ".nan",
    "1e400",
    "1" + "0" * 5000,
    '"\\ud800"',
    "&a [*a]",
    "*a",
    "{? [a] : b}",
    "{<<: 3}",
    "=",
    "[" * 2000,
    "[",
    "\t",
    "%",
    "@",
    "\x00",
    "---",
]


@st.composite
def damaged_yaml(draw: st.DrawFn, text: str) -> bytes:
    """A YAML document, changed as a value, as text, or as bytes."""
    how = draw(st.sampled_from(["value", "value", "text", "bytes"]))
    if how == "value":
        value = draw(changed(yaml.safe_load(text), ODD_VALUES))
        return yaml.safe_dump(value, allow_unicode=draw(st.booleans())).encode()
    if how == "bytes":
        return draw(damaged_bytes(text.encode()))
    lines = text.splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    key = lines[at].partition(":")[0]
    lines[at] = f"{key}: {draw(st.sampled_from(ODD_YAML))}"
    return "\n".join(lines).encode()


def files(*folders: str) -> st.SearchStrategy[tuple[Path, bytes]]:
    """The configuration files of some folders, each with its damaged text."""
    paths = [path for folder in folders for path in sorted((CONFIGS / folder).glob("*.yaml"))]
    return st.sampled_from(paths).flatmap(
        lambda path: st.tuples(st.just(path), damaged_yaml(path.read_text()))
    )


@fuzzed()
@given(content=files("serve"))
def test_a_deployment_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, content: tuple[Path, bytes]
) -> None:
    path = tmp_path_factory.getbasetemp() / "deployment.yaml"
    path.write_bytes(content[1])
    try:
        read_deployment(path)
    except DeploymentError as error:
        assert str(error).startswith(str(path))
        assert "\n" not in str(error)


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("profile") / "profile.yaml"
    write_profile(profile_of(TRUE), path)
    return path.read_text()


@fuzzed()
@given(data=st.data())
def test_a_profile_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, profile: str, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "profile.yaml"
    path.write_bytes(data.draw(damaged_yaml(profile)))
    try:
        load_profile(path)
    except ValueError as error:
        assert str(error).startswith(str(path))


SECTIONS: list[tuple[Callable[[Any], Any], dict[str, Any]]] = [
    (
        read_batching_config,
        {
            "headway": {
                "batching": {"profile": "p", "ttft_s": 2.0},
                "forecast": {"checkpoint": "c"},
            }
        },
    ),
    (
        functools.partial(read_capture_config, config_type=LiveConfig),
        {
            "headway": {
                "k": 20,
                "record": {"path": "dataset", "dtype": "float16"},
                "forecast": {"checkpoint": "c", "telemetry": {"bind": "tcp://127.0.0.1:1"}},
            }
        },
    ),
    (connector_config, {"headway": {"control": "tcp://127.0.0.1:1", "time_to_live": 15}}),
]


@fuzzed()
@given(
    section=st.sampled_from(SECTIONS).flatmap(
        lambda one: st.tuples(st.just(one[0]), changed(one[1]))
    )
)
def test_a_section_of_an_engine_is_read_or_refused(
    section: tuple[Callable[[Any], Any], Any],
) -> None:
    read, value = section
    if isinstance(value, dict):  # vLLM checks so much
        try:
            read(value)
        except ValueError as error:
            assert 0 < len(str(error).splitlines()) < 20


@pytest.fixture(scope="module")
def parsers_once() -> Iterator[None]:
    """Make the parser of each verb once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "command_parser", functools.cache(command.command_parser))
        yield


@pytest.mark.usefixtures("parsers_once")
@fuzzed()
@given(content=files("collect", "predictor", "prompt_length", "rl", "simulate", "papers", "serve"))
def test_a_command_reads_or_refuses_its_configuration(
    tmp_path_factory: pytest.TempPathFactory,
    content: tuple[Path, bytes],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config, damaged = content
    path = tmp_path_factory.getbasetemp() / "config.yaml"
    path.write_bytes(damaged)
    capsys.readouterr()
    try:
        status = main([*command_for(config), "--config", str(path), "--print_config"])
    except SystemExit as exit:
        status = int(exit.code or 0)
    reported = capsys.readouterr().err
    assert status in (0, 1, 2)
    assert "Traceback" not in reported and len(reported.splitlines()) < 20
    assert (status == 0) == (not reported)
