import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from data_collection.models import prepare_embedded

# What vLLM needs on a small CPU machine; set before anything imports it.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_CI_ENV", "1")  # no warm-up: nothing is compiled
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Threads that share a computation spin while they wait for each other: on a busy machine that
# makes an engine slower a hundredfold.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")  # figures open no windows
_FORKING = str(Path(__file__).with_name("forked_engines"))
sys.path.append(_FORKING)  # the forkserver has this process's path; vLLM finds a plugin there
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_FORKING, os.environ.get("PYTHONPATH")]))

# A shell's background job ignores Ctrl-C, and so would all that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The first example of a property may compile, and no test depends on the machine's load. Without
# a profile the examples are the same in every run, which then fails by a change and not by chance:
# the other profiles look for new ones.
for _name, _examples in (("default", 25), ("thorough", 500), ("nightly", 100_000)):
    settings.register_profile(
        _name,
        deadline=None,
        derandomize=_name == "default",
        max_examples=_examples,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


class GroupScheduling(LoadFileScheduling):
    """Keeps together what shares engines, models or compiled code: a file, or all of a deployment.

    The group with the most tests comes first.
    """

    def _split_scope(self, nodeid: str) -> str:
        shared = "tests/e2e/deployment/"
        return shared if nodeid.startswith(shared) else super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    return GroupScheduling(config, log)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The embedded model's folder, prepared once."""
    return prepare_embedded("smollm2")


@pytest.fixture(scope="session")
def headway_command() -> list[str]:
    """The command line of this checkout, as a user would start it."""
    return [sys.executable, "-m", "rescheduler"]
