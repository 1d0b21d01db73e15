"""The command ``headway``: help, configuration files, and one line for each mistake."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from checked_commands import check_mention, check_words, command_for, exit_status
from recorded_dataset import record

from rescheduler.commands.command_line import main, split_verb
from rescheduler.commands.verbs import GROUPS, VERBS

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "rescheduler"]


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("arguments", [["--help"], ["drain", "--help"], ["dataset", "--help"]])
def test_whoever_reads_the_output_may_have_read_enough(arguments: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as closed:
        ended = subprocess.run(
            [*COMMAND, *arguments], stdout=closed, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_output_that_cannot_be_written_is_an_error() -> None:
    with Path("/dev/full").open("wb") as full:
        ended = subprocess.run([*COMMAND, "--help"], stdout=full, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == 1
    assert ended.stderr == "headway --help: [Errno 28] No space left on device\n"


@pytest.mark.parametrize(
    ("arguments", "status"), [("--help", 0), ("drain --help", 0), ("keys", 2), ("doctr", 2)]
)
def test_a_closed_output_changes_no_exit_status(arguments: str, status: int) -> None:
    shell = f"{shlex.join(COMMAND)} {arguments} >&-"
    ended = subprocess.run(shell, shell=True, capture_output=True, text=True, cwd=ROOT)
    assert ended.returncode == status
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            [],
            [
                *(f"\n{group}:\n" for group in GROUPS.values()),
                *(f"\n  {name}" for name in VERBS if " " not in name),
            ],
        ),
        (["collect", "--help"], ["--prompts", "--sampling.temperature", "dataset's folder"]),
        (["dataset", "--help"], ["inspect", "validate", "merge"]),
        (["serve", "--help"], ["docs/serve.md", "--print-config", "--port", "example:"]),
        (["help", "evaluate"], ["--comparators", "checkpoint", "headway evaluate recalibrate"]),
        (["picker", "--help"], ["FULL_DUPLEX_STREAMED", "--port", "--certificate", "docs/gateway"]),
        (["train", "fit", "--help"], ["--data.dataset", "--model.help", "--patience"]),
        (["train", "fit", "--model.help", "SurvivalTraining"], ["--model.limit", "--model.noise"]),
        (["train", "fit", "--model.help", "RemainingLengthTraining"], ["--model.widths"]),
        (
            ["simulate", "--help"],
            ["--cluster.instances", "--step-time", "--json", "--ray", "cluster.instances=[8,16]"],
        ),
    ],
)
def test_help_teaches(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(*arguments) == 0
    printed = capsys.readouterr().out
    assert not [word for word in words if word not in printed], printed


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["simulate", "--cluster.instnces", "3"], "did you mean --cluster.instances?"),
        (["simulate", "--trace", "a.csv"], "trace: a file is given as --trace.path a.csv"),
        (["simulate", "--config", "MISSPELT"], "did you mean cluster.instances?"),
        (["collect", "out", "--modle=x"], "did you mean --model?"),
        (["doctor", "--quite-another-thing"], "unrecognized arguments"),
        (["advise", "trace", "--kv-capacty", "3"], "did you mean --kv-capacity?"),
        (["serve", "--proxy.prt", "3"], "did you mean --proxy.port?"),
        (["launch", "--config", "MISSPELT_PROXY"], "did you mean proxy.port?"),
        (["train", "fit", "--data.datset", "x"], "did you mean --data.dataset?"),
        (["train", "fit", "--config", "MISSPELT_PATIENCE"], "did you mean patience?"),
        (
            ["train", "fit", "--model", "SurvivalTraining", "--model.init-args.nois", "3"],
            "did you mean noise?",
        ),
        (["papers", "scalin"], "did you mean scaling?"),
        (["simulate", "--config", "bfio_tabl1"], "did you mean bfio_table1?"),
        (["simulate", "--config", "quick"], "are called quick: collect/quick, rl/quick"),
        (["colect"], "unknown verb 'colect'; did you mean collect?"),
    ],
)
def test_a_misspelt_option_or_key_is_reported_in_two_lines(
    tmp_path: Path, arguments: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files = {
        "MISSPELT": "clustr: {instances: 3}\n",
        "MISSPELT_PROXY": "model: m\ninstances: []\nproxi: {port: 3}\n",
        "MISSPELT_PATIENCE": "patienc: 3\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    given = [str(tmp_path / word) if word in files else word for word in arguments]
    assert exit_status(*given) == 2
    reported = capsys.readouterr().err
    assert meant in reported and reported.count("\n") == 2, reported


def printed_by(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What a verb prints as its configuration."""
    assert exit_status(*arguments, "--print-config") == 0
    printed: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return printed


