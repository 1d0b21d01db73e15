"""A plugin of vLLM's for tests, whose engines share few cores."""

_SPIN_SECONDS = 0.01


def wait_without_spinning() -> None:
    """Let an engine's processes sleep while they wait for each other.

    They would spin for a second, which is longer than a step here: an engine that waits for its
    worker would take half of the core from another engine's worker.
    """
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    SpinCondition.__init__.__defaults__ = (_SPIN_SECONDS,)
