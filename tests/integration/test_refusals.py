"""What Headway cannot do in an engine is refused by name, from its configuration of vLLM."""

import functools
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked_vllm import run_forked
from transformers import Qwen2Config
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.models.interfaces import SupportsEagle3
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from benchmarks.support.offline_engine import record
from data_collection.vllm_adapter import steps, support
from data_collection.vllm_adapter.emulated_runner import _least
from data_collection.vllm_adapter.steps import capture_layer, compile_apart
from data_collection.vllm_adapter.support import Part, refuse_unsupported
from data_collection.workload.engine_options import engine_arguments
from rescheduler.batching.fair_batching import rank_path
from rescheduler.emulation.vllm_refusals import RefusedRequests

HEADS: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
ATTENTION = FullAttentionSpec(block_size=16, **HEADS)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
PARTS: dict[Part, str] = {
    "capture": "Headway cannot capture hidden states: ",
    "batching": "Headway cannot form this engine's batches: ",
    "moves": "requests of this engine cannot move: ",
}


def group(spec: Any) -> SimpleNamespace:
    return SimpleNamespace(kv_cache_spec=spec)


def vllm_config(model: Path, **options: Any) -> Any:
    capture = {"headway": {"k": 20}}
    arguments = engine_arguments(str(model), capture, {"enforce_eager": True, **options})
    return EngineArgs(**arguments).create_engine_config()


@pytest.mark.parametrize(
    ("options", "changes", "parts", "problem"),
    [
        ({}, {}, "", ""),
        (
            {"speculative_config": NGRAM},
            {},
            "capture batching moves",
            "speculative decoding is on.*drop --speculative-config",
        ),
        ({"runner": "pooling"}, {}, "capture batching moves", "this is a pooling model"),
        (
            {},
            {"model_config.is_diffusion": True},  # which vLLM reads from the model's files
            "capture batching moves",
            "this is a diffusion model",
        ),
        (
            {},
            {"parallel_config.prefill_context_parallel_size": 2},
            "capture moves",
            "prefill context parallelism is on.*drop --prefill-context-parallel-size",
        ),
        (
            {},
            {"parallel_config.pipeline_parallel_size": 2},
            "batching moves",
            "pipeline parallelism is on.*use --tensor-parallel-size",
        ),
        (
            {"scheduler_cls": None},
            {},
            "capture",
            "--scheduler-cls data_collection.vllm_scheduler.HeadwayScheduler",
        ),
        (
            {"scheduling_policy": "priority"},
            {},
            "batching",
            "by priority; drop --scheduling-policy",
        ),
        (
            {"enable_chunked_prefill": False, "max_model_len": 512},
            {},
            "batching",
            "prefills are computed whole; drop --no-enable-chunked-prefill",
        ),
        (
            {},
            {"cache_config.mamba_cache_mode": "align"},
            "batching",
            "must stop where its state is cached; give --no-enable-prefix-caching",
        ),
    ],
)
def test_each_part_refuses_where_it_would_be_wrong(
    smollm2: Path, options: dict[str, Any], changes: dict[str, Any], parts: str, problem: str
) -> None:
    config = vllm_config(smollm2, **options)
    for path, value in changes.items():
        section, name = path.split(".")
        setattr(getattr(config, section), name, value)
    for part, beginning in PARTS.items():
        if part not in parts.split():
            refuse_unsupported(part, config)
            continue
        with pytest.raises(ValueError, match=f"{beginning}.*{problem}") as refused:
            refuse_unsupported(part, config)
        assert ("remove `control`" in str(refused.value)) == (part == "moves")


def test_all_that_is_in_the_way_is_named(smollm2: Path) -> None:
    config = vllm_config(smollm2)
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(
        ValueError,
        match=r"pipeline parallelism is on.*; blocks of its windows .* cannot be matched .*; "
        r"give --disable-hybrid-kv-cache-manager; or remove `control`",
    ):
        chunks = ChunkedLocalAttentionSpec(block_size=16, attention_chunk_size=64, **HEADS)
        refuse_unsupported("moves", config, [group(ATTENTION), group(chunks)])


@pytest.mark.parametrize("window", [64, 63, 65])
def test_windows_beside_whole_attention_move(smollm2: Path, window: int) -> None:
    config = vllm_config(smollm2, block_size=16)
    windows = SlidingWindowSpec(block_size=16, sliding_window=window, **HEADS)
    refuse_unsupported("moves", config, [group(ATTENTION), group(windows)])


