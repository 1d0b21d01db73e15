"""What a learned router sees, decides on, and is rewarded for; read from YAML."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from rescheduler.papers.jain_router.workload_impact import V100_GRADIENTS, ImpactRules
from rescheduler.routing.learned.router_state import StateScales
from rescheduler.step_time.profile import load_profile

__all__ = ["RouterConfig"]

_POSITIVE = (
    *("interval", "long_prompt", "prompt_seconds", "token_seconds"),
    *("tolerance_s", "guidance_tolerance_s", "max_seconds"),
)
_MANY_REQUESTS = 32.0
"""A count of requests that the state shows as 1."""
_LONG_WAIT_S = 2.0
"""Seconds until the first request ends that the state shows as 1."""
_MUCH_CAPACITY = 0.2
"""Free share of a KV cache that the state shows as 1."""


@dataclass(frozen=True)
class RouterConfig:
    r"""The task that a router learns.

    Attributes:
        interval: Δt, seconds between two decisions.
        edges: output tokens from which the buckets of the state begin, ascending from 0.
        long_prompt: tokens of a prompt that the state shows as 1.
        prompt_seconds: of a prompt token, when a request is alone.
        token_seconds: of a decoded token, when a request is alone; an average decode batch.
        completion_reward: r_w of equation 3.
        profile: file of `headway profile` whose gradients replace the paper's, and the three times.
        balance: α of the impact.
        tolerance_s: ε of equation 1, in r_mixing.
        guidance_tolerance_s: ε in h. Above it the impact on a prompt counts in units of ε, so that
            this is how much h weighs beside the rewards.
        max_seconds: of the simulation, at which an episode is cut.
    """

    interval: float = 0.02
    edges: tuple[int, ...] = (0, 256, 2048)
    long_prompt: int = 200
    prompt_seconds: float = V100_GRADIENTS[0]
    token_seconds: float = 0.02
    completion_reward: float = 60.0
    profile: Path | None = None
    balance: float = 0.5
    tolerance_s: float = 2.0
    guidance_tolerance_s: float = 0.05
    max_seconds: float = 1000.0

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"router.{name} must be above 0, not {getattr(self, name)}")
        if not 0 <= self.balance <= 1:
            raise ValueError(f"router.balance must be in [0, 1], not {self.balance}")
        ascending = all(low < high for low, high in pairwise(self.edges))
        if not self.edges or self.edges[0] != 0 or not ascending:
            raise ValueError(f"router.edges must ascend from 0, not {list(self.edges)}")

    def impact(self) -> ImpactRules:
        """Return the constants of the workload impact, as r_mixing takes them.

        The gradients are the paper's, or the least-squares slopes of the profile (§3).

        Raises:
            ValueError: ``profile`` is not a profile; so `guide`, `alone` and `scales`.
        """
        gradients = V100_GRADIENTS
        if self.profile is not None:
            found = load_profile(self.profile).gradients
            gradients = found.prompt, found.decode
        return ImpactRules(*gradients, float(self.balance), float(self.tolerance_s))

    def guide(self) -> ImpactRules:
        """Return the constants of the workload impact, as h takes them."""
        return self.impact()._replace(tolerance=float(self.guidance_tolerance_s))

    def alone(self) -> tuple[float, float]:
        """Return the seconds of a prompt token and of a decoded token of a lone request."""
        if self.profile is None:
            return float(self.prompt_seconds), float(self.token_seconds)
        profile = load_profile(self.profile)
        return profile.gradients.prompt, profile.batch.seconds(1, 0)

    def scales(self, slots: int) -> StateScales:
        """Return what the state's numbers are measured in, of instances with so many slots."""
        return StateScales(
            slots=float(slots),
            requests=_MANY_REQUESTS,
            prompt_tokens=float(self.long_prompt),
            seconds_per_token=self.alone()[1],
            seconds=_LONG_WAIT_S,
            capacity=_MUCH_CAPACITY,
        )
