"""`rooftile bench quality`: right kernels are told from wrong ones; what is written is what is shown."""

import dataclasses
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from rich.console import Console

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("triton", reason="Triton is not installed")

from typer.testing import CliRunner

from rooftile import cli, runtime
from rooftile.bench import docs, quality
from rooftile.bench.docs.tables import NO_RESULTS
from rooftile.bench.quality import kernels as quality_kernels
from rooftile.bench.quality import rows as quality_rows
from rooftile.bench.quality.kernels import NAIVE, Kernel, kernels
from rooftile.byte_model import library_text
from rooftile.demo import byte_model

pytestmark = pytest.mark.nightly

QUICK = quality.Settings(new=3, windows=1, prompts=(5,), lengths=(1, 17), dtype=torch.float32, backend="eager")
INTERPRETED = runtime.MODE is runtime.Mode.INTERPRETER


def _run(kernels_, monkeypatch, **more):
    monkeypatch.setattr(quality, "all_kernels", lambda files=None: tuple(kernels_))
    run = quality.Quality(dataclasses.replace(QUICK, **more), Console(quiet=True))
    run.run()
    return run


def _known(name):
    return next(k for k in kernels() if k.name == name)


def _later_keys_too(module, query, key, value, mask, **options):
    """Attention that sees the future."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    out = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    return out.transpose(1, 2), None


def test_held_out_files_are_not_trained_on():
    held_out, trained = library_text.held_out_files(), library_text.training_files()
    assert len(held_out) > 10
    assert len(trained) > 100
    assert not set(held_out) & set(trained)
    stream = library_text.tokens(held_out[:2])
    assert (stream == library_text.END).sum() == 2
    assert bytes(library_text.windows(stream, 64)[0].tolist()) == held_out[0].read_bytes()[:64]


def test_portable_kernel_writes_what_the_naive_one_writes_and_the_others_are_absent(monkeypatch, tmp_path):
    others = [k for k in kernels() if k.needs] if INTERPRETED else []
    compiled = quality.Quality.compiled  # of ours alone: tracing a model takes seconds
    monkeypatch.setattr(quality.Quality, "compiled", lambda self, k, row: k.name == NAIVE or compiled(self, k, row))
    run = _run([_known(NAIVE), _known("rooftile_portable"), *others], monkeypatch)
    naive, ours, *absent = run.rows
    assert (ours.status, ours.compiles) == ("ok", "whole"), ours.message
    for text in (ours.eager, ours.compiled):
        assert text.coherent
        assert text.same == text.sampled_same == 1.0
        assert text.loss == pytest.approx(naive.eager.loss, abs=1e-5)
        assert text.logprob_off < 1e-4
    assert ours.lengths.keys() == {"1", "17"}
    assert [row.status for row in absent] == ["absent"] * len(others)
    assert not any(row.failed for row in run.rows)

    path = tmp_path / "gpu" / "quality" / "byte_model.json"
    quality_rows.write(path, run.meta, run.rows, run.order)
    assert quality_rows.rows_of(json.loads(path.read_text())) == run.rows
    page = docs.TABLES["quality"](tmp_path)
    out = io.StringIO()
    quality.show(Console(file=out), run.meta, run.rows)
    for row in run.rows:
        assert row.title in page
        assert row.title in out.getvalue()
    assert f"{ours.eager.loss:.4f}" in page
    assert docs.TABLES["quality"](tmp_path / "none") == NO_RESULTS


@pytest.mark.parametrize("name", ["rooftile_decode", "rooftile_paged"])
def test_engine_writes_what_the_naive_kernel_writes_greedily_and_sampled(name, monkeypatch):
    monkeypatch.setattr(quality.Quality, "compiled", lambda self, kernel, row: None)
    run = _run([_known(NAIVE), _known(name)], monkeypatch, prompts=(5, 21))  # the longer one in more than one part
    naive, engine = run.rows
    assert engine.status == "ok", engine.message
    assert engine.eager.same == engine.eager.sampled_same == 1.0
    assert engine.eager.sampled == naive.eager.sampled == run.meta["sampled_fp32"]
    assert run.own[0.0] != run.own[quality.TEMPERATURE]
    assert 0 < engine.eager.logprob_off < 1e-4
    assert not engine.wrong_lengths


def test_model_of_few_positions_is_compared_within_them(monkeypatch, tmp_path):
    monkeypatch.setattr(quality.Quality, "compiled", lambda self, kernel, row: None)
    folder = tmp_path / "short"
    shutil.copytree(byte_model(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 24}))
    run = _run([_known(NAIVE), _known("rooftile_paged")], monkeypatch, model=folder)
    assert [row.status for row in run.rows] == ["ok", "ok"], run.rows[1].message
    assert run.meta["window"] == 24
    with pytest.raises(ValueError, match="up to 25 tokens, the model's 24"):
        _run([_known(NAIVE)], monkeypatch, model=folder, prompts=(22,))


def test_another_models_text_goes_through_its_tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    text = "".join(path.read_text(encoding="utf-8") for path in library_text.held_out_files())
    words = {word: i for i, word in enumerate(["?", *sorted(set(text.split()))])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    corpus = quality.Corpus(tmp_path)
    assert len(words) > library_text.END + 1
    assert corpus.unit == "token"
    assert corpus.decoded(corpus.tokens[:5]) == " ".join(text.split()[:5])
    assert quality.Corpus(byte_model()).unit == "byte"


def test_files_of_other_kernels_are_called_on_whole_tiles(tmp_path):
    file = tmp_path / "tutorial.py"
    file.write_text(
        "import torch\n"
        "def attention(q, k, v, causal, sm_scale):\n"
        "    assert q.shape == k.shape == v.shape and q.shape[2] % 128 == 0 and causal\n"
        "    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=sm_scale)\n"
    )
    given = quality_kernels.files_of([f"openai_tutorial={file}"])
    known = {k.name: k for k in kernels(given)}
    ids = torch.arange(2 * 17).reshape(2, 17)
    with torch.no_grad():
        found, expected = (
            _model(name)(ids, use_cache=False).logits for name in (known["openai_tutorial"].register(), "eager")
        )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for wrong in ("flex=x", "openai_tutorial", f"amd_tutorial={tmp_path / 'none.py'}"):
        with pytest.raises((ValueError, FileNotFoundError), match="--file"):
            quality_kernels.files_of([wrong])


def test_what_is_not_installed_is_absent_with_its_reason():
    known = {k.name: dataclasses.replace(k, needs="") for k in kernels()}
    assert "--file amd_tutorial=FILE" in known["amd_tutorial"].absent()
    missing = quality_kernels._of_others("none", "none", quality_kernels._of_package("no_such_package.ops", print))
    assert "No module named 'no_such_package'" in dataclasses.replace(missing, needs="").absent()
    there = quality_kernels._of_others("there", "there", quality_kernels._of_package("json", print))
    assert not dataclasses.replace(there, needs="").absent()


def test_exception_without_a_message_is_named_by_its_place():
    with pytest.raises(AssertionError) as raised:
        raise AssertionError
    said = quality_kernels.sentence(raised.value)
    assert said.startswith(
        "AssertionError: in test_exception_without_a_message_is_named_by_its_place, test_quality.py:"
    )
    assert quality_kernels.sentence(ValueError("one\ntwo")) == "ValueError: one"


def test_the_command_takes_another_model_whose_file_has_its_name(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(quality, "run", lambda settings, console: given.append(settings) or 0)
    folder = tmp_path / "other"
    assert CliRunner().invoke(cli.app, ["bench", "quality", "--model", str(folder)]).exit_code == 2  # there is none
    shutil.copytree(byte_model(), folder)
    assert CliRunner().invoke(cli.app, ["bench", "quality", "--model", str(folder)]).exit_code == 0
    assert (given[0].model, given[0].name) == (folder, None)
    monkeypatch.setattr("rooftile.engine.hub.folder_of", lambda path: folder)
    assert CliRunner().invoke(cli.app, ["bench", "quality", "--model", "someone/small"]).exit_code == 0
    assert given[1].name == "small"
    run = _run([_known(NAIVE)], monkeypatch, model=folder)
    run.settings = dataclasses.replace(run.settings, results=tmp_path)
    assert [path.name for path in run.files()] == ["other.json"]


def test_kernel_that_sees_the_future_or_raises_fails(monkeypatch):
    monkeypatch.setattr(quality.Quality, "compiled", lambda self, kernel, row: None)

    def raising(*args, **options):
        raise RuntimeError("no such tile\nand more")

    def raising_at_one(module, query, key, value, mask, **options):
        if query.shape[2] == 1:
            raise RuntimeError("too short")
        q, k, v = query, *(x.repeat_interleave(2, dim=1) for x in (key, value))
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2), None

    wrong = Kernel("rooftile_future", "sees the future", _later_keys_too)
    theirs = Kernel("future", "sees it too", _later_keys_too)
    broken = Kernel("rooftile_raising", "raises", raising)
    short = Kernel("rooftile_short", "raises at one length", raising_at_one)
    run = _run([_known(NAIVE), wrong, theirs, broken, short], monkeypatch)
    naive, wrong_row, theirs_row, broken_row, short_row = run.rows
    assert naive.status == "ok"
    assert (wrong_row.status, wrong_row.eager.coherent, wrong_row.wrong_lengths) == ("FAIL", False, [17])
    assert (broken_row.status, broken_row.message) == ("error", "RuntimeError: no such tile")
    assert (short_row.status, short_row.eager.coherent, short_row.wrong_lengths) == ("FAIL", True, [1])
    assert [row.failed for row in run.rows] == [False, True, False, True, True]
    assert theirs_row.status == "FAIL"


def test_nan_is_not_coherent(monkeypatch):
    monkeypatch.setattr(quality.Quality, "compiled", lambda self, kernel, row: None)

    def nan(module, query, *args, **options):
        return torch.full_like(query, torch.nan).transpose(1, 2), None

    run = _run([_known(NAIVE), Kernel("nan", "NaN", nan)], monkeypatch)
    assert not run.rows[1].eager.coherent
    assert run.rows[1].wrong_lengths == [1, 17]
    json.loads(quality_rows.to_json(run.meta, run.rows), parse_constant=pytest.fail)


def _model(name):
    from transformers import AutoModelForCausalLM

    path = byte_model()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    model.set_attn_implementation(name)
    return model


@pytest.mark.parametrize("name", [k.name for k in kernels() if k.part is None and (k.theirs or k.function)])
def test_transformers_takes_each_kernel_for_what_it_is(name):
    kernel = _known(name)
    registered = kernel.register()
    assert _model(registered).config._attn_implementation == registered
    if kernel.function is not None:
        from transformers import AttentionInterface

        assert AttentionInterface()[registered] is kernel.function


def test_flex_attention_is_right_and_compiles_seldom(monkeypatch):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = quality_kernels._compiled_flex(count)
    monkeypatch.setattr(quality_kernels, "_compiled_flex", lambda: compiled)
    naive, flex = _model("eager"), _model(_known("flex").register())
    # As a run has them: a batch of windows, then single sequences, longer by one each.
    shapes = [(2, 300), *((1, n) for n in (*range(17, 82, 8), 63, 65, 127, 128, 129, 257, 1, 2))]
    whole = torch.compile(flex, dynamic=True, fullgraph=True, backend=count)
    with torch.no_grad():
        for forward, few, some in ((flex, 4, shapes), (whole, 3, [*shapes[:5], (1, 129), (1, 257)])):
            graphs.clear()
            for shape in some:
                ids = torch.arange(shape[0] * shape[1]).reshape(shape) * 37 % 256
                found = quality.Forwards(forward, _known("flex")).logits(ids)
                expected = naive(ids, use_cache=False).logits
                torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
            assert 0 < len(graphs) <= few
    torch._dynamo.reset()


def test_run_of_other_kernels_adds_its_rows(monkeypatch, tmp_path):
    monkeypatch.setattr(quality.Quality, "compiled", lambda self, kernel, row: None)
    monkeypatch.setenv("ROOFTILE_COMMIT", "a" * 40)
    path = tmp_path / "quality.json"
    known = (_known(NAIVE), Kernel("first", "one", _later_keys_too), Kernel("second", "two", _later_keys_too))

    def measured(name, **more):
        run = _run(known, monkeypatch, names=[name], json=path, **more)
        assert [p.name for p in tmp_path.iterdir()] == [path.name]
        return run, quality_rows.rows_of(json.loads(path.read_text()))

    second, rows = measured("second")
    assert rows == second.rows
    first, rows = measured("first")
    assert rows == [*first.rows, second.rows[1]]
    known = (*known[:2], Kernel("second", "two again", _later_keys_too))
    assert [row.title for row in measured("second")[1]] == [known[0].title, "one", "two again"]
    assert [row.kernel for row in measured("first", new=2)[1]] == [NAIVE, "first"]
    for commit in ("b" * 40, "b" * 40 + "-dirty", "b" * 40 + "-dirty"):
        monkeypatch.setenv("ROOFTILE_COMMIT", commit)
        measured("first")
        assert [row.kernel for row in measured("second")[1]] == (
            [NAIVE, "second"] if commit.endswith("-dirty") else [NAIVE, "first", "second"]
        )
    path.write_text("no such file")
    assert [row.kernel for row in measured("first")[1]] == [NAIVE, "first"]


def test_command_refuses_what_it_does_not_know(tmp_path: Path):
    refused = CliRunner().invoke(cli.app, ["bench", "quality", "--kernel", "nothing"])
    assert refused.exit_code == 2
    assert "nothing" in refused.output
    if INTERPRETED:
        refused = CliRunner().invoke(cli.app, ["bench", "quality", "--results", str(tmp_path)])
        assert refused.exit_code == 2


@pytest.mark.gpu
def test_every_kernel_is_coherent_on_a_gpu(tmp_path: Path):
    out = tmp_path / "quality.json"
    done = CliRunner().invoke(cli.app, ["bench", "quality", "--json", str(out)])
    assert done.exit_code == 0, done.output
    rows = {row.kernel: row for row in quality_rows.rows_of(json.loads(out.read_text()))}
    assert rows["rooftile_portable"].eager.coherent
    assert rows["rooftile_portable"].compiles == "whole"
    assert not rows["rooftile_portable"].wrong_lengths
    assert rows["rooftile_decode"].compiled.coherent
    assert rows["rooftile_paged"].eager.coherent
    assert rows["flex"].compiles == "whole"