@pytest.mark.parametrize(("block_size", "reported"), [(32, True), (16, False)])
def test_windows_whose_blocks_do_not_match_cannot_move(
    smollm2: Path, block_size: int, reported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor those of a vLLM that takes a read that failed for one that did not."""
    monkeypatch.setattr(support, "REPORTS_FAILED_READS", reported)
    config = vllm_config(smollm2, block_size=16)
    windows = SlidingWindowSpec(block_size=block_size, sliding_window=64, **HEADS)
    with pytest.raises(ValueError, match="give --disable-hybrid-kv-cache-manager"):
        refuse_unsupported("moves", config, [group(ATTENTION), group(windows)])


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("among_others", [True, False])
def test_states_that_are_no_kv_cache_cannot_move(
    smollm2: Path, alone: bool, among_others: bool
) -> None:
    """One group of Mamba layers looks like one of attention, and every move would compute anew."""
    state = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
    spec = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"a": state})
    groups = [group(spec if among_others else state), *([] if alone else [group(ATTENTION)])]
    with pytest.raises(ValueError, match=r"layers whose state is not a KV cache") as refused:
        refuse_unsupported("moves", vllm_config(smollm2), groups)
    assert "groups" not in str(refused.value)
    refuse_unsupported("moves", vllm_config(smollm2), [group(ATTENTION)])


def test_the_v2_runner_of_an_xpu_is_refused(smollm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = vllm_config(smollm2)
    monkeypatch.setattr(type(current_platform), "is_xpu", lambda platform: True)
    refuse_unsupported("capture", config)  # its V1 runner is read
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    with pytest.raises(ValueError, match=r"XPUs have a V2 .*; set VLLM_USE_V2_MODEL_RUNNER=0"):
        refuse_unsupported("capture", config)


def test_only_the_first_tensor_parallel_rank_of_the_last_stage_records(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def records(tp_rank: int, last: bool) -> bool:
        monkeypatch.setattr(steps, "get_tensor_model_parallel_rank", lambda: tp_rank)
        group = functools.partial(SimpleNamespace, is_last_rank=last)
        monkeypatch.setattr(steps, "get_pp_group", group)
        return steps.is_recording_rank()

    ranks = [(tp, last) for tp in range(3) for last in (False, True) if records(tp, last)]
    assert ranks == [(0, True)]


def test_each_data_parallel_engine_writes_its_own_steps(smollm2: Path) -> None:
    config = vllm_config(smollm2)
    assert rank_path(Path("runs/steps.csv"), config) == Path("runs/steps.csv")
    config.parallel_config.data_parallel_rank = 2
    assert rank_path(Path("runs/steps.csv"), config) == Path("runs/steps-2.csv")


def test_an_engine_refuses_when_it_starts(smollm2: Path, tmp_path: Path) -> None:
    dataset, options = tmp_path / "dataset", {"speculative_config": NGRAM}
    with pytest.raises(RuntimeError, match="cannot capture hidden states: speculative decoding"):
        run_forked(record, str(smollm2), str(dataset), options, [[1, 2, 3]], 4)
    assert not dataset.exists()


def test_a_model_that_normalizes_as_it_makes_logits_is_refused(
    smollm2: Path, tmp_path: Path
) -> None:
    """MiMo's forward pass returns states from before the final norm: all would be wrong."""
    model, dataset = tmp_path / "mimo", tmp_path / "dataset"
    model.mkdir()
    for file in smollm2.glob("*token*.json"):
        shutil.copy(file, model)
    config = Qwen2Config(
        architectures=["MiMoForCausalLM"],
        vocab_size=49_152,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    config.save_pretrained(model)
    options = {"load_format": "dummy", "max_model_len": 256}
    with pytest.raises(RuntimeError, match=r"mimo: its next tokens do not come from the hidden"):
        run_forked(record, str(model), str(dataset), options, [[1, 2, 3]], 4)
    assert not dataset.exists()


@pytest.mark.parametrize(
    ("asked", "least"),
    [
        (SamplingParams(max_tokens=700), 0),
        (SamplingParams(max_tokens=700, min_tokens=30), 30),
        (SamplingParams(max_tokens=700, ignore_eos=True), 700),
        (None, 0),
    ],
)
def test_a_client_that_wants_no_end_gets_a_script_without_one(
    asked: SamplingParams | None, least: int
) -> None:
    assert _least(asked) == least


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"logprobs": 3}, "logprobs"),
        ({"extra_args": {"emulated_length": "120"}}, "emulated_length"),
        ({"extra_args": {"emulated_seed": -1}}, "emulated_seed"),
    ],
)
def test_what_no_script_heeds_is_refused_by_name(fields: dict[str, object], name: str) -> None:
    RefusedRequests.validate_params(SamplingParams(extra_args={"emulated_length": 5}))
    with pytest.raises(ValueError, match=name):
        RefusedRequests.validate_params(SamplingParams(**fields))  # type: ignore[arg-type]


class LayeredModel(SupportsEagle3):  # type: ignore[misc]
    """A model that returns states of its layers."""

    layers: tuple[int, ...] = ()

    def set_aux_hidden_state_layers(self, layers: tuple[int, ...]) -> None:
        self.layers = layers

    def get_eagle3_default_aux_hidden_state_layers(self) -> tuple[int, ...]:
        return (2,)


@pytest.mark.parametrize(
    ("model", "layer", "changes", "problem"),
    [
        (LayeredModel(), 20, {}, ""),
        (LayeredModel(), 30, {}, ""),
        (LayeredModel(), 31, {}, "this model has 30 layers"),
        (LayeredModel(), -1, {}, "this model has 30 layers"),
        (torch.nn.Linear(1, 1), 20, {}, "returns the states of its last layer alone"),
        (LayeredModel(), 20, {"pipeline_parallel_size": 2}, "pipeline parallelism is on"),
        (LayeredModel(), 20, {"enable_dbo": True}, "drop --enable-dbo"),
    ],
)
def test_a_layer_is_captured_only_of_models_and_engines_that_return_it(
    smollm2: Path, model: Any, layer: int, changes: dict[str, Any], problem: str
) -> None:
    config = vllm_config(smollm2)
    for name, value in changes.items():
        setattr(config.parallel_config, name, value)
    runner = SimpleNamespace(get_model=lambda: model, use_aux_hidden_state_outputs=False)
    if problem:
        with pytest.raises(ValueError, match=f"cannot capture states after layer .*{problem}"):
            compile_apart(config, layer)  # what the configuration says, before the model is loaded
            capture_layer(runner, layer)
        return
    compile_apart(config, layer)
    capture_layer(runner, layer)
    assert model.layers == (layer,) and runner.use_aux_hidden_state_outputs


def test_what_is_compiled_with_a_layer_is_kept_apart(smollm2: Path) -> None:
    config = vllm_config(smollm2)
    hashes = {config.compute_hash()}
    for layer in (20, 15):
        compile_apart(config, layer)
        hashes.add(config.compute_hash())
    assert len(hashes) == 3
    assert config.additional_config["headway"] == {"k": 20}
