"""What the signs of an engine prove: whether it has failed, and whether it still has a request.

Lateness proves nothing: a long prompt, a queue, a paused process and an overload all make streams
late, and computing their requests again makes the next ones later. So both of these wait for
evidence, and for a bound where there is none. Neither has a clock: the caller says when a sign was
seen, in seconds, and signs may come late, twice, or not at all.
"""

from enum import Enum

from rescheduler.transfer.control_messages import RequestStatus

LONGEST_WAIT = 3600.0
"""Seconds without a token after which a request has failed, whatever its engine says."""

_SILENT_SECONDS = 5.0
"""Without any sign, after which an engine gets requests only if no other one does."""
_UNKNOWN_AGAIN = 5.0
"""Seconds between two looks for a request that its engine does not know."""
_SLOWEST_PREFILL = 100.0
"""Prompt tokens that the slowest engine computes in a second."""
_GAP = 3.0
"""Between two reports of an engine, in times of the usual: one that slept has not hung."""


class EngineHealth(Enum):
    """What is known of an engine: it serves, nothing is heard of it, or it has failed."""

    SERVES = "serves"
    SILENT = "silent"
    FAILED = "failed"


class EngineEvidence:
    """The signs of one engine.

    It fails when nothing listens on its port; when nothing is heard of it for ``silent_seconds``,
    or of its HTTP server, which all answers come through, or of all else, though its control socket
    has answered before; or when that answers and it has requests, but it makes no step. From then
    on it has failed until `returned`.

    Args:
        silent_seconds: without any sign, after which it has failed.
        report_seconds: between two reports of a healthy engine.
        look_seconds: between two looks at any engine, at most.
        now: when it is first looked at.

    Attributes:
        why: it has failed; empty while it has not.
        failed_at: when.
        gone: it has failed since nothing listens on its port; it may still end its streams.
        hangs: it has failed since it makes no step, though its process lives.
        incarnation: of the engine, as it last said; empty before.
        steps: that it has made, as it last said; -1 before.
    """

    def __init__(
        self, silent_seconds: float, report_seconds: float, look_seconds: float, now: float
    ) -> None:
        self._longest_silence = max(silent_seconds, _GAP * report_seconds)
        self._gap = min(max(_SILENT_SECONDS, _GAP * report_seconds), self._longest_silence)
        self._longest_look = 2 * look_seconds
        self._heard = self._answered = self._said = self._looked = now
        self._stalled = 0.0
        self._reported: float | None = None
        self.steps = -1
        self.incarnation = ""
        self.why = ""
        self.gone = self.hangs = False
        self.failed_at = 0.0

    def heard(self, at: float) -> None:
        """Note that the engine itself has said anything, behind its HTTP server."""
        self._heard = max(self._heard, at)
        self._said = max(self._said, at)

    def answered(self, at: float) -> None:
        """Note that its HTTP server has said anything."""
        self._heard = max(self._heard, at)
        self._answered = max(self._answered, at)

    def stepped(self, at: float) -> None:
        """Note a token: it computes."""
        self.heard(at)
        self.answered(at)
        self._stalled = 0.0

    def reported(self, at: float, incarnation: str, steps: int, busy: bool) -> None:
        """Note what its control socket says of it.

        Only time between two reports counts as time without a step. A process that was stopped for
        a while was silent meanwhile, and its first report after that proves nothing.
        """
        if self._reported is not None and at <= self._reported:
            return  # an older one, or the same again
        since, self._reported = self._reported, at
        self.heard(at)
        same = incarnation == self.incarnation and steps == self.steps and busy
        if not same or since is None or at - since > self._gap:
            self._stalled = 0.0
        else:
            self._stalled += at - since
        self.incarnation, self.steps = incarnation, steps

    def refused(self, at: float) -> bool:
        """Note that nothing listens on its port; return whether it fails by that."""
        if at < self._answered:  # seen before it came back
            return False
        return self._fail(at, "nothing listens on its port", gone=True)

    def look(self, now: float, longest_step: float) -> bool:
        """Return whether it fails by now; to be called as often as it is asked.

        After a pause of the caller's own nothing can have been heard: that is no silence.

        Args:
            now: seconds.
            longest_step: seconds that a step may take, with the prompts that it has.
        """
        if now - self._looked > self._longest_look:
            paused = now - self._looked
            self._heard, self._answered = self._heard + paused, self._answered + paused
            self._said += paused
        self._looked = now
        if now - self._heard > self._longest_silence:
            return self._fail(now, f"silent for {self._longest_silence:g} s")
        if now - self._answered > self._longest_silence:
            return self._fail(now, f"no HTTP answer within {self._longest_silence:g} s")
        if self._stalled > longest_step:
            why = f"no step within {longest_step:.0f} s, though it has requests"
            return self._fail(now, why, hangs=True)
        longest = max(self._longest_silence, longest_step)
        if self._reported is not None and now - self._said > longest:
            return self._fail(now, f"only its HTTP server answers, for {longest:.0f} s", hangs=True)
        return False

    def returned(self, at: float) -> None:
        """Note that it serves again."""
        self.stepped(at)
        self.why = ""
        self._reported = None  # its control socket may not be back

    def answers(self, now: float) -> bool:
        """Return whether its HTTP server has answered lately."""
        return now - self._answered <= self._gap

    def health(self, now: float) -> EngineHealth:
        """Return what is known of it."""
        if self.why:
            return EngineHealth.FAILED
        silent = now - min(self._heard, self._answered) > self._gap
        return EngineHealth.SILENT if silent else EngineHealth.SERVES

    def _fail(self, at: float, why: str, gone: bool = False, hangs: bool = False) -> bool:
        if self.why:
            return False
        self.why = why
        self.gone, self.hangs = gone, hangs
        self.failed_at = at
        self._stalled = 0.0
        return True


