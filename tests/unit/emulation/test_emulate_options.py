"""What may be emulated: shipped machines, profiles, and what is said of wrong ones."""

from pathlib import Path

import msgspec
import pytest
import yaml
from measured_profiles import ENGINE, TRUE, profile_of

from data_collection.shipped_files import find_config
from rescheduler.emulation.emulate_options import (
    EMULATE_SECTION,
    EmulateConfig,
    EmulateOptions,
    KVTransfer,
    StepSeconds,
    read_emulate_config,
    read_machine,
)
from rescheduler.step_time.profile import write_profile

SHIPPED = sorted(path.stem for path in find_config("h100-llama-8b").parent.glob("*.yaml"))
STEPS = StepSeconds(constant=1e-3, per_new=1e-5, per_context=1e-8)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_machine_is_whole_and_names_its_source(name: str) -> None:
    machine = read_machine(name)
    assert machine.source and machine.kv_tokens and machine.transfer
    # A decode step of eight requests of a thousand tokens takes milliseconds on any GPU.
    assert 1e-3 < machine.step_time.of(8, 8_000) < 0.1
    assert machine.transfer.seconds(1_000) > machine.transfer.latency_s


def test_the_h100_reproduces_the_latencies_that_it_was_fitted_to() -> None:
    # NVIDIA NIM 1.8, Llama 3.1 8B, 200 tokens in and out: milliseconds between tokens.
    step = read_machine("h100-llama-8b").step_time
    for requests, seconds in ((1, 4.63e-3), (25, 5.19e-3), (50, 5.91e-3), (100, 7.57e-3)):
        new, context = 2 * requests, 300 * requests  # prompts are computed between the tokens
        assert step.of(new, context) == pytest.approx(seconds, rel=0.1)


def test_what_is_given_takes_precedence_over_the_machine() -> None:
    options = EmulateOptions(profile="h100-llama-8b", kv_tokens=5_000, dilation=3).resolved()
    machine = read_machine("h100-llama-8b")
    assert options.profile is None and options.dilation == 3
    assert (options.kv_tokens, options.step_time) == (5_000, machine.step_time)
    assert EmulateOptions(step_time=STEPS).resolved().step_time == STEPS


def test_an_engine_s_own_profile_can_be_emulated(tmp_path: Path) -> None:
    profile = profile_of(TRUE)
    write_profile(profile, tmp_path / "profile.yaml")
    machine = read_machine(str(tmp_path / "profile.yaml"))
    assert machine.step_time.of(10, 1_000) == pytest.approx(profile.batch.seconds(10, 1_000))
    assert (machine.machine, machine.max_num_batched_tokens) == (ENGINE.machine, 512)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[1, 2]", "not a machine"),
        ("machine: x\n", "missing required field"),
        ("{machine: x, model: y, source: z, step_time: {constant: -1}}", "step_time.constant"),
        ("batch: [1, 2]\n", "not a machine"),
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, content: str, words: str) -> None:
    file = tmp_path / "machine.yaml"
    file.write_text(content)
    with pytest.raises(ValueError, match=words) as raised:
        read_machine(str(file))
    assert str(file) in str(raised.value)


def test_what_cannot_be_found_says_what_there_is() -> None:
    with pytest.raises(ValueError, match="configs/emulate"):
        read_machine("a100")
    with pytest.raises(ValueError, match="step_time"):
        EmulateOptions().resolved()


def test_an_engine_reads_what_a_deployment_writes() -> None:
    transfer = KVTransfer(bytes_per_token=100, gigabytes_per_second=1)
    config = EmulateConfig(step_time=STEPS, transfer=transfer)
    given = {EMULATE_SECTION: msgspec.to_builtins(config)}
    assert read_emulate_config(yaml.safe_load(yaml.safe_dump(given))) == config
    for wrong in ({}, {EMULATE_SECTION: {}}, {EMULATE_SECTION: {"step_time": 3}}):
        with pytest.raises(ValueError, match=EMULATE_SECTION):
            read_emulate_config(wrong)
    telemetry = {"step_time": msgspec.to_builtins(STEPS), "telemetry": {}}
    with pytest.raises(ValueError, match="requires a forecast"):
        read_emulate_config({EMULATE_SECTION: telemetry})
