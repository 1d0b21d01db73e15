"""Let vLLM fork its engine and worker processes, which on a CPU it insists on spawning.

Python imports this module when it starts, because `tests/conftest.py` puts its folder on
``PYTHONPATH``. A spawned process imports vLLM anew, which takes longer than everything else that
an engine does until it is ready; a forked one shares what its parent imported.

Collecting garbage is a fifth of the time of such an import, of which nothing is garbage.
"""

import gc
import multiprocessing
import sys
from multiprocessing.context import BaseContext

_get_context = multiprocessing.get_context


def _forking_context(method: str | None = None) -> BaseContext:
    caller = sys._getframe(1).f_globals.get("__name__", "")
    return _get_context("fork" if method == "spawn" and caller.startswith("vllm.") else method)


multiprocessing.get_context = _forking_context  # type: ignore[assignment]
gc.set_threshold(20_000, 50, 50)
