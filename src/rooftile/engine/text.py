"""Text as tokens come: whole characters, and nothing of what a stop string may turn out to have begun."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Text:
    """The text of one sequence.

    Args:
        tokenizer: of the model.
        stops: strings, none of them empty, at the first of which the text ends.

    Attributes:
        text: what is certain to belong to it.
        stopped: whether a stop string was met. `text` ends before it then.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer, self._stops = tokenizer, tuple(stops)
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._seen = ""  # all of it, with what is held back
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """What the token adds to `text`."""
        self._tokens.append(token)
        self._seen += self._stream.step(self._tokenizer, token) or ""
        return self._release(self._certain())

    def end(self) -> str:
        """What was held back, when no token follows: the beginning of a stop string, or of a character."""
        if self.stopped:
            return ""
        whole = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        if whole.startswith(self._seen):
            self._seen = whole
        return self._release(len(self._seen))

    def _certain(self) -> int:
        """Characters before a stop string, or before what may be the beginning of one."""
        met = [at for stop in self._stops if (at := self._seen.find(stop, max(0, len(self.text) - len(stop)))) >= 0]
        if met:
            self.stopped = True
            return min(met)
        held = 0
        for stop in self._stops:
            longest = min(len(stop) - 1, len(self._seen) - len(self.text))
            held = max(held, next((n for n in range(longest, 0, -1) if self._seen.endswith(stop[:n])), 0))
        return len(self._seen) - held

    def _release(self, until: int) -> str:
        new = self._seen[len(self.text) : until]
        self.text += new
        return new
