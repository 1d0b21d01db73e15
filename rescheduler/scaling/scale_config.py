"""The options of `headway scale`, validated."""

from dataclasses import dataclass, field
from typing import Literal

from rescheduler.cluster.registry import COUNT, NOT_NEGATIVE, POSITIVE, Checked
from rescheduler.scaling.days import MINUTE, DayProfile
from rescheduler.scaling.lengths import LengthKnowledge
from rescheduler.scaling.rules import RULES
from rescheduler.scaling.simulated_day import Victim
from rescheduler.scaling.study import FIXED
from rescheduler.simulator.config.simulation_config import SLOConfig

__all__ = ["ScaleConfig"]

_MOST_PLACES = 10_000_000


@dataclass(frozen=True)
class ScaleConfig(
    Checked,
    slots=COUNT,
    keep="(0, 1)",
    peak_replicas=POSITIVE,
    rate=POSITIVE,
    period_hours="(0, 8784]",
    drain_seconds=NOT_NEGATIVE,
    least=COUNT,
    most=COUNT,
    interval="[1, inf)",
    tolerance="[0, 1)",
    stabilisation=NOT_NEGATIVE,
    training=COUNT,
    seeds=COUNT,
):
    """A comparison of rules.

    Attributes:
        rules: that are compared; all when null.
        start_seconds: until a new replica is ready, each a comparison of its own.
        machine: replicas: the name of a file in configs/emulate, or one that `headway profile`
            wrote.
        slots: requests that a replica serves at once, vLLM's max_num_seqs.
        slo: {ttft_s, tpot_s}: a request in time has its first token within the one, and takes at
            most the other for each further token on average.
        keep: share of the requests that are to be in time.
        peak_replicas: that the busiest time of a made-up day's season needs; sets the mean rate.
        rate: mean requests a second, instead.
        period_hours: of a day, and of the season that is forecast.
        times: day (made up), or recorded: the trace's own, if it lasts for days.
        day: how the rate of a made-up day varies.
        lengths: what the rules of load_ahead know of them: age (past lengths alone), recorded
            (and forecasts with the error of real ones), exact.
        victim: which replica is stopped: soonest (that empties first by forecast), newest, random.
        moves: whether what a drained replica still runs moves to others; it is cut otherwise.
        drain_seconds: until then.
        least: replicas.
        most: replicas.
        interval: seconds between two decisions.
        tolerance: of the demand, within which nothing changes.
        stabilisation: seconds for which demand must be low before replicas are stopped.
        training: days on which targets are chosen.
        seeds: days on which rules are compared.
    """

    rules: list[str] | None = None
    start_seconds: list[float] = field(default_factory=lambda: [120.0, 480.0])
    machine: str = "h100x2-llama-70b"
    slots: int = 128
    slo: SLOConfig = field(default_factory=lambda: SLOConfig(5.0, 0.1))
    keep: float = 0.99
    peak_replicas: float = 4.0
    rate: float | None = None
    period_hours: float = 24.0
    times: Literal["day", "recorded"] = "day"
    day: DayProfile = field(default_factory=DayProfile)
    lengths: LengthKnowledge = "recorded"
    victim: Victim = "soonest"
    moves: bool = True
    drain_seconds: float = 60.0
    least: int = 1
    most: int = 64
    interval: float = 15.0
    tolerance: float = 0.1
    stabilisation: float = 300.0
    training: int = 4
    seeds: int = 5

    def __post_init__(self) -> None:
        """Refuse what cannot be compared."""
        super().__post_init__()
        for rule in self.names:
            if rule not in (FIXED, *RULES):
                raise ValueError(f"no rule {rule!r}; known: {', '.join((FIXED, *RULES))}")
        if not self.names or len(set(self.names)) < len(self.names):
            raise ValueError(f"rules: at least one, none twice, not {', '.join(self.names)}")
        if not self.start_seconds or not all(0 <= one <= 7200 for one in self.start_seconds):
            raise ValueError(
                f"start_seconds: at least one, each from 0 to 7200, not {self.start_seconds}"
            )
        if len(set(self.start_seconds)) < len(self.start_seconds):
            raise ValueError(f"start_seconds: none twice, not {self.start_seconds}")
        if self.least > self.most:
            raise ValueError(f"least ({self.least}) is more than most ({self.most})")
        if self.slots * self.most > _MOST_PLACES:
            raise ValueError(
                f"slots ({self.slots}) times most ({self.most}) are more than the "
                f"{_MOST_PLACES:,} places that are simulated"
            )
        if self.slo != SLOConfig(self.slo.ttft_s, self.slo.tpot_s):
            raise ValueError("slo: ttft_s and tpot_s only; a request's tokens are averaged")
        minutes = self.period_hours * 3600 / MINUTE
        if abs(minutes / 5 - round(minutes / 5)) > 1e-6 or minutes < 60:
            raise ValueError(
                "period_hours must be a multiple of five minutes, an hour at least, not "
                f"{self.period_hours:g}"
            )

    @property
    def names(self) -> list[str]:
        """The rules that are compared."""
        return [FIXED, *RULES] if self.rules is None else self.rules
