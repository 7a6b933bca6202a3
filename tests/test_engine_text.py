"""Text as tokens come: whole characters, stop strings, bytes that are none."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rooftile.engine.generation import Text, encoded


def byte_tokenizer():
    """A token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_a_prompt_that_is_no_unicode_is_named():
    with pytest.raises(ValueError, match="prompt 1 can't be tokenized, expected Unicode text"):
        encoded(["a", "x\ud800y"], byte_tokenizer(), 256)


class TestText:
    def texts(self, ids, stops=()):
        text = Text(byte_tokenizer(), stops)
        pieces = [text.add(i) for i in ids]
        return text, [*pieces, text.end()]

    def ids(self, string):
        return byte_tokenizer().encode(string).ids

    def test_characters_come_whole(self):
        text, pieces = self.texts(self.ids("aé€b"))
        assert pieces == ["a", "", "é", "", "", "€", "b", ""]
        assert text.text == "aé€b"

    def test_whole_characters_are_decoded_once_and_in_the_same_pieces(self):
        """Among them are bytes that are no character, and a token without a text."""
        inner = byte_tokenizer()
        inner.add_special_tokens(["<end>"])
        rng, ids = random.Random(0), inner.encode("ab é€\U0001f44d" * 9).ids
        for _ in range(12):
            ids.insert(rng.randrange(len(ids)), rng.choice([inner.token_to_id("<end>"), *ids]))
        fast, slow = Text(inner), Text(inner)
        slow._alone = None
        assert [fast.add(i) for i in ids] == [slow.add(i) for i in ids]
        assert (fast.end(), fast.text) == (slow.end(), slow.text)

        class Counted:
            decoder, decoded = inner.decoder, 0

            def decode(self, *args, **options):
                Counted.decoded += 1
                return inner.decode(*args, **options)

        text = Text(Counted())
        for token in inner.encode("abba" * 9).ids:
            text.add(token)
        assert (text.text, Counted.decoded) == ("abba" * 9, 2)

    def test_what_may_begin_a_stop_is_held_back(self):
        text, pieces = self.texts(self.ids("a--b---"), ["---"])
        assert pieces == ["a", "", "", "--b", "", "", "", ""]
        assert (text.text, text.stopped) == ("a--b", True)

    def test_at_the_end_it_is_let_go(self):
        text, pieces = self.texts(self.ids("ab--"), ["---"])
        assert pieces == ["a", "b", "", "", "--"]
        assert not text.stopped

    def test_the_first_of_several_stops(self):
        text, _ = self.texts(self.ids("one two"), ["wo", " t"])
        assert (text.text, text.stopped) == ("one", True)

    def test_bytes_that_are_no_character(self):
        """Tokenizers with tokens for bytes read "A" otherwise when such bytes follow: what was shown stays."""
        vocab = {"<unk>": 0} | {f"<0x{i:02X}>": i + 1 for i in range(256)} | {"▁on": 257}
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        whole, broken = "A\nß€".encode(), b"A\xe2\x82"
        text = Text(tokenizer)
        pieces = [text.add(i) for i in (*(b + 1 for b in whole), 257)]
        assert pieces == ["A", "\n", "", "ß", "", "", "€", " on"]
        text = Text(tokenizer)
        assert text.add(broken[0] + 1) == "A"
        assert [text.add(b + 1) for b in broken[1:]] == ["", ""]
        assert text.add(257).endswith(" on")
        assert text.end() == ""
        assert text.text.startswith("A")
