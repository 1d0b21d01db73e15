"""`headway train push` and `headway train pull`: predictors on the Hugging Face Hub."""

import json
import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from data_collection.dataset.dataset_schema import shown
from data_collection.files import find_shipped, read_text, write_text_atomically
from data_collection.hub import (
    Shared,
    pull_folder,
    refuse_license,
    refuse_repository,
    share,
)
from predictor.models.checkpoint import WEIGHTS, load_predictor
from predictor.models.checkpoint_card import checkpoint_card
from predictor.models.hidden_state_mlp import PROMPT_LAYER, CheckpointError, HiddenStateMLP
from predictor.prompts.prompt_predictor import PromptPredictor

PREDICTOR = Shared(
    kind="model",
    title="predictor",
    files=re.compile(
        r"README\.md|config\.json|model\.safetensors|dataset_card\.md|metrics\.json|report\.md"
        r"|[\w-]+\.png|embedding\.(json|safetensors)|tokenizer\.json"
    ),
    needed={
        "config.json": re.compile(r"config\.json"),
        WEIGHTS: re.compile(re.escape(WEIGHTS)),
    },
)


def push(
    checkpoint: Path,
    repository: str,
    private: bool = True,
    license: str = "apache-2.0",
    dataset: str | None = None,
    dry_run: bool = False,
) -> None:
    """Share a predictor on the Hugging Face Hub, after it was loaded.

    Its card names the serving model and shows what training and evaluation measured. The command
    prints what leaves this machine, then sends it. Logs and epochs of the training stay here. Set
    ``HF_TOKEN`` to a token that may write.

    The files replace those that the repository holds. ``--verbose`` shows the progress.

    Args:
        checkpoint: Folder of the checkpoint.
        repository: Where to, OWNER/NAME. The repository is made if there is none.
        private: Whether only you and whom you let in can read it. Use ``false`` to publish it.
        license: Identifier of the licence.
        dataset: Repository of the dataset that it was trained on, OWNER/NAME, for the card.
        dry_run: Print what would leave this machine, and send nothing.

    Raises:
        CheckpointError: the folder is not a checkpoint, or it is damaged.
        HubError: there is no token, or the Hub refuses; says why.
    """
    refuse_repository(repository)
    refuse_license(license)
    if dataset is not None:
        refuse_repository(dataset)
    source = find_shipped(checkpoint)
    if not source.is_dir():
        raise CheckpointError(f"{checkpoint}: no such folder")
    predictor = _load(source)
    names = sorted(path.name for path in source.iterdir() if path.is_file())
    files = {name: source / name for name in names if PREDICTOR.files.fullmatch(name)}
    with TemporaryDirectory(prefix="headway-") as temporary:
        written = Path(temporary)
        card = checkpoint_card(
            predictor.config(),
            _metrics(source),
            license=license,
            repository=repository,
            dataset=dataset,
        )
        write_text_atomically(written / "README.md", card)
        files["README.md"] = written / "README.md"
        contents = [
            f"the weights of a predictor for {shown(predictor.serving_model)}",
            "its card: the training's command line, machine, dataset name and results",
            *_said_of_prompts(predictor),
            f"files: {', '.join(sorted(files))}",
            f"licence {license}",
        ]
        share(files, repository, PREDICTOR, private, contents, dry_run)


def pull(repository: str, out: Path) -> None:
    """Fetch a predictor from the Hugging Face Hub, and load it to check it.

    An interrupted pull goes on when the same command is given again. Nothing of the repository is
    run. For a private one, set ``HF_TOKEN`` to a token that may read it.

    Args:
        repository: Where from, OWNER/NAME.
        out: Folder of the checkpoint; absent or empty.

    Raises:
        HubError: there is no such repository, it holds no predictor or a damaged one, ``out`` is
            in use, or the Hub does not answer.
    """
    pull_folder(repository, out, PREDICTOR, lambda folder: print(f"valid: {_said(_load(folder))}"))


def _load(folder: Path) -> HiddenStateMLP:
    predictor = load_predictor(str(folder))
    if predictor.layer == PROMPT_LAYER:
        PromptPredictor.load(str(folder))
    return predictor


def _said(predictor: HiddenStateMLP) -> str:
    reads = "prompts" if predictor.layer == PROMPT_LAYER else "hidden states"
    return f"a {predictor.kind} predictor that reads {reads} of {shown(predictor.serving_model)}"


def _said_of_prompts(predictor: HiddenStateMLP) -> list[str]:
    if predictor.layer != PROMPT_LAYER:
        return []
    return ["the tokens that all prompts began and ended with, such as a shared system prompt"]


def _metrics(folder: Path) -> dict[str, Any] | None:
    """Return what `headway evaluate` measured, if it wrote into the checkpoint's folder."""
    path = folder / "metrics.json"
    if not path.is_file():
        return None
    try:
        metrics = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(metrics, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return metrics
