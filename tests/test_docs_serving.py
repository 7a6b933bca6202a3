"""The tables of the page on serving."""

import json

import pytest

from rooftile.bench import load_charts, speculation
from rooftile.bench.docs import serving
from rooftile.bench.docs.tables import NO_RESULTS
from rooftile.bench.info import machine

pytestmark = pytest.mark.nightly


@pytest.fixture
def results(tmp_path):
    def write(folder, meta, rows, kind=""):
        path = tmp_path / "h100" / folder / f"{kind}model.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"meta": {**machine(), "gpu": "H100", "model": "model", **meta}, "rows": rows}))

    return tmp_path, write


def test_without_results_the_tables_say_so(tmp_path):
    assert serving.under_load(tmp_path) == serving.speculated(tmp_path) == NO_RESULTS
    assert serving.speculated(tmp_path, text=True) == NO_RESULTS


def test_the_server_and_vllm_stand_beside_the_engine(results):
    folder, write = results
    workload = {"prompt": 512, "new": 128, "fixed": False, "prefix": 2048}
    figures = dict.fromkeys(("tokens_per_s", "requests_per_s", "good_per_s"), 5.0)
    figures |= dict.fromkeys(("first_p50", "first_p99", "each_p50", "each_p99", "longest_gap"), 0.25)
    row = {"impl": "rooftile http", "clients": 8, "requests": 16, "failed": 0, "seconds": 1.0, **figures}
    ours = {**row, "rate": 4.0, "host_us": 800.0, "ratio_to_best_peer": 1.25}
    theirs = {**row, "impl": "vllm", "engine": {"version": "0.24.0", "max_batch": "256", "step_tokens": "16384"}}
    absent = {"impl": "vllm", "rate": 8.0, "requests": 0, "failed": 0, "status": "absent"}
    write(load_charts.FOLDER, {"workload": workload}, [{**row, "of_offline": 0.5}, ours, theirs, absent])
    head, *_, first, second, third, fourth = serving.under_load(folder).splitlines()
    assert head.startswith(
        "`model`, 512 + 128 tokens on average after 2048 that all have in common, "
        "vLLM 0.24.0: at most 256 sequences at a time and 16384 tokens of a step: **H100**"
    )
    assert [cell.strip() for cell in first.split("|")[1:4]] == ["8 clients", "rooftile http", "16"]
    assert [cell.strip() for cell in first.split("|")[-5:-1]] == ["250", "–", "0.50", "–"]
    assert [cell.strip() for cell in second.split("|")[-5:-1]] == ["250", "800", "–", "1.25"]
    assert [cell.strip() for cell in third.split("|")[2:6]] == ["vllm", "16", "0", "5.000"]
    assert [cell.strip() for cell in fourth.split("|")[2:7]] == ["vllm", "0", "0", "absent", "–"]


def test_what_a_start_took_and_a_chart_of_three_loads_stand_above_the_table(results):
    folder, write = results
    figures = dict.fromkeys(("tokens_per_s", "requests_per_s", "good_per_s"), 5.0)
    figures |= dict.fromkeys(("first_p50", "first_p99", "each_p50", "each_p99", "longest_gap"), 0.25)
    ours = {"impl": "rooftile", "requests": 16, "failed": 0, "seconds": 1.0, "load_s": 21.3, **figures}
    ours |= {"load_gbs": 0.76, "start_to_first_token_s": 43.4}
    theirs = {"impl": "vllm", "clients": 1, "requests": 0, "failed": 0, "load_s": 118.0}
    meta = {"workload": {"prompt": 512, "new": 128, "fixed": True}}
    write(load_charts.FOLDER, meta, [ours | {"clients": 1}, theirs, ours | {"clients": 2}])
    head, *rest = serving.under_load(folder).splitlines()
    assert head.endswith(
        " `rooftile` loaded in 21 s (0.760 GB/s), first token 43 s after the start; `vllm` loaded in 118 s."
    )
    assert not [line for line in rest if line.startswith("![")]
    write(load_charts.FOLDER, meta, [ours | {"clients": n} for n in (1, 2, 4)])
    (image,) = [line for line in serving.under_load(folder).splitlines() if line.startswith("![")]
    assert image == ("![model under load: tokens/s, longest gap, ms](../images/charts/h100-serving-model.svg)")


def test_plain_decoding_stands_beside_proposals_and_texts_have_a_table_of_their_own(results):
    folder, write = results
    row = {"tokens_per_second": 185.0, "speedup": 1.5, "proposed": 8, "accepted": 4, "steps": 5, "equal": True}
    rows = [{"acceptance": None, **row}, {"acceptance": 0.5, **row}]
    write(speculation.FOLDER, {"tokens": 4, "prompt": 512, "new": 256}, rows)
    lines = serving.speculated(folder).splitlines()
    assert [line.split("|")[1].strip() for line in lines[-2:]] == ["plain decoding", "50%"]
    assert serving.speculated(folder, text=True) == NO_RESULTS

    of = {"text": "prose", "tokens": 2}
    rows = [{**of, **row, "temperature": 0.0}, {**of, **row, "temperature": 0.8, "proposed": 0, "equal": False}]
    write(speculation.FOLDER, {"new": 9, "dtype": "torch.float32"}, rows, speculation.TEXT)
    head, *_, greedy, drawn = serving.speculated(folder, text=True).splitlines()
    assert head.startswith("`model` in float32, 9 tokens after each prompt: **H100**")
    assert [c.strip() for c in greedy.split("|")[1:-1]] == [
        "prose", "greedy", "2", "50%", "2.00", "1.50", "yes",
    ]  # fmt: skip
    assert [c.strip() for c in drawn.split("|")[2:5]] == ["temperature 0.8", "2", "–"]
    assert drawn.split("|")[-2].strip() == "no"
    assert serving.speculated(folder).splitlines() == lines

    write(speculation.FOLDER, {"new": 9, "dtype": "torch.float32", "draft": "small"}, rows, speculation.TEXT)
    assert "`model` in float32, with proposals of `small`, 9 tokens" in serving.speculated(folder, text=True)
