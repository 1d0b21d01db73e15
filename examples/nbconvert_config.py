"""How notebooks are executed: `make notebook`, and the test of them."""

import atexit
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp

from traitlets.config import get_config

c = get_config()

# Sockets in a folder instead of ports, which other processes might take.
folder = Path(mkdtemp(prefix="headway-"))
atexit.register(rmtree, folder, ignore_errors=True)
c.KernelManager.transport = "ipc"
c.KernelManager.ip = str(folder / "kernel")

# The first run compiles, and any machine may be busy. Times are in seconds.
c.ExecutePreprocessor.startup_timeout = 240
c.ExecutePreprocessor.timeout = 600  # for a cell
c.ExecutePreprocessor.iopub_timeout = 240  # for the last outputs of a cell
c.ExecutePreprocessor.raise_on_iopub_timeout = True

# What changes from run to run does not belong into the repository.
c.ExecutePreprocessor.record_timing = False
