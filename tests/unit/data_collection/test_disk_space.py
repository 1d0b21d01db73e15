"""The room that a collection takes, said before its engine starts."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_collection.workload.disk_space import hidden_size, room_on_disk
from data_collection.workload.engine_options import RecordOptions


def test_it_is_what_the_longest_answers_would_take(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def said(gigabytes: float) -> str:
        usage = SimpleNamespace(free=int(gigabytes * 1e9))
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
        return room_on_disk(tmp_path, 4096, 10_000, 1024, RecordOptions(k=20, dtype="float16"))

    # 10,000 answers · 52 rows · 4,096 numbers · 2 bytes
    assert said(50).startswith("up to about 4.3 GB of hidden states (10,000 answers of up to 1,024")
    assert said(50).endswith("50.0 GB are free")
    assert said(4).startswith("warning: up to about 4.3 GB")
    assert "--record.k" in said(4)


@pytest.mark.parametrize(
    ("config", "d"),
    [
        ({"model_type": "llama", "hidden_size": 96}, 96),
        ({"model_type": "opt", "hidden_size": 96, "word_embed_proj_dim": 48}, 48),
        ({"model_type": "gpt2", "n_embd": 80}, 80),
        ({"model_type": "gemma3", "text_config": {"hidden_size": 72}}, 72),
        ({"model_type": "a model of tomorrow"}, None),
    ],
)
def test_the_width_is_that_of_the_captured_states(
    tmp_path: Path, config: dict[str, object], d: int | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert hidden_size(str(tmp_path)) == d