class RequestEvidence:
    """The signs of one request on one engine, from which something is awaited.

    While it brings tokens, nobody asks. When none has come for half of ``patience`` its engine is
    asked: the request waits while the engine has it, and fails once the engine has not, twice in a
    row. Where nobody can say, it fails after an allowance.

    Args:
        now: when it is sent.
        patience: seconds within which a token is expected of an engine that is not slow.
        lands: it has just been moved, and can go back: it does not wait there for room, nor for
            an engine that makes no step.

    Attributes:
        since: when its last token came, or it was sent.
        asked: when its engine was last asked for it, or its last token came.
    """

    __slots__ = ("_known", "_steps", "_unknown", "asked", "lands", "patience", "since")

    def __init__(self, now: float, patience: float, lands: bool = False) -> None:
        self.patience, self.lands = patience, lands
        self.since = self.asked = now
        self._known = False
        self._unknown = 0
        self._steps = -1

    def progressed(self, now: float, patience: float) -> None:
        """Note a token; the next one is expected within another time."""
        self.since = self.asked = now
        self.patience = patience
        self.lands = False
        self._known, self._unknown = True, 0

    def held(self, seconds: float) -> None:
        """Exclude seconds in which a slow client blocked reading."""
        self.since += seconds
        self.asked += seconds

    def is_due(self, now: float) -> bool:
        """Return whether to ask its engine for it now."""
        again = min(_UNKNOWN_AGAIN, self.patience / 2) if self._unknown else self.patience / 2
        return now - self.asked > again

    def told(
        self, now: float, status: RequestStatus, steps: int, answers: bool, allowed: float
    ) -> str:
        """Note what its engine says of it; return why it has failed, or nothing.

        Args:
            now: when it was told.
            status: of the request there.
            steps: of the engine by now.
            answers: its HTTP server does, too: what it has not handed on yet is not lost.
            allowed: seconds for an engine that has never had it: it may be on its way there.
        """
        self.asked = now
        before, self._steps = self._steps, steps
        late = now - self.since
        if late > LONGEST_WAIT:
            return f"no token within {LONGEST_WAIT:g} s"
        if status is RequestStatus.UNKNOWN:
            if not self._known:
                return self.overdue(now, allowed)
            self._unknown += answers
            return "its engine does not know it any more" if self._unknown > 1 else ""
        self._known, self._unknown = True, 0
        if self.lands and late > self.patience:
            if status is RequestStatus.WAITING:
                return f"no room within {self.patience:g} s"
            if steps == before:
                return f"no step within {self.patience:g} s"
        return ""

    def overdue(self, now: float, allowed: float) -> str:
        """Return why it has failed, or nothing, where its engine cannot be asked."""
        self.asked = now
        allowed = self.patience if self.lands else min(allowed, LONGEST_WAIT)
        return f"no token within {allowed:.0f} s" if now - self.since > allowed else ""


def allowance(patience: float, requests: int, tokens: int) -> float:
    r"""Return how many seconds to wait for a token where nobody says what its engine does.

    .. math:: p \,(1 + n) + T / 100

    Args:
        patience: p, of a request that nothing is ahead of.
        requests: n, those ahead of it there that have no token yet.
        tokens: T, of prompts that are to be computed there before its token comes.
    """
    return patience * (1 + requests) + tokens / _SLOWEST_PREFILL
