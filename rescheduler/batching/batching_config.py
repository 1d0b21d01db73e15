"""How an engine forms its batches, as given to vLLM's own ``--additional-config``."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from data_collection.capture.capture_config import SECTION
from rescheduler.batching.batch_formation import FORMATIONS
from rescheduler.batching.objectives import TPOT_KEY, TTFT_KEY, Objectives, read_objectives

VLLM_ORDER = "vllm"
"""Formation that leaves vLLM's own order alone."""

_KEY = "batching"
_TIMED = ("fairbatching", "fairbatching_tokens", "fairbatching_fixed")
"""Formations that reckon with the seconds of a batch."""


class BatchingConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ``batching`` part of the ``headway`` section of ``--additional-config``.

    Attributes:
        formation: one of `FORMATIONS`, or ``vllm``: leave the order alone, only measure.
        profile: file that ``headway profile`` wrote for this model on this machine.
        ttft_s: seconds to the first token of requests that do not say it themselves.
        tpot_s: seconds for each token after it, likewise.
        deadlines: what those tokens are due from: ``arrival`` + TTFT, as in the paper's §3.1, or
            the ``first_token``, as TPOT is measured.
        reserve: share of both objectives that batches and budgets are not planned to use up. A
            batch planned to end when its tokens are due ends later every second time; 0 is the
            paper's.
        token_budget: tokens of a batch for those formations whose budget is fixed; what vLLM
            takes at most when None.
        admission: reject requests whose prompt exceeds the prefill budget.
        whole_steps: the prefill budget counts whole tokens that fall due, see `prefill_budget`.
        recalibrate: keep the profile's times up to date with the steps that are served.
        steps: CSV file to write every step's tokens and seconds to.
    """

    formation: str = "fairbatching"
    profile: str | None = None
    ttft_s: float = 2.0
    tpot_s: float = 0.2
    deadlines: Literal["arrival", "first_token"] = "arrival"
    reserve: Annotated[float, msgspec.Meta(ge=0, lt=1)] = 0.1
    token_budget: Annotated[int, msgspec.Meta(ge=1)] | None = None
    admission: bool = False
    whole_steps: bool = True
    recalibrate: bool = True
    steps: str | None = None

    def __post_init__(self) -> None:
        known = [*FORMATIONS, VLLM_ORDER]
        if self.formation not in known:
            raise ValueError(f"no formation {self.formation!r}; there are {', '.join(known)}")
        read_objectives({TTFT_KEY: self.ttft_s, TPOT_KEY: self.tpot_s}, self.objectives)
        needing = f"formation {self.formation!r}" if self.formation in _TIMED else ""
        needing = "admission" if self.admission else needing
        if self.profile is None and needing:
            raise ValueError(
                f"{needing} needs to know how long a batch takes: measure it with "
                "`headway profile` and give the file as 'profile'"
            )

    @property
    def objectives(self) -> Objectives:
        """Those of requests that have none of their own."""
        return Objectives(self.ttft_s, self.tpot_s)


def read_batching_config(additional_config: Mapping[str, Any]) -> BatchingConfig:
    """Validate what vLLM's additional configuration says of batching.

    Raises:
        ValueError: it says nothing, a key is unknown (the message names the known ones), a
            value is out of range, or a profile is missing.
    """
    section = additional_config.get(SECTION)
    if not isinstance(section, Mapping) or _KEY not in section:
        raise ValueError(
            f"--additional-config has no {_KEY!r} in its {SECTION!r} section; give for example "
            f'\'{{"{SECTION}": {{"{_KEY}": {{"profile": "profile.yaml"}}}}}}\''
        )
    try:
        return msgspec.convert(section[_KEY], BatchingConfig)
    except msgspec.ValidationError as error:
        raise ValueError(
            f"--additional-config, {SECTION}.{_KEY}: {error}. Known keys: "
            f"{', '.join(BatchingConfig.__struct_fields__)}"
        ) from error
