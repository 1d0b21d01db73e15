"""What capture cannot read is refused at start-up, by name, from vLLM's own configuration."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from forked_vllm import run_forked
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from benchmarks.support.offline_engine import record
from data_collection.capture.capture_config import CaptureConfig, read_capture_config
from data_collection.capture.vllm_adapter import is_recording_rank, refuse_unsupported
from data_collection.workload.engine_options import engine_arguments
from rescheduler.transfer.vllm_connector_scheduler import refuse_unsupported as refuse_unmovable


def vllm_config(model: Path, **options: Any) -> Any:
    capture = {"headway": {"k": 20}}
    arguments = engine_arguments(str(model), capture, {"enforce_eager": True, **options})
    return EngineArgs(**arguments).create_engine_config()


def test_a_plain_engine_is_accepted(smollm2: Path) -> None:
    refuse_unsupported(vllm_config(smollm2))


def test_speculative_decoding_is_refused(smollm2: Path) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    with pytest.raises(ValueError, match=r"speculative decoding is on.*drop --speculative-config"):
        refuse_unsupported(vllm_config(smollm2, speculative_config=ngram))


def test_a_pooling_model_is_refused(smollm2: Path) -> None:
    with pytest.raises(ValueError, match="this is a pooling model"):
        refuse_unsupported(vllm_config(smollm2, runner="pooling"))


def test_a_diffusion_model_is_refused(smollm2: Path) -> None:
    config = vllm_config(smollm2)
    config.model_config.is_diffusion = True  # which vLLM reads from the model's files
    with pytest.raises(ValueError, match="this is a diffusion model"):
        refuse_unsupported(config)


def test_the_v2_runner_of_an_xpu_is_refused(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config(smollm2)
    monkeypatch.setattr(type(current_platform), "is_xpu", lambda platform: True)
    refuse_unsupported(config)  # its V1 runner is read
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match=r"XPUs have a V2 .*; set VLLM_USE_V2_MODEL_RUNNER=0"):
        refuse_unsupported(config)


def test_a_scheduler_that_does_not_report_ends_is_refused(smollm2: Path) -> None:
    with pytest.raises(ValueError, match="--scheduler-cls data_collection"):
        refuse_unsupported(vllm_config(smollm2, scheduler_cls=None))


SPECULATION = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"speculative_config": SPECULATION}, "speculative decoding is on"),
        ({"runner": "pooling"}, "this is a pooling or diffusion model"),
        ({"is_diffusion": True}, "this is a pooling or diffusion model"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism is on"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism is on"),
        ({"groups": 2}, "its KV cache has 2 groups"),
    ],
    ids=lambda value: "".join(value) if isinstance(value, dict) else "",
)
def test_requests_that_cannot_move_are_refused(
    smollm2: Path, change: dict[str, Any], reason: str
) -> None:
    options = {
        name: value for name, value in change.items() if name in ("speculative_config", "runner")
    }
    config, cache = vllm_config(smollm2, **options), SimpleNamespace(kv_cache_groups=[None])
    refuse_unmovable(vllm_config(smollm2), cache)
    cache.kv_cache_groups *= change.get("groups", 1)
    for name in set(change) & set(vars(config.parallel_config)):
        setattr(config.parallel_config, name, change[name])
    config.model_config.is_diffusion = change.get("is_diffusion", False)
    with pytest.raises(ValueError, match=f"cannot move: {reason}.*remove `control`"):
        refuse_unmovable(config, cache)


def test_prefill_context_parallelism_is_refused(smollm2: Path) -> None:
    config = vllm_config(smollm2)
    config.parallel_config.prefill_context_parallel_size = 2
    with pytest.raises(ValueError, match="prefill context parallelism is on"):
        refuse_unsupported(config)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"kk": 20}, "unknown field `kk`.*Keys known to this worker: k, record"),
        ({"k": 0}, "`int` >= 1.*at `[$].k`"),
        ({"record": {"path": "x", "dtype": "int8"}}, "int8.*in 'record': path, dtype"),
        ({"record": {}}, "missing required field `path`"),
    ],
)
def test_the_capture_section_is_validated(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_capture_config({"headway": section}, CaptureConfig)


def test_a_missing_capture_section_shows_one() -> None:
    with pytest.raises(ValueError, match=r"no 'headway' section; give for example"):
        read_capture_config({"headwy": {}}, CaptureConfig)


def test_only_the_first_tensor_parallel_rank_of_the_last_stage_records() -> None:
    ranks = [(tp, pp) for pp in range(3) for tp in range(4) if is_recording_rank(tp, pp, 3)]
    assert ranks == [(0, 2)]


def test_an_engine_refuses_when_it_starts(smollm2: Path, tmp_path: Path) -> None:
    ngram = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    dataset, options = tmp_path / "dataset", {"speculative_config": ngram}
    with pytest.raises(RuntimeError, match="cannot capture hidden states: speculative decoding"):
        run_forked(record, str(smollm2), str(dataset), options, [[1, 2, 3]], 4)
    assert not dataset.exists()
