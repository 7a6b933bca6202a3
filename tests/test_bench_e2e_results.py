"""The results file of `rooftile bench e2e`: a run of other implementations adds to it, and says so in its rows."""

import dataclasses
import json
from pathlib import Path

import pytest
from rich.console import Console

pytest.importorskip("triton", reason="Triton is not installed")

from rooftile.bench import e2e, info
from rooftile.bench.e2e.paths import CUDA, CUDA_EAGER, HF, HF_EAGER, NOTES
from rooftile.bench.e2e.report import E2ERow
from rooftile.bench.e2e.results import NOT_REACHED, OF_A_RUN, SO_FAR, Results, added, earlier, read_rows
from rooftile.bench.rows import OURS, read_json, write_json

pytestmark = pytest.mark.nightly

FIRST, SECOND = "2025-01-01T00:00:00Z", "2025-01-02T00:00:00Z"
SAME = (*info.SAME, *e2e.results.SAME)
META = {**dict.fromkeys((*SAME, *OF_A_RUN)), "commit": "c0ffee", "config": {"attention_multiplier": 0.0883883476}}


def meta_of(date: str, *impls: str, **other) -> dict:
    return {**META, "date": date, "implementations": {name: NOTES[name] for name in impls}, **other}


def row(impl: str, date: str, op: str = "decode", **fields) -> E2ERow:
    return E2ERow(op, "forward", "m bf16 B1 P4 N3", "bf16", impl, **{"us": 8.0, "run": date, **fields})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Of a run of the engine and its rival."""
    path = tmp_path / "m-bf16-b1-p4-n3.json"
    rows = [row(OURS, FIRST, op, ratio_to_best_peer=1.25) for op in ("decode", "prefill")]
    rows += [row(CUDA, FIRST, op, us=10.0) for op in ("decode", "prefill")]
    whole = added(None, meta_of(FIRST, OURS, CUDA, patched=["2 norms"], roof_read_gbs=4000.0), rows, True)
    write_json(path, whole.meta, whole.rows)
    return path


def again(file: Path, rows: list[E2ERow], done: bool = True, **other) -> Results:
    """The file after another run."""
    meta = meta_of(SECOND, *dict.fromkeys(r.impl for r in rows), roof_read_gbs=4100.0, **other)
    whole = added(earlier(file, meta), meta, rows, done)
    write_json(file, whole.meta, whole.rows)
    return Results(read_json(file)[0], read_rows(file.parent))


def test_a_run_of_others_adds_its_rows_and_every_ratio_is_of_its_own_run(file):
    whole = again(file, [row(HF, SECOND, us=4.0), row(HF, SECOND, "prefill", us=4.0)])
    assert [(r.op, r.impl, r.run) for r in whole.rows] == [
        (op, impl, run) for op in ("decode", "prefill") for impl, run in ((OURS, FIRST), (CUDA, FIRST), (HF, SECOND))
    ]
    # Of all rows in the file the fastest is the new one; but it was not measured beside the engine.
    assert [r.ratio_to_best_peer for r in whole.rows] == [1.25, None, None] * 2
    assert whole.meta["date"] == SECOND
    assert {date: run["roof_read_gbs"] for date, run in whole.meta["runs"].items()} == {FIRST: 4000.0, SECOND: 4100.0}
    assert set(whole.meta["implementations"]) == {OURS, CUDA, HF}
    assert whole.meta["patched"] == ["2 norms"]


def test_what_is_measured_again_replaces_its_rows_and_no_others(file):
    whole = again(file, [row(OURS, SECOND, us=7.0), row(OURS, SECOND, "prefill", us=None, status="FAIL")])
    ours = [(r.us, r.status, r.run, r.ratio_to_best_peer) for r in whole.rows if r.impl == OURS]
    assert ours == [(7.0, "ok", SECOND, None), (None, "FAIL", SECOND, None)]
    assert [(r.us, r.run) for r in whole.rows if r.impl == CUDA] == [(10.0, FIRST)] * 2
    whole = again(file, [row(CUDA, SECOND), row(CUDA, SECOND, "prefill")])
    assert set(whole.meta["runs"]) == {SECOND}, "no row is of the first any more"


def test_a_run_that_is_cut_off_takes_nothing_away(file):
    rows = [row(OURS, SECOND, us=None), row(OURS, SECOND, "prefill", us=None, status="error", message=NOT_REACHED)]
    rows.append(row(HF, SECOND, us=None, status="error", message=NOT_REACHED))
    whole = again(file, rows, done=False)
    assert [(r.impl, r.us) for r in whole.rows] == [(OURS, 8.0), (CUDA, 10.0), (HF, None), (OURS, 8.0), (CUDA, 10.0)]
    whole = again(file, rows)
    assert [(r.impl, r.us) for r in whole.rows] == [(OURS, None), (CUDA, 10.0), (HF, None), (OURS, None), (CUDA, 10.0)]


def test_a_row_that_is_not_complete_replaces_none_that_is(file):
    looked = {"us": 7.0, "message": f"{SO_FAR}a first look, 16 steps"}
    rows = [row(OURS, SECOND, **looked), row(HF, SECOND, **looked)]
    whole = again(file, rows, done=False)
    assert [(r.impl, r.us) for r in whole.rows if r.op == "decode"] == [(OURS, 8.0), (CUDA, 10.0), (HF, 7.0)]
    whole = again(file, [row(HF, SECOND, us=6.0, message=f"{SO_FAR}1 of 3 rounds")], done=False)
    assert [r.us for r in whole.rows if r.impl == HF] == [6.0]
    whole = again(file, [row(HF, SECOND, us=None, status="error", message=NOT_REACHED)], done=False)
    assert [r.us for r in whole.rows if r.impl == HF] == [6.0]
    whole = again(file, [row(OURS, SECOND, us=7.5)], done=False)
    assert [r.us for r in whole.rows if r.impl == OURS] == [7.5, 8.0]


@pytest.mark.parametrize("name", SAME, ids=lambda name: f"other {name}")
def test_a_file_of_another_machine_version_commit_or_model_is_written_anew(file, name):
    whole = again(file, [row(HF, SECOND)], **{name: "another"})
    assert [(r.impl, r.run) for r in whole.rows] == [(HF, SECOND)]
    assert set(whole.meta["runs"]) == {SECOND}
    assert "patched" not in whole.meta


def test_what_can_not_be_told_is_not_the_same(file):
    assert earlier(file, meta_of(SECOND)) is not None
    data = json.loads(file.read_text())
    for commit in ("unknown", "c0ffee-dirty"):
        data["meta"]["commit"] = commit
        file.write_text(json.dumps(data))
        assert earlier(file, meta_of(SECOND, commit=commit)) is None
    data["meta"]["commit"], data["meta"]["runs"] = "c0ffee", {}
    for text in (json.dumps(data), "{", "[]", '{"meta": {}, "rows": [1]}'):
        file.write_text(text)
        assert earlier(file, meta_of(SECOND)) is None
    assert earlier(file.with_name("absent.json"), meta_of(SECOND)) is None


def test_two_runs_of_the_command_leave_the_rows_of_both(tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = {"model_type": "llama", "num_hidden_layers": 1, "vocab_size": 128, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for date, impl in ((FIRST, CUDA_EAGER), (SECOND, HF_EAGER)):
        settings = e2e.Settings(models=(str(tmp_path),), batches=(1,), prompt=4, new=3, impls=(impl,))
        run = e2e.E2E(settings, Console(quiet=True))
        run.settings = dataclasses.replace(run.settings, results=tmp_path)
        run.meta |= {"gpu": "Made Up", "commit": "c0ffee", "date": date}
        run.run()
    (path,) = tmp_path.glob("*/e2e/*.json")
    rows = [(r.op, r.impl, r.run, r.status) for r in read_rows(path.parent)]
    both = ((CUDA_EAGER, FIRST, "ok"), (HF_EAGER, SECOND, "ok"))
    assert rows == [(op, *each) for op in ("decode", "prefill") for each in both]
