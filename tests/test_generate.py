"""The trained byte model: the engine writes the text that Hugging Face's code writes, at the loss that it states."""

import dataclasses
import io
import json
import re
import shutil

import pytest
import torch
from rich.console import Console

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from typer.testing import CliRunner

from rooftile import cli, runtime
from rooftile.bench.generate import Printer
from rooftile.bench.workloads import step_bytes
from rooftile.byte_model import library_text
from rooftile.demo import byte_model
from rooftile.demo import generation as demo
from rooftile.engine import Engine, NGram
from rooftile.engine.generation import StreamChunk

DEVICE = runtime.default_device()
REAL = runtime.MODE is runtime.Mode.GPU
PROMPTS = ("def __init__(self, ", "import")
NEW = 64


@pytest.fixture(scope="module")
def engine():
    return Engine.from_pretrained(byte_model(), dtype=torch.float32, max_batch=2, max_seq_len=96, progress=False)


@pytest.fixture(scope="module")
def model():
    return demo.load(torch.float32, DEVICE)


@pytest.fixture(scope="module")
def expected(model):
    """Each prompt and its continuation."""
    ids = [list(p.encode()) for p in PROMPTS]
    return [(p, demo.greedy(model, p, NEW)) for p in ids]


def _nats(logits, ids):
    return float(torch.nn.functional.cross_entropy(logits[:-1], ids[1:]))


def test_checkpoint_is_small_and_states_its_loss():
    folder = byte_model()
    assert sum(path.stat().st_size for path in folder.iterdir()) < 1_000_000
    stated = json.loads((folder / "training.json").read_text())["held_out_loss"]
    readme = " ".join((folder / "README.md").read_text().split())
    assert f"{stated:.4f} nats a byte" in readme
    assert "Python Software Foundation License" in readme


def test_tokens_are_bytes(engine):
    text = "naïve → 'x' <|end|>\t\r\n\x00"
    ids = engine.tokenizer.encode(text.replace("<|end|>", "")).ids
    assert ids == list(text.replace("<|end|>", "").encode())
    assert engine.tokenizer.decode(ids) == text.replace("<|end|>", "")
    assert engine.tokenizer.encode("<|end|>").ids == [library_text.END] == list(engine.config.eos)


def test_held_out_loss_is_hugging_faces_and_near_what_is_stated(engine, model):
    """One window of one file: what is stated is a mean over all of them."""
    ids = library_text.tokens(library_text.held_out_files()[-2:])[2000:2056].to(DEVICE)
    (ours,) = engine.logits([ids.tolist()])
    with torch.no_grad():
        theirs = model(ids[None]).logits[0]
    assert _nats(ours, ids) == pytest.approx(_nats(theirs, ids), rel=1e-5)
    assert _nats(ours, ids) < 2.5  # ln 256 is 5.5


def test_stated_loss_is_that_of_the_weights(model):
    stated = json.loads((byte_model() / "training.json").read_text())
    rows = library_text.windows(library_text.tokens(library_text.held_out_files()), stated["window"])[::64].to(DEVICE)
    with torch.no_grad():
        logits = model(rows).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    assert float(loss) == pytest.approx(stated["held_out_loss"], rel=0.1)  # a part of the text, of another Python


@pytest.mark.nightly  # test_engine.py has fewer of each family
def test_each_of_64_greedy_tokens_is_hugging_faces(engine, expected):
    """In one pass over prompts of unequal lengths: each token is the most likely one after those before it."""
    found = engine.logits([prompt + new for prompt, new in expected])
    for logits, (prompt, new) in zip(found, expected, strict=True):
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == new


def test_decoded_text_is_hugging_faces(engine, expected):
    """Token by token through the cache: on a GPU all 64; in the interpreter the last few, behind the others."""
    given = 0 if REAL else NEW - 4
    done = engine.generate([p + new[:given] for p, new in expected], max_new_tokens=NEW - given, ignore_eos=True)
    for completion, (_, new) in zip(done, expected, strict=True):
        assert completion.tokens == new[given:]
        assert completion.text == bytes(new[given:]).decode(errors="replace")


def test_command_prints_the_text_and_how_fast_it_came(expected):
    given = [argument for prompt in PROMPTS for argument in ("--prompt", prompt)]
    options = ["--stream", "--dtype", "fp32", "--max-new-tokens", "2", "--stop", "\x00"]
    done = CliRunner().invoke(cli.app, ["generate", "demo", *given, *options])
    assert done.exit_code == 0, done.output
    for prompt, (_, new) in zip(PROMPTS, expected, strict=True):
        assert prompt + bytes(new[:2]).decode() in done.stdout
    assert "4 tokens of 2 prompts" in done.stderr
    assert "4 tokens" not in done.stdout
    if REAL:
        assert re.search(r"4 tokens of 2 prompts; [\d.]+ ms to the first, of a prompt of 19", done.stderr)
        assert re.search(r"[\d.]+ tokens/s, [\d.]+ ms a step\n.* GB/s: a step reads", done.stderr)
    else:
        assert "no measurement" in done.stderr


