"""The benchmark of serving: the same requests for everyone, arrivals at their rate, and honest figures."""

import asyncio
import dataclasses
import http.server
import io
import json
import statistics
import subprocess
import sys
import threading
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("triton", reason="Triton is not installed")

from rooftile.bench import charts, events, load, load_charts
from rooftile.cli import app

pytestmark = pytest.mark.nightly

WORK = load.Workload(400, 200, 100, False, 2048, 1000, 3)
LIMITS = load.Limits(0.5, 0.05)


def test_a_seed_gives_the_same_requests_and_arrivals():
    assert WORK.draw() == WORK.draw() != dataclasses.replace(WORK, seed=4).draw()
    assert WORK.arrivals(5.0) == WORK.arrivals(5.0)
    assert WORK.draw()[:7] == dataclasses.replace(WORK, requests=7).draw()
    assert not {tuple(r.prompt) for r in WORK.draw("8 clients")} & {tuple(r.prompt) for r in WORK.draw("4 clients")}


def test_lengths_have_their_means_and_a_tail():
    drawn = dataclasses.replace(WORK, requests=4000).draw()
    prompts, new = [len(r.prompt) for r in drawn], [r.new for r in drawn]
    # The standard error of a mean of 4000 is 1.8 % of it; the tail that is cut takes 1 %.
    assert statistics.mean(prompts) == pytest.approx(200, rel=0.07)
    assert statistics.mean(new) == pytest.approx(100, rel=0.07)
    assert statistics.median(prompts) < 0.75 * statistics.mean(prompts)
    assert max(prompts) <= load.TAIL * 200
    assert all(0 <= token < 1000 for r in drawn[:20] for token in r.prompt)


def test_requests_fit_into_the_longest_sequence():
    short = dataclasses.replace(WORK, longest=50)
    assert all(len(r.prompt) + r.new <= 50 and r.new >= 2 and r.prompt for r in short.draw())
    with pytest.raises(ValueError, match="prompts of 200 and answers of 100 tokens have no room in 50"):
        dataclasses.replace(short, fixed=True)
    assert {(len(r.prompt), r.new) for r in dataclasses.replace(WORK, fixed=True).draw()} == {(200, 100)}


def test_arrivals_come_at_the_rate():
    times = dataclasses.replace(WORK, requests=4000).arrivals(20.0)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(200, rel=0.07)  # the standard error is 1.6 %


class Slow:
    """Answers with a token every `pause` seconds; one in `faulty` raises, one in `short` ends early."""

    def __init__(self, pause=0.002, faulty=0, short=0):
        self.pause, self.faulty, self.short = pause, faulty, short
        self.running = self.most = self.count = 0

    async def tokens(self, request):
        self.count += 1
        number = self.count
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            for _ in range(request.new - bool(self.short and number % self.short == 0)):
                await asyncio.sleep(self.pause)
                if self.faulty and number % self.faulty == 0:
                    raise RuntimeError("lost")
                yield 1
        finally:
            self.running -= 1


SMALL = dataclasses.replace(WORK, requests=12, prompt=5, new=4, longest=64)


def test_a_closed_loop_has_its_clients_and_no_more():
    target = Slow()
    answers = asyncio.run(load.closed_loop(target, SMALL.draw(), 3))
    assert target.most == 3
    assert len(answers) == 12
    assert all(not a.error and a.tokens == a.request.new == len(a.times) for a in answers)


def test_an_open_loop_does_not_wait_for_answers():
    target = Slow(pause=0.05)
    since = time.perf_counter()
    answers = asyncio.run(load.open_loop(target, SMALL.draw(), [0.001 * i for i in range(12)]))
    assert target.most == 12
    assert all(a.arrived - since < 0.05 * 2 for a in answers)  # before a second token of anyone


def test_what_fails_is_counted_and_has_no_part_in_the_figures():
    answers = asyncio.run(load.closed_loop(Slow(faulty=4, short=6), SMALL.draw(), 4))
    row = load.row_of("rooftile", {"clients": 4}, answers, LIMITS)
    assert row["failed"] == 4  # 4, 8 and 12; 6, and 12 again
    assert row["message"] in {"RuntimeError: lost"} | {f"{n - 1} tokens, expected {n}" for n in range(2, 30)}
    assert row["output_tokens"] == sum(a.request.new for a in answers if not a.error)
    lost = load.row_of("rooftile", {"clients": 1}, [a for a in answers if a.error], LIMITS)
    assert "tokens_per_s" not in lost
    assert load.cells(lost)[3:5] == ["4", "–"]


