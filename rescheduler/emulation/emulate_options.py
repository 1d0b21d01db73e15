"""What an emulated engine is like: its steps, its memory, its network, and its answers."""

import json
import shutil
import tempfile
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import msgspec
from huggingface_hub.constants import HF_HOME

from data_collection.files import (
    find_config,
    read_yaml,
    shipped_configs,
    write_text_atomically,
)
from data_collection.models import IDENTITY_FILE, identify
from predictor.live.engine_forecasts import TelemetryConfig
from rescheduler.emulation.step_barrier import MOST_RANKS
from rescheduler.step_time.profile import BatchTime, Profile

EMULATE_SECTION = "headway_emulate"
"""Key of vLLM's additional configuration that says what is emulated."""

MOST_EXCESS = 0.02
"""Share of time that steps may take beyond those of the emulated engine in a valid run."""

Positive = Annotated[int, msgspec.Meta(gt=0)]
Above0 = Annotated[float, msgspec.Meta(gt=0, le=1e9)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class StepSeconds(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    r"""Seconds of a step, :math:`a + b\,n_{new} + c\,L`.

    Attributes:
        constant: a, of every step.
        per_new: b, per token computed.
        per_context: c, per token of context that is read.
    """

    constant: NotNegative
    per_new: NotNegative
    per_context: NotNegative

    def of(self, new_tokens: int, context_tokens: int) -> float:
        """Return the seconds of a step."""
        return self.constant + self.per_new * new_tokens + self.per_context * context_tokens


class KVTransfer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long a KV cache is on its way to another engine, whose incoming transfers queue.

    Attributes:
        bytes_per_token: of the emulated model's cache.
        gigabytes_per_second: of the network.
        latency_s: of a transfer of any size.
    """

    bytes_per_token: Positive
    gigabytes_per_second: Above0
    latency_s: NotNegative = 0.005

    def seconds(self, tokens: int) -> float:
        """Return the seconds of a transfer."""
        return self.latency_s + tokens * self.bytes_per_token / (1e9 * self.gigabytes_per_second)


class AnswerLengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The log-normal law of the answers' lengths, in tokens.

    A request whose ``vllm_xargs`` say ``emulated_length`` has that length; the others draw theirs.
    Forecasts take the law for what is known beforehand.

    Attributes:
        median: of the lengths.
        sigma: standard deviation of their logarithm.
        longest: longer ones are cut here.
    """

    median: Above0 = 300.0
    sigma: Above0 = 1.0
    longest: Positive = 8_192


class ForecastQuality(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    r"""How well remaining lengths are forecast.

    A forecaster sees :math:`\log r + \sigma z`, and knows the law of the lengths: its curves are
    those of Bayes' rule. :math:`z = \sqrt\rho\,z_0 + \sqrt{1-\rho}\,z_n` has a part of the request
    and one that is drawn anew with every forecast.

    Attributes:
        sigma: of the error; 0: remaining lengths are known.
        correlation: :math:`\rho`, between the errors of two forecasts of a request.
        seed: of the errors.
    """

    sigma: NotNegative = 1.0
    correlation: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    seed: int = 0


class EmulatedMachine(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model on a GPU, as measured by others: a file in ``configs/emulate``.

    Attributes:
        machine: GPU, in words.
        model: that it serves.
        gpus: of a replica.
        source: of the numbers.
        step_time: seconds of its steps.
        kv_tokens: that its KV cache holds.
        max_num_batched_tokens: tokens of a step, at most.
        transfer: of its KV cache; None: as long as the transfer here takes.
    """

    machine: str
    model: str
    gpus: Positive = 1
    source: str
    step_time: StepSeconds
    kv_tokens: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    transfer: KVTransfer | None = None


MACHINE_FIELDS = ("step_time", "kv_tokens", "max_num_batched_tokens", "transfer")
"""What an `EmulatedMachine` is like, and `EmulateOptions` may say in its place."""


class BarrierGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The engines that step together, as ranks of expert parallelism do.

    Attributes:
        file: that they share.
        rank: of the engine among them.
        patience_s: for which the others wait for a rank.
    """

    file: str
    rank: Annotated[int, msgspec.Meta(ge=0, lt=MOST_RANKS)]
    patience_s: Above0


class EmulateConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``headway_emulate`` section of ``--additional-config``.

    Attributes:
        step_time: seconds of steps.
        dilation: all times are so many times as long.
        lengths: of answers.
        forecast: their quality; None: nothing is forecast.
        transfer: of KV caches.
        telemetry: where forecasts are published; None: only the engine's own scheduler has them.
        log: CSV file of the steps.
        barrier: its part in a group of engines that step together; None: it steps by itself.
    """

    step_time: StepSeconds
    dilation: Above0 = 1.0
    lengths: AnswerLengths = AnswerLengths()
    forecast: ForecastQuality | None = None
    transfer: KVTransfer | None = None
    telemetry: TelemetryConfig | None = None
    log: str | None = None
    barrier: BarrierGroup | None = None


class EmulateOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The ``engine.emulate`` of a deployment.

    Attributes:
        profile: name of a shipped machine (``configs/emulate``), or a file like it, or one of
            `headway profile`; what is given beside it takes precedence.
        step_time: seconds of steps.
        kv_tokens: that an engine's KV cache holds, unless ``engine.kv_blocks`` says.
        max_num_batched_tokens: tokens of a step, at most.
        transfer: of KV caches between engines; None: as long as the transfer here takes.
        dilation: all times are so many times as long, so that few cores keep up with many engines.
        lengths: of the answers.
        forecast: quality of the engines' forecasts; None: there are none.
        prompt_forecast: quality of the proxy's, of requests that state ``emulated_length``, before
            an engine has computed anything; None: there are none.
        logs: folder of a CSV file of steps for each engine; None: they are not logged.
        barrier: the decode engines step together, each step as long as the longest of them, as
            ranks of expert parallelism do; they must run on one machine.
    """

    profile: str | None = None
    step_time: StepSeconds | None = None
    kv_tokens: Positive | None = None
    max_num_batched_tokens: Positive | None = None
    transfer: KVTransfer | None = None
    dilation: Annotated[float, msgspec.Meta(ge=1, le=1000)] = 1.0
    lengths: AnswerLengths = AnswerLengths()
    forecast: ForecastQuality | None = ForecastQuality()
    prompt_forecast: ForecastQuality | None = None
    logs: str | None = None
    barrier: bool = False

    def resolved(self) -> "EmulateOptions":
        """Return the options with what their profile says, and no profile.

        Raises:
            ValueError: there is no such profile, or nothing says how long steps take.
        """
        found = self
        if self.profile is not None:
            machine = read_machine(self.profile)
            missing = [name for name in MACHINE_FIELDS if not getattr(self, name)]
            given = {name: getattr(machine, name) for name in missing}
            found = msgspec.structs.replace(self, profile=None, **given)
        if found.step_time is None:
            raise ValueError("give a profile, or step_time: how long steps take")
        return found


def read_emulate_config(additional_config: Mapping[str, Any]) -> EmulateConfig:
    """Validate what vLLM's additional configuration says of an emulated engine.

    Raises:
        ValueError: it says nothing, or something is wrong.
    """
    given = additional_config.get(EMULATE_SECTION)
    try:
        config = msgspec.convert(given, EmulateConfig)
    except msgspec.ValidationError as error:
        raise ValueError(f"--additional-config, section {EMULATE_SECTION!r}: {error}") from error
    if config.telemetry is not None and config.forecast is None:
        raise ValueError(
            f"--additional-config, section {EMULATE_SECTION!r}: telemetry requires a forecast"
        )
    return config


def read_machine(name: str) -> EmulatedMachine:
    """Return a shipped machine, or that of a file: one like those shipped, or an engine's profile.

    Raises:
        ValueError: there is none, or it cannot be read; says where.
    """
    try:
        path = find_config(name)
    except ValueError as error:
        machines = ", ".join(shipped_configs("emulate"))
        raise ValueError(
            f"{error}; shipped are {machines}; `headway profile` measures another"
        ) from error
    values: Any = read_yaml(path)
    is_profile = isinstance(values, dict) and "batch" in values
    try:
        if not is_profile:
            return msgspec.convert(values, EmulatedMachine)
        profile = msgspec.convert(values, Profile)
    except msgspec.ValidationError as error:
        raise ValueError(f"{path}: not a machine to emulate: {error}") from error
    engine, batch = profile.engine, BatchTime(*profile.batch)
    return EmulatedMachine(
        machine=engine.machine,
        model=engine.model,
        source="headway profile",
        step_time=StepSeconds(**batch._asdict()),
        max_num_batched_tokens=engine.max_num_batched_tokens,
    )


_GENERATION = "generation_config.json"
_GENERATION_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id")
"""Its defaults for sampling would be refused of clients that have not asked for them."""
_TOKENIZER = (
    "chat_template.jinja",
    "merges.txt",
    "special_tokens_map.json",
    "tekken.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
MOST_TOKENS = 131_072
"""Of a context."""
_WIDTH = 64  # 512 bytes of KV cache a token


def emulated_model(model: str) -> Path:
    """Return the folder of a model of one layer, with the tokenizer and the name of another.

    Its weights are drawn by vLLM (``--load-format dummy``), and never used. Of a Hugging Face id
    the tokenizer and configuration are downloaded, no weights.

    Raises:
        ValueError: the model has no tokenizer, or its configuration cannot be read.
    """
    source = _with_tokenizer(model)
    config, generation = _configs(source)
    name_of_model = identify(model).name
    files = [source / name for name in _TOKENIZER if (source / name).is_file()]
    digest = sha256(json.dumps([config, generation, name_of_model]).encode())
    for file in files:
        digest.update(file.read_bytes())
    folder = Path(HF_HOME) / "headway" / f"emulated-{digest.hexdigest()[:12]}"
    if (folder / IDENTITY_FILE).is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".emulated-") as temporary:
        made = Path(temporary) / "model"
        made.mkdir()
        for file in files:
            shutil.copy(file, made / file.name)
        identity = {"name": name_of_model, "revision": "emulated"}
        contents = {"config.json": config, _GENERATION: generation, IDENTITY_FILE: identity}
        for name, content in contents.items():
            write_text_atomically(made / name, json.dumps(content, indent=1) + "\n")
        try:
            made.rename(folder)
        except OSError:
            if not (folder / IDENTITY_FILE).is_file():  # else another process was first
                raise
    return folder


def _configs(source: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the configuration of the small model, and what is kept of that of generation."""
    try:
        values: dict[str, Any] = json.loads((source / "config.json").read_text())
        given: dict[str, Any] = {}
        if (source / _GENERATION).is_file():
            given = json.loads((source / _GENERATION).read_text())
        text = values.get("text_config") or values
        kept = {name: text.get(name) for name in ("bos_token_id", "pad_token_id")}
        vocabulary = int(text["vocab_size"])
        ends = (one.get("eos_token_id") for one in (text, values, given))
        eos = next((one for one in ends if one is not None and one != []), None)
        is_known = all(isinstance(one, int) for one in (eos if isinstance(eos, list) else [eos]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{source}: its configuration cannot be read: {error!r}") from error
    if not is_known:
        raise ValueError(f"{source}: its config.json has no eos_token_id, so that no answer ends")
    generation = {name: given[name] for name in _GENERATION_KEPT if name in given}
    generation.setdefault("eos_token_id", eos)
    return kept | {"eos_token_id": eos, "vocab_size": vocabulary} | _LAYER, generation


_LAYER: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": _WIDTH,
    "intermediate_size": _WIDTH,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": _WIDTH,
    "num_hidden_layers": 1,
    "max_position_embeddings": MOST_TOKENS,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 100_000,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}


def _with_tokenizer(model: str) -> Path:
    folder = Path(model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            wanted = [*_TOKENIZER, _GENERATION, "config.json"]
            folder = Path(snapshot_download(model, allow_patterns=wanted))
        except Exception as error:  # the hub raises many kinds
            raise ValueError(
                f"{model}: its tokenizer is needed, and cannot be downloaded: {error}"
            ) from error
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"{folder}: has no tokenizer.json, which an emulated engine needs")
    return folder