def test_command_takes_the_engines_options(monkeypatch):
    """A cache of 8 bits, its length, speculation, tokens past the end, and log-probabilities of each."""
    made = []
    stock = Engine.from_pretrained
    monkeypatch.setattr(Engine, "from_pretrained", lambda *args, **given: made.append(stock(*args, **given)) or made[0])
    options = ["--kv-dtype", "int8", "--max-seq-len", "20", "--logprobs", "--ignore-eos", "--max-new-tokens", "3"]
    options += ["--dtype", "fp32", "--speculate", "ngram:2"]
    done = CliRunner().invoke(cli.app, ["generate", "demo", "--prompt", "def r", *options])
    assert done.exit_code == 0, done.output
    assert (made[0].max_seq_len, made[0].runner.cache.k.dtype) == (20, torch.int8)
    assert made[0].speculate == NGram(2)
    _, after = done.stderr.split("log-probabilities after prompt 1 of 1\n")
    tokens = [line.split() for line in after.splitlines()[:3]]
    (whole,) = made[0].generate(["def r"], max_new_tokens=3, logprobs=True, ignore_eos=True)
    assert [int(t[1]) for t in tokens] == whole.tokens
    assert [float(t[0]) for t in tokens] == pytest.approx(whole.logprobs, abs=1e-4)


def test_command_reads_standard_input_and_says_in_a_line_what_is_wrong(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "mute").mkdir()
    shutil.copy(byte_model() / "config.json", tmp_path / "mute")
    for path, text, said, *options in (
        (tmp_path / "nothing", "x", "does not exist"),
        (tmp_path / "empty", "x", "config.json"),
        (tmp_path / "mute", "x", "has no tokenizer.json, and the prompts are text"),
        (__file__, "x", "is a file"),
        (
            "demo",
            "x",
            "prompt 0 has 1 token, and --max-new-tokens is 1000: more than --max-seq-len, ",
            "--max-new-tokens",
            "1000",
        ),
        ("demo", "x", "generate: --top-p is 2.0, expected", "--top-p", "2", "--temperature", "1"),
    ):
        done = CliRunner().invoke(cli.app, ["generate", str(path), *options], input=text)
        *before, last = done.output.strip().splitlines()
        assert done.exit_code == 2, done.output
        assert last.startswith("rooftile generate: ")
        assert said in last
        assert all(line.startswith("No GPU here") for line in before)
    for text, said in (("", "standard input is empty"), ("\n", "standard input is empty"), (b"\xff\xfe", "no UTF-8")):
        done = CliRunner().invoke(cli.app, ["generate", "demo"], input=text)
        assert done.exit_code == 2
        assert said in " ".join(done.stderr.replace("│", " ").split())
    done = CliRunner().invoke(cli.app, ["generate", "demo", "--prompt", "a\udcff"])
    assert done.exit_code == 2
    assert "a prompt is no UTF-8" in " ".join(done.stderr.replace("│", " ").split())
    assert not done.stdout
    done = CliRunner().invoke(cli.app, ["generate", "demo", "--speculate", "medusa"], input="x")
    assert done.exit_code == 2
    assert "'medusa' is no speculation" in " ".join(done.stderr.replace("│", " ").split())


def test_command_generates_as_many_tokens_as_there_is_room_for_unless_told_how_many():
    """The default is cut, with a notice; a number that was given is not."""
    ask = ["generate", "demo", "--dtype", "fp32", "--ignore-eos", "--prompt", "def r", "--prompt", "x"]
    done = CliRunner().invoke(cli.app, [*ask, "--max-seq-len", "8"])
    assert done.exit_code == 0, done.output
    assert (
        "At most 3 new tokens instead of 128: a prompt has 5 tokens, and a sequence has 8 at most (--max-seq-len)."
        in done.stderr
    )
    assert "6 tokens of 2 prompts" in done.stderr
    for length, given, said in (
        (
            "8",
            ["--max-new-tokens", "4"],
            "prompt 0 has 5 tokens, and --max-new-tokens is 4: more than --max-seq-len, 8",
        ),
        ("5", [], "prompt 0 has 5 tokens, and --max-new-tokens is 1: more than --max-seq-len, 5"),
    ):
        done = CliRunner().invoke(cli.app, [*ask, "--max-seq-len", length, *given])
        assert done.exit_code == 2
        assert said in done.stderr
        assert "instead of" not in done.stderr


@pytest.mark.parametrize("stream", [True, False])
def test_texts_of_several_prompts_stand_one_behind_the_other(stream):
    out = io.StringIO()
    printer = Printer(["<a>", "<b>", "<c>"], stream, Console(file=out))
    printer.begin()
    seen = []
    for index, text, end in ((0, "x", None), (1, "u", None), (2, "k", "stop"), (1, "v", None), (0, "y", "length"),
                             (1, "w", "stop")):  # fmt: skip
        printer.add(StreamChunk(index, 0, text, None, end))
        seen.append(out.getvalue())
    assert out.getvalue() == "<a>xy\n\n<b>uvw\n\n<c>k\n"
    assert seen[0] == ("<a>x" if stream else "<a>")
    assert seen[4] == ("<a>xy\n\n<b>uv" if stream else "<a>xy\n\n<b>")


def test_bytes_of_a_step_are_the_weights_and_the_cache(engine, model):
    c = engine.config
    of_a_token = c.layers * 2 * c.kv_heads * c.head_dim * 4
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert step_bytes(c, engine.weights, [0], torch.float32) == engine.weights.nbytes == weights
    assert step_bytes(c, engine.weights, [3, 5], torch.float32) == weights + 8 * of_a_token
    near = dataclasses.replace(c, windows=(4,) * c.layers)
    assert step_bytes(near, engine.weights, [3, 5], torch.float32) == weights + 7 * of_a_token


def test_demo_says_whether_the_texts_are_the_same(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(demo, "PROMPTS", ("import ", "("))
    greedy = demo.greedy
    monkeypatch.setattr(demo, "greedy", lambda model, p, new: greedy(model, p, new) if len(p) > 1 else [0] * new)
    assert not demo.show_text(Console(file=out), 1)
    assert ("PASS" in out.getvalue(), "FAIL" in out.getvalue()) == (True, True)
