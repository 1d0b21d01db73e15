"""The text of a request whose tokens come from several engines, and where a stop string ends it."""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

__all__ = ["ContinuedText", "TextRules"]


@dataclass(frozen=True, slots=True)
class TextRules:
    """How tokens become text, and which text ends a request.

    Attributes:
        stop: strings that end it.
        include_stop: whether such a string is shown.
        min_tokens: tokens before which none is looked for.
        skip_special_tokens: whether special tokens are left out.
        spaces_between_special_tokens: whether the tokenizer may put spaces between them.
    """

    stop: tuple[str, ...] = ()
    include_stop: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True


class ContinuedText:
    """Turns tokens into text one by one, as vLLM's incremental detokenizer does.

    An engine that takes over a request knows the earlier tokens as part of its prompt: it would
    find no stop string that began before, and after a cut inside a character it would repeat the
    whole prompt. So the proxy makes the text itself from the first cut on.

    The tokens of the original prompt decide the first token's spaces.

    Attributes:
        tokens: generated tokens taken so far.
        text: of them, cut where a stop string ended it.
        stopped: the stop string that ended it; None while there is none.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], rules: TextRules
    ) -> None:
        self.tokens = 0
        self.text = ""
        self.stopped: str | None = None
        self._tokenizer, self._rules = tokenizer, rules
        self._stream = DecodeStream(
            ids=list(prompt_token_ids), skip_special_tokens=rules.skip_special_tokens
        )
        withheld = rules.stop and not rules.include_stop
        self._withheld = max(map(len, rules.stop)) - 1 if withheld else 0
        self._taken = 0
        self._special: dict[int, str] = {}
        if not rules.skip_special_tokens and not rules.spaces_between_special_tokens:
            added = tokenizer.get_added_tokens_decoder()
            self._special = {token: entry.content for token, entry in added.items()}
        self._last_was_special = False

    def follow(self, token_ids: Sequence[int]) -> None:
        """Take tokens of an engine that has looked for stop strings itself, and found none."""
        self.tokens += len(token_ids)
        self.text += "".join(map(self._decoded, token_ids))

    def skip(self, characters: int) -> None:
        """Set how much of the text the client already has."""
        self._taken = characters

    def add(self, token_ids: Sequence[int], ended_by_token: bool = False) -> int:
        """Take tokens; return how many of them count: those after a stop string do not.

        One that ended the request (an end of sequence, or a stop token) is shown only if the rules
        include it.
        """
        for i, token in enumerate(token_ids):
            last = ended_by_token and i + 1 == len(token_ids)
            self.tokens += 1
            if last and not self._rules.include_stop:
                return i + 1
            new = self._decoded(token)
            self.text += new
            if new and self.tokens > self._rules.min_tokens and self._stops(len(new)):
                return i + 1
        return len(token_ids)

    def take(self, finished: bool) -> str:
        """Return the text that can be shown and was not yet.

        Once it is finished, what might have been the beginning of a stop string is text after all.
        """
        start, end = self._taken, len(self.text) - (0 if finished else self._withheld)
        self._taken = max(start, end)
        return self.text[start : self._taken]

    def _decoded(self, token: int) -> str:
        try:
            text = self._stream.step(self._tokenizer, token)
        except Exception as error:
            # Tokenizers whose text of more tokens does not begin with that of fewer.
            if not str(error).startswith("Invalid prefix encountered"):
                raise
            self._stream = DecodeStream(skip_special_tokens=self._rules.skip_special_tokens)
            text = self._stream.step(self._tokenizer, token)
        if self._special:
            special = self._special.get(token)
            if special is not None and self._last_was_special:
                text = special
            self._last_was_special = special is not None
        return text or ""

    def _stops(self, new_characters: int) -> bool:
        """Look for the stop string that ends first in the newest characters."""
        best_end = len(self.text) + 1
        for stop in self._rules.stop:
            at = self.text.find(stop, max(0, len(self.text) - new_characters - len(stop) + 1))
            if at >= 0 and at + len(stop) < best_end:
                self.stopped, best_end = stop, at + len(stop)
        if self.stopped is None:
            return False
        shown = best_end if self._rules.include_stop else best_end - len(self.stopped)
        self.text = self.text[:shown]
        return True
