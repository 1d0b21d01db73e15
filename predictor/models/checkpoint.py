"""Checkpoints of predictors: loading the right kind, writing one with its card."""

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Annotated, Any

import msgspec
from huggingface_hub import hf_hub_download

from data_collection.files import find_shipped, read_text, write_text_atomically
from predictor.models.hidden_state_mlp import CheckpointError, HiddenStateMLP, RemainingLengthMLP
from predictor.models.survival_mlp import SurvivalMLP

WEIGHTS = "model.safetensors"

_KINDS: dict[str, type[HiddenStateMLP]] = {
    "regression": RemainingLengthMLP,
    "survival": SurvivalMLP,
}

_Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
_Name = Annotated[str, msgspec.Meta(max_length=1000)]


class _Config(msgspec.Struct):
    """What a ``config.json`` may say; what it lacks has its predictor's own default."""

    model: _Name = ""
    model_revision: _Name = ""
    layer: _Name = ""
    normalisation: _Name = ""
    adapter: _Name = ""
    hidden_size: _Size = 1
    k: _Size = 1
    widths: Annotated[list[_Size], msgspec.Meta(max_length=100)] = []
    inputs: Annotated[list[_Name], msgspec.Meta(max_length=100)] = []
    trained_generated_tokens: tuple[_Tokens, _Tokens] = (0, 0)
    trained_remaining_tokens: tuple[_Tokens, _Tokens] = (0, 0)
    edges: Annotated[list[_Tokens], msgspec.Meta(min_length=2, max_length=1 << 16)] = []
    recalibration_nominal: list[float] = []
    recalibration_observed: list[float] = []
    state_half_life: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 0.0
    target_scale: Annotated[float, msgspec.Meta(gt=0, le=1e9)] = 1.0
    provenance: dict[str, Any] | None = None


def load_predictor(checkpoint: str) -> HiddenStateMLP:
    """Load a checkpoint from a folder, a shipped one, or the Hugging Face hub, ready to predict.

    Returns:
        A `SurvivalMLP` or a `RemainingLengthMLP`, by the ``kind`` its ``config.json`` names.

    Raises:
        CheckpointError: the folder lacks its files, or they are damaged or of no known kind.
    """
    folder = find_shipped(checkpoint)
    local = folder.exists()
    if not local:
        try:
            folder = Path(hf_hub_download(checkpoint, "config.json")).parent
        except Exception as error:  # the hub raises its own
            raise CheckpointError(
                f"{checkpoint}: neither a folder nor a readable model of the hub: {error}"
            ) from error
    config = read_config(folder)
    kind = config.get("kind")
    if local and not (folder / WEIGHTS).is_file():
        raise CheckpointError(f"{folder}: no {WEIGHTS}, so this is no checkpoint")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise CheckpointError(
            f"{checkpoint}: config.json says kind {kind!r}; known: {', '.join(_KINDS)}"
        )
    try:
        msgspec.convert(config, _Config)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{folder}/config.json: {error}") from error
    try:
        with redirect_stdout(StringIO()):  # the hub prints where it loads from
            loaded: HiddenStateMLP = _KINDS[kind].from_pretrained(
                str(folder) if local else checkpoint, strict=True
            )
    except Exception as error:  # safetensors, torch and the hub each raise their own
        raise CheckpointError(f"{checkpoint}: cannot be loaded: {error}") from error
    for name, values in loaded.state_dict().items():
        scale = name in ("input_std", "count_std")
        if not values.isfinite().all() or (scale and not (values > 0).all()):
            wrong = "values that are not above 0" if scale else "values that are no numbers"
            raise CheckpointError(f"{checkpoint}: {name} has {wrong}; train it again")
    return loaded.eval()


def read_config(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's ``config.json``.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: no config.json, so this is no checkpoint")
    try:
        config = json.loads(read_text(folder / "config.json"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder}/config.json: not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{folder}/config.json: not a JSON object")
    return config


def export_checkpoint(predictor: HiddenStateMLP, folder: Path, provenance: dict[str, Any]) -> None:
    """Write a checkpoint with its card; the weights come last, so a whole one has them."""
    predictor.provenance = provenance
    predictor._hub_mixin_config = predictor.config()
    folder.mkdir(parents=True, exist_ok=True)
    predictor.save_pretrained(folder)
    write_text_atomically(folder / "README.md", str(predictor.generate_model_card()))
