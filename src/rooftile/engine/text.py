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
        self._tokenizer, self._stops = tokenizer, tuple(stops)
        # The tokens from those on that gave the newest characters, how many those are, and what they read: a token may
        # read otherwise at the beginning of a text.
        self._recent: list[int] = []
        self._known, self._read = 0, ""
        self._seen = ""  # all of it, with what is held back
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """What the token adds to `text`."""
        self._recent.append(token)
        now = self._decode(self._recent)
        # Bytes that are no character yet read as U+FFFD. Of those that never become one, which tokenizers with tokens
        # for bytes read otherwise as they come, what was shown stays.
        if len(now) > len(self._read) and not now.endswith("\ufffd"):
            self._seen += now[len(self._read) :]
            del self._recent[: self._known]
            self._known, self._read = len(self._recent), self._decode(self._recent)
        return self._release(self._certain())

    def end(self) -> str:
        """What was held back, when no token follows: the beginning of a stop string, or of a character."""
        if self.stopped:
            return ""
        self._seen += self._decode(self._recent)[len(self._read) :]
        return self._release(len(self._seen))

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

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
