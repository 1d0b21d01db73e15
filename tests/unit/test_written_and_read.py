"""What one command writes, another one reads: every pair that runs in seconds, in one table.

A pair is a command on a shelf of what the commands before it have written.
"""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from batching_profile import profile_of
from checked_commands import exit_status
from msgspec.structs import replace
from recorded_dataset import new_session, record
from running_deployment import ENGINE
from shown_commands import ROOT
from training_runs import FEW_ROWS, QUIET, SURVIVAL

from rescheduler.engines.launch_local import local_deployment, write_deployment
from rescheduler.step_time.profile import BatchTime

BRIEF = (
    "--seeds 1 --cluster.instances 2 --cluster.slots 4 --policies jsq_load "
    "--trace '{name: geometric, requests: 60, mean_prompt: 50, mean_output: 40}'"
)
TINY = f"{shlex.join((*SURVIVAL, *QUIET))} {shlex.join(FEW_ROWS)}"
REPLAY = "{name: replay, recording: recorded/recording.parquet}"

PAIRS = {
    # What `collect` writes, its recorder has written here.
    "collect -> dataset inspect": "headway dataset inspect dataset",
    "collect -> dataset validate": "headway dataset validate dataset",
    "collect -> dataset merge": "headway dataset merge '[dataset, another]' merged",
    "collect -> dataset transcripts": "headway dataset transcripts dataset texts/mine.parquet",
    "dataset merge -> dataset validate": "headway dataset validate merged",
    "dataset merge -> dataset transcripts": "headway dataset transcripts merged texts/all.parquet",
    "dataset merge -> train fit": (
        "headway train fit --config configs/predictor/survival.yaml --data.dataset merged "
        f"--out of-merged {TINY}"
    ),
    "collect -> train fit, survival": (
        "headway train fit --config configs/predictor/survival.yaml --data.dataset dataset "
        f"--out survival {TINY}"
    ),
    "collect -> train fit, STAR": (
        "headway train fit --config configs/predictor/star.yaml --data.dataset dataset "
        f"--out star {shlex.join((*FEW_ROWS, *QUIET))}"
    ),
    "train fit -> evaluate": "headway evaluate dataset survival --out evaluation",
    "train fit, STAR -> evaluate": "headway evaluate dataset star --out evaluation-of-star",
    "train fit, STAR -> evaluate, as a comparator": (
        "headway evaluate dataset survival --out compared "
        "--comparators '{regressor: {checkpoint: star}}'"
    ),
    "collect -> train tune": (
        "headway train tune dataset --trials 1 --max-epochs 1 --predictor survival --out tuned"
    ),
    "train tune -> train fit": "the command that train tune prints",
    "collect, train fit -> evaluate, its forecasts": (
        "headway evaluate dataset survival --out recorded "
        "--forecasts recorded/recording.parquet --comparators '{}'"
    ),
    "evaluate -> simulate, as a trace": (
        f"headway simulate {BRIEF} --trace '{REPLAY}' --trace.requests 60"
    ),
    "evaluate -> simulate, as forecasts": (
        f"headway simulate {BRIEF} --trace '{REPLAY}' --trace.requests 60 --forecast '{REPLAY}' "
        "--policies bfio"
    ),
    "evaluate -> advise": (
        "headway advise trace.csv --recording recorded/recording.parquet --requests 1200 --seeds 2 "
        "--clock barrier"
    ),
    "train fit -> launch": "headway launch --config forecasting.yaml --print",
    # What `profile` writes, the function that writes it for `profile` has written here.
    "profile -> simulate, step times": (
        f"headway simulate {BRIEF} --step-time '{{name: profile, path: profile.yaml}}'"
    ),
    "profile -> simulate, its steps": (
        f"headway simulate {BRIEF} --step-time '{{name: table, path: steps.csv}}'"
    ),
    "profile -> simulate, a planner": (
        f"headway simulate {BRIEF} --forecast.name kaplan_meier "
        "--migration.planners '[{name: star, profile: profile.yaml}]'"
    ),
    "profile -> launch, batching": "headway launch --config replicas.yaml --print",
    "profile -> papers train-router": (
        "headway papers train-router --config configs/rl/quick.yaml --out routers --variants '[]' "
        "--seeds 1 --trace.requests 30 --router.profile profile.yaml --workers 1"
    ),
    "papers train-router -> simulate": (
        "headway simulate --config configs/simulate/instant.yaml --cluster.instances 4 --seeds 1 "
        "--trace.requests 60 --policies '[{name: rl, checkpoint: checkpoints/rl-router}]'"
    ),
    "keys -> launch": "headway launch --config across.yaml --print",
    "simulate --vary --out -> simulate --vary": (
        f"headway simulate {BRIEF} --vary cluster.slots=[4] --out swept --workers 1"
    ),
}


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory, smollm2: Path) -> Iterator[Path]:
    """A folder of what commands write."""
    folder = tmp_path_factory.mktemp("shelf")
    for name in ("configs", "checkpoints"):
        (folder / name).symlink_to(ROOT / name)
    for name in ("dataset", "another"):
        record(folder / name, new_session(f"20250101T000000-{ord(name[0])}"), prefix=name)
    profile_of(smollm2, folder / "profile.yaml", BatchTime(0.02, 1e-3, 1e-6))
    (folder / "steps.csv").write_text(
        "new_tokens,context_tokens,seconds\n"
        + "".join(f"{new},{context},{0.02 + new / 1e3 + context / 1e6}\n"
                  for new in (1, 4, 16) for context in (0, 500, 2000))
    )  # fmt: skip
    (folder / "trace.csv").write_text(
        "arrival_s,input_tokens,output_tokens\n"
        + "".join(f"{i / 5},{20 + i % 90},{5 + i * 7 % 60}\n" for i in range(200))
    )
    engine = {
        "forecasting": {"checkpoint": str(folder / "survival")},
        "replicas": {"checkpoint": None, "batching": {
            "profile": str(folder / "profile.yaml"), "ttft_s": 2.0, "tpot_s": 0.2}},
        "across": {"checkpoint": None},
    }  # fmt: skip
    for name, options in engine.items():
        described = local_deployment("smollm2", replace(ENGINE, **options), prefill=0)
        keys = str(folder / "keys") if name == "across" else None
        write_deployment(replace(described, keys=keys), folder / f"{name}.yaml")
    assert exit_status("keys", folder / "keys") == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


@pytest.mark.parametrize("pair", PAIRS)
def test_what_one_writes_another_reads(
    pair: str, shelf: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of the table: later pairs read what earlier ones have written."""
    how = PAIRS[pair]
    if pair == "train tune -> train fit":
        how = (shelf / "printed by tune").read_text()
        how = f"{how} --out tuned/best {TINY.partition(' --model')[0]}"
    assert exit_status(*shlex.split(how)[1:]) == 0, capsys.readouterr()
    printed = capsys.readouterr().out
    if pair == "collect -> train tune":
        (shown,) = re.findall(r"^ *(headway train fit .*(?:\n .*)*)$", printed, re.MULTILINE)
        (shelf / "printed by tune").write_text(" ".join(shown.replace("\\\n", " ").split()))
    if pair == "keys -> launch":
        assert str(shelf / "keys") in printed
    if pair == "train fit -> launch":
        assert str(shelf / "survival") in printed
    if pair == "profile -> launch, batching":
        assert str(shelf / "profile.yaml") in printed
