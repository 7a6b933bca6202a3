"""The bytes of tokens, in the kinds of vocabularies that checkpoints have."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rooftile import byte_model
from rooftile.serve.vocabulary import Vocabulary

TEXT = "naïve € \U0001f44d\n\x00"


def byte_level():
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ã", "¯")]  # a whole character
    vocab = {piece: i for i, piece in enumerate([*pieces, "Ã¯", "</end>"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["</end>"])
    return tokenizer


def byte_fallback():
    vocab = {piece: i for i, piece in enumerate(["<unk>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "n", "ï", "a"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def of_bytes():
    return Tokenizer.from_file(str(byte_model.folder() / "tokenizer.json"))


@pytest.mark.parametrize("made", [byte_level, byte_fallback, of_bytes])
def test_the_bytes_of_a_texts_tokens_are_the_texts(made):
    tokenizer = made()
    vocabulary, ids = Vocabulary(tokenizer), tokenizer.encode(TEXT).ids
    assert len(ids) > len(TEXT), "some tokens are parts of a character"
    assert b"".join(map(vocabulary.bytes_of, ids)) == TEXT.encode()


def test_a_special_token_and_one_that_the_tokenizer_lacks():
    tokenizer = byte_level()
    vocabulary, end = Vocabulary(tokenizer), tokenizer.token_to_id("</end>")
    assert vocabulary.bytes_of(end) == b"</end>"
    assert vocabulary.bytes_of(end + 1) == b""


def test_another_decoder_gives_the_bytes_of_the_text():
    tokenizer = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "a": 1, "##é": 2}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    assert Vocabulary(tokenizer).bytes_of(1) == b"a"
