"""A compiler that Triton can find and that compiles nothing: kernels are interpreted."""

from triton.backends.compiler import BaseBackend, GPUTarget


class InterpreterBackend(BaseBackend):
    """Stands for the interpreter where Triton looks for a backend of the target."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        return target.backend == "cpu"


InterpreterBackend.__abstractmethods__ = frozenset()
