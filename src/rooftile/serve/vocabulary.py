"""The bytes of tokens. A token may be a part of a character in UTF-8, which decoding shows as U+FFFD."""

from __future__ import annotations

import functools
import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


@functools.cache
def _byte_level() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: itself, if it is printable in Latin-1.

    The others are, in their order, the characters from U+0100 on (GPT-2, `bytes_to_unicode`).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The steps of a tokenizer's decoder, as in tokenizer.json."""
    if tokenizer.decoder is None:
        return []
    decoder = json.loads(tokenizer.decoder.__getstate__())  # the whole tokenizer as JSON may take a second
    found: list[dict[str, Any]] = decoder.get("decoders", [decoder])
    return found


class Vocabulary:
    """The tokens of a model.

    Args:
        tokenizer: of the model. Byte-level vocabularies and those with a token for each byte are known by their
            decoder; in others, the bytes of a token are those of its text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        steps = _steps(tokenizer)
        kinds = {step["type"] for step in steps}
        self._byte_level, self._byte_tokens = "ByteLevel" in kinds, "ByteFallback" in kinds
        # What a decoder replaces everywhere; what it strips depends on where in a text the token is.
        self._replaced = [
            (step["pattern"]["String"], step["content"])
            for step in steps
            if step["type"] == "Replace" and "String" in step["pattern"]
        ]
        self._special = {token: added.content for token, added in tokenizer.get_added_tokens_decoder().items()}

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token adds to a text; those of its name, if it is a special one."""
        if token in self._special:
            return self._special[token].encode()
        piece = self._tokenizer.id_to_token(token)
        if piece is None:  # a model may have more tokens than its tokenizer
            return b""
        if self._byte_level and all(character in _byte_level() for character in piece):
            return bytes(_byte_level()[character] for character in piece)
        if self._byte_tokens:
            if found := _BYTE.fullmatch(piece):
                return bytes([int(found[1], 16)])
            for old, new in self._replaced:
                piece = piece.replace(old, new)
            return piece.encode()
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()
