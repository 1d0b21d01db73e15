"""The commands of pages that start vLLM's server: vLLM parses them, and we our section."""

from pathlib import Path
from typing import Any

from checked_commands import VLLM, programs_of
from forked_vllm import run_forked
from shown_commands import PAGES, read_page

from data_collection.capture.capture_config import CaptureConfig, read_capture_config
from predictor.live.engine_forecasts import LiveConfig
from rescheduler.batching.batching_config import read_batching_config


def shown_engines(folder: Path) -> list[list[str]]:
    """The arguments of every server that a page starts."""
    found = []
    for path in PAGES:
        for command in read_page(path).shown("check", "nightly"):
            for words in programs_of(command.text, folder):
                if words[:3] == ["python", "-m", VLLM]:
                    found.append(words[3:])
                elif words[:2] == ["vllm", "serve"]:
                    found.append(["--model", *words[2:]])
    return found


def parsed(commands: list[list[str]]) -> list[dict[str, Any]]:
    """What vLLM's own parser makes of each, whose classes there are."""
    import pkgutil

    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    found = [vars(parser.parse_args(words)) for words in commands]
    for one in found:
        for name in (one["worker_cls"], one["scheduler_cls"], *one["middleware"]):
            if name and name != "auto":
                pkgutil.resolve_name(name)
    names = ("model", "worker_cls", "additional_config")
    return [{name: one[name] for name in names} for one in found]


def test_vllm_and_headway_read_what_the_pages_give_them(tmp_path: Path) -> None:
    commands = shown_engines(tmp_path)
    assert len(commands) == 7
    for one in run_forked(parsed, commands):
        section = one["additional_config"]
        assert one["model"]
        if not section:
            assert one["worker_cls"] == "auto"  # a connector alone
        elif "batching" in section["headway"]:
            assert read_batching_config(section).admission
        elif "predictor" in one["worker_cls"]:
            assert read_capture_config(section, LiveConfig).forecast
        else:
            assert read_capture_config(section, CaptureConfig).record