def test_figures_of_known_times():
    request = load.Request([1, 2, 3], 3)
    slow = load.Answer(request, 0.0, [1.0, 1.1, 1.6], 3)
    fast = load.Answer(request, 1.0, [1.2, 1.21, 1.22], 3)
    row = load.row_of("x", {"rate": 2.0}, [slow, fast], LIMITS)
    assert row["seconds"] == pytest.approx(1.6)
    assert row["tokens_per_s"] == pytest.approx(6 / 1.6)
    assert row["good_per_s"] == pytest.approx(1 / 1.6)
    assert row["longest_gap"] == pytest.approx(0.5)
    assert (slow.first, slow.each) == (1.0, pytest.approx(0.3))
    assert row["first_p99"] == pytest.approx(1.0, rel=0.05)


def test_rows_of_one_machine_commit_and_workload_join_a_file(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    meta = {**load.machine(), "commit": "abc", "model": "m", "workload": {"seed": 1}, "limits": {}}
    row = load.row_of("rooftile", {"rate": 2.0}, [load.Answer(load.Request([1], 2), 0.0, [1.0, 1.1], 2)], LIMITS)
    path = tmp_path / "m.json"
    load.write(path, meta, [row])
    assert len(load.write(path, meta, [{**row, "impl": "vllm"}])) == 2
    assert len(load.write(path, {**meta, "workload": {"seed": 2}}, [row])) == 1
    assert load_charts.draw(path).stat().st_size > 1000


def of(impl, seconds, **named):
    answers = [load.Answer(load.Request([1], 2), 0.0, [seconds, 1.1 * seconds], 2)]
    return load.row_of(impl, named, answers, LIMITS)


def test_a_chart_has_the_figures_of_each_kind_of_load(tmp_path):
    rows = [of("vllm", 1.0, clients=2), of("vllm", 0.5, clients=1), of("rooftile", 0.25, rate=4.0)]
    lost = load.row_of("rooftile", {"clients": 1}, [load.Answer(load.Request([1], 2), 0.0, error="lost")], LIMITS)
    drawn = load_charts.panels([*rows, lost])
    assert [(p.size, p.title) for p in drawn] == [
        ("requests/s", "first token, ms, p99"), ("requests/s", "a token, ms, p99"), ("requests/s", "good requests/s"),
        ("clients", "tokens/s"), ("clients", "longest gap, ms"),
    ]  # fmt: skip
    *_, speed, gap = drawn
    assert drawn[0].lines == {"rooftile": [(4.0, pytest.approx(250))]}
    assert speed.lines == {"vllm": [(1, pytest.approx(2 / 0.55)), (2, pytest.approx(2 / 1.1))]}
    assert gap.lines == {"vllm": [(1, pytest.approx(50)), (2, pytest.approx(100))]}
    assert load_charts.panels([lost]) == []


def test_a_page_shows_lines_of_three_loads_or_more_and_small_files(tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    meta = {**load.machine(), "gpu": "NVIDIA H200", "commit": "abc", "model": "m", "workload": {}, "limits": {}}
    path = tmp_path / "h200" / load_charts.FOLDER / "m-p8.json"
    path.parent.mkdir(parents=True)
    load.write(path, meta, [of(impl, 1.0, clients=n) for n in (1, 2) for impl in ("rooftile", "vllm")])
    assert load_charts.of_results(tmp_path, tmp_path) == []
    load.write(path, meta, [of("rooftile", 1.0, clients=n) for n in (1, 2, 256)])
    (chart,) = load_charts.of_results(tmp_path, tmp_path)
    assert chart.path == tmp_path / "h200-serving-m-p8.svg"
    assert chart.stale
    chart.draw()
    assert not chart.stale
    assert chart.path.stat().st_size < charts.LARGEST
    load.write(path, meta, [of("rooftile", 2.0, clients=2)])
    assert load_charts.of_page(path, tmp_path).stale


async def _events_of(pieces, timeout=5.0):
    """What `events.post` yields of an answer that comes in pieces."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            await asyncio.sleep(piece if isinstance(piece, float) else 0.002)
            if isinstance(piece, bytes):
                writer.write(piece)
                await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions"
        return [event async for some in events.post(url, {}, {}, timeout) for event in some]


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = b": ping\n\ndata: {}\n\ndata: 1\r\n\r\nevent: x\ndata:2\n\n"


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_events_are_whole_however_the_answer_is_cut(step):
    half = len(BODY) // 2
    sent = b"".join(b"%X;x=y\r\n%s\r\n" % (len(part), part) for part in (BODY[:half], BODY[half:])) + b"0\r\n\r\n"
    pieces = [sent[i : i + step] for i in range(0, len(sent), step)]
    assert asyncio.run(_events_of([CHUNKED, *pieces])) == [b"{}", b"1", b"2"]
    pieces = [BODY[i : i + step] for i in range(0, len(BODY), step)]
    assert asyncio.run(_events_of([b"HTTP/1.0 200 OK\r\n\r\n", *pieces])) == [b"{}", b"1", b"2"]


def test_an_answer_that_breaks_off_or_stands_still_is_an_error():
    with pytest.raises(ConnectionError, match="has ended before the answer"):
        asyncio.run(_events_of([CHUNKED, b"9\r\ndata: 1\n\n\r\n"]))
    with pytest.raises(ConnectionError, match="has ended before the answer"):
        asyncio.run(_events_of([b"HTTP/1.1 200"]))
    with pytest.raises(TimeoutError, match="nothing came"):
        asyncio.run(_events_of([CHUNKED, b"9\r\ndata: 1\n\n\r\n", 0.5], timeout=0.05))
    with pytest.raises(ValueError, match="expected http"):
        asyncio.run(anext(events.post("127.0.0.1:80", {}, {}, 1.0)))


class _Api(http.server.BaseHTTPRequestHandler):
    """Streams two tokens in one event, and the rest one by one."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "m"}, {"id": "n"}]}).encode())

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.seen.append((self.path, self.headers["Authorization"], body))
        if body["model"] != "m":
            self.send_error(404, "no such model")
            return
        self.send_response(200)
        self.end_headers()
        for i in range(body["max_tokens"] - 1):
            self.wfile.write(f"data: {json.dumps({'choices': [{'text': 'ab' if i == 0 else 'c'}]})}\n\n".encode())
        usage = {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}
        self.wfile.write(f"data: {json.dumps(usage)}\n\ndata: [DONE]\n\n".encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Api)
    server.seen = []
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def settings(server, model):
    url = f"http://127.0.0.1:{server.server_port}/v1"
    return load.Settings(model, "random", url, "secret", "other", [50.0], [2], SMALL, LIMITS)


def test_any_server_with_the_api_is_measured(server, tmp_path):
    out = Console(file=io.StringIO(), width=200)
    path = tmp_path / "rows.json"
    assert load.run(dataclasses.replace(settings(server, "m"), json=path), out) == 0
    asked, key, body = server.seen[-1]
    assert (asked, key, body["ignore_eos"], body["stream"]) == ("/v1/completions", "Bearer secret", True, True)
    rows = json.loads(path.read_text())["rows"]
    assert [(row["impl"], row["failed"], row["output_tokens"]) for row in rows] == [
        ("other", 0, sum(r.new for r in SMALL.draw(name))) for name in ("50 requests/s", "2 clients")
    ]


def test_rows_are_written_before_a_later_load_fails(server, tmp_path, monkeypatch):
    path = tmp_path / "rows.json"
    asked, closed_loop = [], load.closed_loop

    async def failing(target, requests, clients):
        asked.append(clients)
        if clients == 3:
            raise KeyboardInterrupt
        return await closed_loop(target, requests, clients)

    monkeypatch.setattr(load, "closed_loop", failing)
    given = dataclasses.replace(settings(server, "m"), rates=[], clients=[2, 3], json=path)
    with pytest.raises(KeyboardInterrupt):
        load.run(given, Console(file=io.StringIO(), width=200))
    assert asked == [2, 2, 3]  # warmed up, measured, and the next
    assert [row["clients"] for row in json.loads(path.read_text())["rows"]] == [2]


def test_without_a_name_the_servers_first_model_is_asked(server):
    assert load.run(settings(server, ""), Console(file=io.StringIO(), width=200)) == 0
    assert server.seen[-1][2]["model"] == "m"


def test_a_server_that_refuses_fails_the_run(server):
    out = Console(file=io.StringIO(), width=200)
    assert load.run(settings(server, "unknown"), out) == 1
    assert "RuntimeError: status 404" in out.file.getvalue()


def test_an_engine_of_this_process_is_measured_by_the_command(tmp_path):
    options = "--model tiny --requests 3 --prompt 4 --new 3 --clients 2 --max-batch 2 --max-seq-len 32 --dtype fp32"
    path = tmp_path / "rows.json"
    done = CliRunner().invoke(app, ["bench", "serve", *options.split(), "--kv-dtype", "fp8", "--json", str(path)])
    assert done.exit_code == 0, done.output
    assert "2 clients" in done.output
    assert json.loads(path.read_text())["rows"][0]["engine"]["kv_dtype"] == "torch.float8_e4m3fn"


def test_prompts_begin_with_one_prefix_and_fit():
    work = dataclasses.replace(WORK, prefix=1800)
    drawn = [r.prompt for r in work.draw()]
    assert len({tuple(p[:1800]) for p in drawn}) == 1
    assert len({tuple(p[1800:]) for p in drawn}) == len(drawn)
    assert all(len(r.prompt) + r.new <= work.longest for r in work.draw())
    with pytest.raises(ValueError, match="a prefix of 2046 tokens leaves no room in 2048"):
        dataclasses.replace(WORK, prefix=2046)


def test_other_lengths_have_a_file_of_their_own():
    made = load.Settings("m", "random", None, None, "rooftile", [], [2], WORK, LIMITS)
    of = {dataclasses.replace(made, workload=dataclasses.replace(WORK, **more)).file
          for more in ({}, {"fixed": True}, {"prefix": 8}, {"fixed": True, "prefix": 8})}  # fmt: skip
    assert of == {"m.json", "m-p200-n100.json", "m-prefix8.json", "m-p200-n100-prefix8.json"}
    assert dataclasses.replace(made, tensor_parallel=(1, 2)).file == "m-tp2.json"


def test_the_own_server_is_measured_beside_the_engine(tmp_path):
    pytest.importorskip("fastapi", reason="fastapi is not installed")
    pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    options = (
        "--model tiny --per-client 2 --prompt 4 --new 3 --prefix 20 --clients 2 --max-batch 2 --max-seq-len 64 "
        "--dtype fp32 --http --step-tokens 16 --no-prefix-cache --speculate ngram:2"
    )
    path = tmp_path / "rows.json"
    done = CliRunner().invoke(app, ["bench", "serve", *options.split(), "--json", str(path)])
    assert done.exit_code == 0, done.output
    http, offline = json.loads(path.read_text())["rows"]
    assert (http["impl"], offline["impl"]) == ("rooftile http", "rooftile")
    assert http["output_tokens"] == offline["output_tokens"]
    assert http["requests"] == offline["requests"] == 4
    assert http["of_offline"] == pytest.approx(http["tokens_per_s"] / offline["tokens_per_s"])
    assert 0 < offline["host_us"] < 1e6 * offline["seconds"]
    assert offline["load_s"] > 0
    assert "start_to_first_token_s" not in offline, "the server was measured before"
    assert http["engine"]["step_tokens"] == offline["engine"]["step_tokens"] == "16"


def test_two_ranks_are_measured_beside_one(tmp_path):
    options = "--model tiny --requests 2 --prompt 4 --new 2 --clients 2 --max-batch 2 --max-seq-len 32 --dtype fp32"
    command = [sys.executable, "-m", "rooftile", "bench", "serve", *options.split(), "--tensor-parallel", "1,2"]
    command += ["--json", str(tmp_path / "rows.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 clients: 2 requests, 0 failed") == 2
    one, two = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (one["impl"], two["impl"]) == ("rooftile", "rooftile_tp2")
    assert two["of_offline"] == pytest.approx(two["tokens_per_s"] / one["tokens_per_s"])
    assert 0 < one["load_s"] < one["start_to_first_token_s"]
    assert "start_to_first_token_s" not in two, "one rank was measured before"


@pytest.mark.parametrize(
    "bad",
    [
        *(["--rate", "0"], ["--rate", "x"], ["--clients", "0"], ["--model", "lama"], ["--speculate", "x"]),
        *(["--http", "--url", "http://127.0.0.1:1"], ["--prefix", "2046"], ["--step-tokens", "8"]),
        *(["--tensor-parallel", "0"], ["--tensor-parallel", "1,2", "--http"]),
        *(["--kv-dtype", "fp4"], ["--kv-dtype", "fp8", "--peers", "vllm"]),
        ["--fixed", "--prompt", "40", "--new", "30", "--max-seq-len", "64"],
    ],
)
def test_bad_options_are_refused(bad):
    done = CliRunner().invoke(app, ["bench", "serve", "--model", "tiny", *bad])
    assert done.exit_code == 2