def assert_read_back(
    printed: dict[str, Any], verb: Sequence[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Assert that a verb reads what it prints as its configuration, and prints the same again."""
    file = folder / "printed.yaml"
    file.write_text(yaml.safe_dump(printed))
    assert printed_by([*verb, "--config", str(file)], capsys) == printed
    check_words(["headway", *verb, "--config", str(file)])


MACHINES = ROOT / "configs/emulate"
"""Profiles of GPUs, which are no verb's configuration: tests/unit/emulation."""


@pytest.mark.parametrize(
    "config",
    sorted({*(ROOT / "configs").rglob("*.yaml")} - {*MACHINES.iterdir()}),
    ids=lambda p: p.name,
)
def test_every_configuration_file_is_accepted(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = command_for(config)
    printed = printed_by([*arguments, "--config", str(config)], capsys)
    given = yaml.safe_load(config.read_text())
    assert set(given) <= set(printed)
    if arguments[0] == "train":
        assert given["model"]["init_args"].items() <= printed["model"]["init_args"].items()
    assert_read_back(printed, split_verb(arguments)[0].split(), tmp_path, capsys)
    if config.parent.name == "serve":
        assert exit_status("launch", "--print", "--config", str(config)) == 0


REQUIRED = {
    "model": "smollm2",
    "collect": "out",
    "dataset inspect": "dataset",
    "dataset validate": "dataset",
    "dataset merge": "a b merged",
    "dataset transcripts": "dataset mine.parquet",
    "dataset push": "dataset me/lengths",
    "dataset pull": "me/lengths out",
    **{
        f"train {name}": "--model SurvivalTraining --data.dataset dataset"
        for name in ("fit", "validate", "test")
    },
    "train tune": "dataset",
    "train push": "checkpoint me/predictor",
    "train pull": "me/predictor out",
    "evaluate": "dataset checkpoint",
    "evaluate recalibrate": "checkpoint finished out",
    "launch": "--config local-pd --serve",
    "serve": "--config serve/local-pd",
    "coordinator": "--config local-pd --coordinator.endpoint tcp://127.0.0.1:5",
    "picker": "--config local-replicas.yaml",
    "batch": "asked.jsonl",
    "ray launch": """--model smollm2 --ray {"instances":[{"role":"decode"}]}""",
    "drain": "decode-0 --config configs/serve/local-pd.yaml",
    "profile": "out",
    "keys": "folder",
    "advise": "trace",
    "rehearse": "trace --config local-pd",
    "simulate": "--out out --vary cluster.slots=[4]",
    "papers scaling": "--out out --config bfio_theory",
    "papers barrier-tax": "--out out --config barrier_tax",
    "papers rescheduling": "--out out --config star_two",
    "papers fairbatching": "--out out --config fairbatching_node",
    "papers train-router": "--out out",
    "papers train-length": "dataset prompts",
}


@pytest.mark.parametrize("verb", [name for name, verb in VERBS.items() if verb.function])
def test_every_verb_prints_its_help_and_reads_the_configuration_that_it_prints(
    verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(*verb.split(), "--help") == 0
    shown = capsys.readouterr().out
    assert "--config" in shown and "  --print-config  " in shown
    assert not re.search(r"(?<!-)--[a-z.]*_", shown), "options are spelt with dashes"
    assert not re.search(r"<class|(?<!model)\.help\b|skip_default", shown), "no jargon of a library"
    printed = printed_by([*verb.split(), *REQUIRED.get(verb, "").split()], capsys)
    assert_read_back(printed, verb.split(), tmp_path, capsys)


@pytest.mark.parametrize("name", [name for name, verb in VERBS.items() if verb.function])
def test_the_example_of_a_verb_can_be_run(name: str) -> None:
    example = VERBS[name].example
    assert example.startswith(f"headway {name}")
    files = {"my-deployment.yaml": "local-pd", "my-ray.yaml": "local-pd"}
    if name in ("coordinator", "ray launch") or name.startswith(("train ", "ray ")):
        check_mention([files.get(word, word) for word in example.split()])
    else:
        check_words(shlex.split(example))


def test_the_keys_of_a_deployment_are_options_that_the_help_leaves_to_the_documentation(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert exit_status("serve", "--help") == 0
    assert "--proxy." not in capsys.readouterr().out.replace("--proxy.port 9000", "")
    printed = printed_by(["serve", "--config", "local-pd", "--proxy.port", "9000"], capsys)
    assert printed["proxy"]["port"] == 9000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["launch"], "to try a shipped one: --config local-pd"),
        (["papers", "zzz"], "one of scaling, barrier-tax"),
        (["train", "fit", "--data.dataset", "x"], "--config survival or --config star"),
        (["launch", "--config", "INDENT"], "INDENT, line 3, column 2: did not find expected"),
    ],
)
def test_a_usage_error_says_what_to_type(
    tmp_path: Path, arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "INDENT").write_text("model: smollm2\nproxy: {}\n bad: 3\n")
    assert exit_status(*(str(tmp_path / one) if one == "INDENT" else one for one in arguments)) == 2
    reported = capsys.readouterr().err
    assert said in reported and reported.count("\n") == 2, reported


def test_options_are_spelt_with_dashes_or_underscores(capsys: pytest.CaptureFixture[str]) -> None:
    local = ["launch", "--config", str(ROOT / "configs/serve/local-pd.yaml")]
    given = ["--proxy.pool-seconds", "7", "--engine.kv_blocks=9", "--at-once", "2", "--serve"]
    more = ["--migration.interval-seconds", "3", "--only", "decode-0", "decode-1"]
    assert exit_status(*local, *given, *more, "--print-config") == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["proxy"]["pool_seconds"] == 7.0 and printed["engine"]["kv_blocks"] == 9
    assert printed["at_once"] == 2 and printed["serve"] is True
    assert printed["migration"] == {"name": "survival", "interval_seconds": 3}
    assert printed["only"] == ["decode-0", "decode-1"]


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_is_that_of_the_installation(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([flag]) == 0
    assert capsys.readouterr().out == f"headway {metadata.version('headway')}\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["launch", "--config", "{tmp}/role.yaml"], "'decoder' is not one of prefill, decode"),
        (["launch", "--config", "local-pd", "--emulate", "a100"], "shipped are h100-llama-8b"),
        (["evaluate", "{tmp}/none", "{tmp}/none"], "none: no such folder"),
        (["batch", "{tmp}/none.jsonl"], "none.jsonl: "),
        (["collect", "{tmp}/out", "--prompts", "{tmp}/empty.jsonl"], "no prompts in it"),
        (["collect", "{tmp}/out", "--prompts", "{tmp}/bad.jsonl"], "bad.jsonl, line 2: not JSON"),
        (["collect", "{tmp}/out", "--record.k", "0"], "`int` >= 1"),
        (["collect", "{tmp}/out", "--model", "smollm3"], "unknown model 'smollm3'"),
        (["collect", "{tmp}/out", "--model", "{tmp}"], "no config.json"),
        (["collect", "{tmp}/dataset"], "recorded with model = 'acme/small-model'"),
        (["model", "smollm3"], "unknown model 'smollm3'"),
        (["dataset", "inspect", "{tmp}/none"], "no such folder"),
        (["dataset", "validate", "{tmp}"], "not a dataset recorded by Headway"),
        (["advise", "{tmp}/none"], "none"),
        (["demo", "--pairs", "13"], "--pairs must be between 1 and 12, not 13"),
        (["demo", "--record", "{tmp}/log"], "--record is of an emulated fleet"),
        (["demo", "--emulate", "x", "--engines", "65"], "--engines must be between 1 and 64"),
        (["demo", "--emulate", "x", "--config", "local-pd"], "leave --config out"),
        (["advise", "{tmp}/bad.jsonl"], "bad.jsonl"),
        (["rehearse", "{tmp}/none", "--config", "local-pd"], "no GPU to emulate"),
        (["rehearse", "{tmp}/none", "--config", "emulated-fleet"], "none"),
        (
            ["evaluate", "{tmp}/dataset", "{tmp}", "--prompt-checkpoint", "{tmp}"],
            "give --forecasts, too",
        ),
        (
            ["evaluate", "{tmp}", "{tmp}", "--part", "all", "--comparators.kaplan_meier", "{{}}"],
            "leaves nothing that comparators could learn from",
        ),
        (["simulate", "--trace", "{{path: {tmp}/none}}"], "none"),
        (["simulate", "--json", "{tmp}"], "is a folder; name a file"),
        (["simulate", "--policies", "fastest"], "no routing policy 'fastest'"),
        (["simulate", "--forecast", "{{name: none}}", "--policies", "bfio"], "needs forecasts"),
        (["train", "tune", "{tmp}/none"], "no such folder"),
        (["train", "tune", "{tmp}/dataset", "--trials", "0"], "trials must be at least 1"),
        (["evaluate", "{tmp}/dataset", "{tmp}"], "no config.json, so this is no checkpoint"),
        (
            ["train", "fit", "--model", "SurvivalTraining", "--data.dataset", "{tmp}/none"],
            "no such folder",
        ),
    ],
)
def test_a_mistake_in_the_input_is_one_line(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    (tmp_path / "bad.jsonl").write_text('{"prompt": "one"}\n{"prompt": \n')
    (tmp_path / "role.yaml").write_text(
        "model: smollm2\ninstances: [{name: a, role: decoder, url: 'http://127.0.0.1:1'}]\n"
    )
    record(tmp_path / "dataset")
    filled = [argument.format(tmp=tmp_path) for argument in arguments]
    if filled[:2] == ["train", "fit"]:
        filled += ["--out", str(tmp_path / "out"), "--trainer.enable_progress_bar", "false"]
    assert exit_status(*filled) == 1
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert message in error
    assert error.startswith(f"headway {split_verb(filled)[0]}: ")


@pytest.mark.parametrize("model", [[], ["--model.lr", "0.1"], ["--model", "PredictorTraining"]])
def test_a_training_without_a_predictor_is_a_usage_error(model: list[str]) -> None:
    assert exit_status("train", "fit", "--data.dataset", "dataset", *model) == 2


def test_the_models_folder_stands_alone_on_standard_output(
    smollm2: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["model", "smollm2"]) == 0
    assert capsys.readouterr().out == f"{smollm2}\n", "so that $(headway model smollm2) works"


@pytest.mark.parametrize("option", ["n=0", "temperature=-1", "max_tokens=0", "top_p=1.5"])
def test_sampling_that_no_engine_can_do_is_refused_before_one_starts(
    capsys: pytest.CaptureFixture[str], option: str, tmp_path: Path
) -> None:
    assert exit_status("collect", str(tmp_path / "dataset"), f"--sampling.{option}") > 0
    assert f"{option.partition('=')[0]}: " in capsys.readouterr().err
    assert not (tmp_path / "dataset").exists()
