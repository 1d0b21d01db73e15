"""How long a decode step takes, as streams or an engine's own steps tell."""

_FIRST_STEP_SECONDS = 0.05
_STEP_WEIGHT = 0.01
_PAUSE_STEPS = 4.0
_LEAST_STEP_SECONDS = 1e-3


class MeanStepTime:
    """How long a decode step takes: the mean time between two tokens of a request.

    Attributes:
        seconds: pauses left out.
        known: whether a step has been seen.
    """

    def __init__(self) -> None:
        self.seconds = _FIRST_STEP_SECONDS
        self.known = False

    def took(self, seconds: float) -> None:
        """Note the time between two tokens of a request.

        What is far longer is a pause, no step; what is shorter than any step came in one packet.
        """
        seconds = max(_LEAST_STEP_SECONDS, min(seconds, _PAUSE_STEPS * self.seconds))
        self.seconds += _STEP_WEIGHT * (seconds - self.seconds)
        self.known = True
