"""How many inputs a fuzz test tries: 500, and 100,000 in the profile ``nightly``."""

from hypothesis import HealthCheck, Phase, settings

__all__ = ["fuzzed"]

_INPUTS = 500


def fuzzed(batch: int = 1) -> settings:
    """Return the settings of a test whose examples are so many inputs each.

    A failing batch is not made smaller, which takes minutes: its test says which input it was.
    """
    inputs = max(_INPUTS, settings.default.max_examples)
    phases = [phase for phase in Phase if batch == 1 or phase is not Phase.shrink]
    return settings(
        max_examples=inputs // batch,
        deadline=None,
        phases=phases,
        suppress_health_check=list(HealthCheck),
    )
