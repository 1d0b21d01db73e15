"""The driver of the CPU, which vLLM takes for the sign that Triton works."""

import torch
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase


class CpuDriver(DriverBase):
    """One device, the CPU."""

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cpu", 0, 0)

    def get_device_interface(self) -> object:
        return torch.cpu


CpuDriver.__abstractmethods__ = frozenset()
