"""How far an answer has come whose text an engine parses for tool calls or reasoning."""

from typing import Any

__all__ = ["ParsedAgain"]


class ParsedAgain:
    """What an engine needs to parse an answer again, and what it cannot know of it.

    The parser's state is in the server of one engine. The next engine parses all tokens again, in
    the same chunks, and tells what comes after those that the client has: first the last chunk of
    the engine that froze the request, which the client has not seen.

    Attributes:
        cut: another engine goes on.
        shown: tokens whose chunks the client has.
        chunks: in which tokens came: how many in a row, and the tokens of each.
    """

    def __init__(self) -> None:
        self.cut = False
        self.shown = 0
        self.chunks: list[list[int]] = []
        self._tokens = 0
        self._logprobs: list[Any] = []
        self._calls: dict[int, str] = {}

    def repeated(self, tokens: int) -> int:
        """Return how many of the next tokens to be shown have been generated before."""
        return min(tokens, self._tokens - self.shown)

    def show(self, token_ids: list[int], repeated: int = 0) -> None:
        """Note tokens of a chunk that the client gets; the first ones may be noted already."""
        self._generate(len(token_ids) - repeated)
        self.shown += len(token_ids)

    def hide(self, token_ids: list[int], logprobs: list[Any]) -> list[int]:
        """Note tokens of a chunk that the client does not get; return those that are new."""
        repeated = self.repeated(len(token_ids))
        self._generate(len(token_ids) - repeated)
        self._logprobs += logprobs[repeated:]
        return token_ids[repeated:]

    def begin_call(self, index: int, id: str | None) -> None:
        """Note a tool call, and the id that its first engine gave it."""
        if id is not None:
            self._calls.setdefault(index, id)

    def mend(self, choice: dict[str, Any], repeated: int) -> None:
        """Put into a chunk of the next engine what only the engine before knew.

        These are the log-probabilities of its first tokens, and ids of calls: engines draw them.
        """
        for call in choice["delta"].get("tool_calls") or ():
            id, named = call.get("id"), (call.get("function") or {}).get("name")
            if id is not None and not named:
                call["id"] = self._calls.get(call["index"], id)
            self.begin_call(call["index"], id)
        if choice.get("logprobs") and repeated:
            choice["logprobs"]["content"][:repeated] = self._logprobs[:repeated]
        del self._logprobs[:repeated]

    def _generate(self, tokens: int) -> None:
        self._tokens += tokens
        if not tokens:
            return
        if self.chunks and self.chunks[-1][1] == tokens:
            self.chunks[-1][0] += 1
        else:
            self.chunks.append([1, tokens])
