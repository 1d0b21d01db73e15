"""What `headway doctor` says of the installation, and of a model by its configuration."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_collection import versions
from rescheduler.commands.command_line import main
from rescheduler.doctor import doctor as module
from rescheduler.doctor.doctor import model_findings

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
