"""HTTP in a process of its own: the same answers, aborts and errors, and neither process outlives the other."""

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest
from fake_engine import HELLO, RelayedEngine, each, expected, in_background, send, serve, started, until

from rooftile.engine import RequestError
from rooftile.serve import guided

ASK = {"model": "small", "prompt": "hello", "max_tokens": 64}


def fails(request, left):
    """As prompts ask for it: at the second token."""
    if request.prompt_tokens == [1, 2, 3] and left < 30:
        raise RequestError("request 1 ended") from ValueError("out of order")
    if request.prompt_tokens == [3, 2, 1] and left < 30:
        raise RequestError("request 2 ended") from guided.GrammarError("too many expressions")


@pytest.fixture(scope="module")
def engine():
    return RelayedEngine(fails=fails, max_waiting=300)


@pytest.fixture(scope="module")
def front(engine):
    with started() as front:
        front.begin(engine)
        yield front


def post(front, body, path="/v1/completions"):
    return httpx.post(front.url + path, json=body, timeout=20)


def events(front, body):
    lines = [line.removeprefix("data: ") for line in post(front, {**body, "stream": True}).text.split("\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def is_running(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def test_the_front_imports_neither_pytorch_nor_the_engine():
    code = (
        "import sys, rooftile.serve.front, rooftile.serve.app, rooftile.serve.server\n"
        "print([name for name in ('torch', 'triton', 'rooftile.engine') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", ASK),
        ("/v1/completions", {**ASK, "prompt": ["a", "b"], "n": 2, "logprobs": 2}),
        ("/v1/chat/completions", {"model": "small", "messages": HELLO, "logprobs": True, "top_logprobs": 2}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_answers_are_those_of_one_process(front, engine, path, body, stream):
    class InProcess(RelayedEngine):
        def add_all(self, requests):
            return [Collected(self, arguments) for arguments in each(requests)]

    class Collected:
        def __init__(self, engine, arguments):
            self.chunks, loop = asyncio.Queue(), asyncio.get_running_loop()
            deliver = functools.partial(loop.call_soon_threadsafe, self.put)
            engine.add_for(deliver, [{**arguments, "request_id": str(engine.added)}])

        def put(self, batch):
            for request, chunk in batch:
                self.cached_tokens = request.cached
                self.chunks.put_nowait([chunk] if chunk else [])
                if chunk.finish_reason:
                    self.chunks.put_nowait([])

        async def ready(self):
            return await self.chunks.get()

        async def aclose(self):
            pass

    def shown(answer):
        """By choice, because their order is that of the tokens."""
        assert answer.status_code == 200
        if not stream:
            return {**answer.json(), "id": "", "created": 0}
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
        assert lines.pop() == "[DONE]"
        parts = [{**json.loads(line), "id": "", "created": 0} for line in lines]
        return sorted(parts, key=lambda part: part["choices"][0]["index"] if part["choices"] else 9)

    body = {**body, "stream": stream} | ({"stream_options": {"include_usage": True}} if stream else {})
    found = post(front, body, path)
    with serve(InProcess(), names=("small",)) as server:
        assert shown(found) == shown(post(server, body, path))


def test_a_hundred_streams_are_not_mixed(front):
    async def one(client, i):
        answer = await client.post("/v1/completions", json={**ASK, "prompt": f"client {i}", "stream": True})
        parts = [
            json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n") if line.startswith("data: {")
        ]
        assert "".join(part["choices"][0]["text"] for part in parts) == expected(f"client {i}")

    async def run():
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=front.url, timeout=30, limits=limits) as client:
            await asyncio.gather(*(one(client, i) for i in range(100)))

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_requests(front, engine, monkeypatch, stream):
    monkeypatch.setattr(engine, "answer", lambda prompt: "x" * 400)
    monkeypatch.setattr(engine, "delay", 0.05)
    asked = {**ASK, "max_tokens": 400, "stream": stream, "n": 2}
    if stream:
        with httpx.stream("POST", front.url + "/v1/completions", json=asked) as answer:
            lines = answer.iter_lines()  # kept: without it the answer would be closed at once
            next(lines)
            assert engine.stats().running == 2
    else:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(front.url + "/v1/completions", json=asked, timeout=0.3)
    until(lambda: not engine.stats().running, 10)  # they would need 20 seconds


class TestErrors:
    def test_a_full_queue_adds_none(self, front, engine, monkeypatch):
        monkeypatch.setattr(engine, "max_waiting", 3)
        before = engine.added
        found = post(front, {**ASK, "n": 4})
        assert (found.status_code, found.json()["error"]["code"]) == (429, "queue_full")
        assert engine.added == before

    @pytest.mark.parametrize(
        ("error", "status"), [(ValueError, 400), (TypeError, 400), (KeyError, 500), (RuntimeError, 503)]
    )
    def test_what_the_engine_refuses(self, front, engine, monkeypatch, error, status):
        def add_for(deliver, requests):
            raise error("add: prompt 0 needs 9 pages")

        monkeypatch.setattr(engine, "add_for", add_for)
        found = post(front, ASK)
        assert found.status_code == status
        if status == 400:
            assert found.json()["error"]["message"] == "add: prompt 0 needs 9 pages"
            assert found.json()["error"]["param"] == "prompt"

    def test_what_ends_a_request(self, front, caplog):
        assert post(front, {**ASK, "prompt": [1, 2, 3]}).status_code == 500
        (logged,) = [record for record in caplog.records if "out of order" in record.getMessage()]
        assert logged.exc_info  # in the process that knows where it was raised
        found = post(front, {**ASK, "prompt": [3, 2, 1]})
        assert (found.status_code, found.json()["error"]["code"]) == (400, "grammar_error")
        assert found.json()["error"]["message"] == "too many expressions"
        *_, last = events(front, {**ASK, "prompt": [1, 2, 3]})
        assert last["error"]["message"] == "the request failed in the engine"
        assert post(front, ASK).status_code == 200

    def test_an_engine_that_has_failed(self, front, engine, monkeypatch):
        assert httpx.get(front.url + "/health").status_code == 200
        monkeypatch.setattr(engine, "failed", True)
        assert httpx.get(front.url + "/health").json() == {"status": "failed"}
        assert post(front, ASK).status_code == 503


class TestGrammars:
    def test_they_hold_the_engine(self, front):
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
        format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
        found = post(front, {"model": "small", "messages": HELLO, "response_format": format}, "/v1/chat/completions")
        assert isinstance(json.loads(found.json()["choices"][0]["message"]["content"])["a"], int)
        found = post(front, {**ASK, "n": 2, "structured_outputs": {"choice": ["xyz"]}})
        assert [choice["text"] for choice in found.json()["choices"]] == ["xyz"] * 2

    def test_one_that_is_not_valid(self, front):
        found = post(front, {**ASK, "structured_outputs": {"grammar": "start: ("}})
        assert (found.status_code, found.json()["error"]["param"]) == (400, "structured_outputs")


def test_the_statistics_are_those_of_the_engine(front, engine):
    assert f"rooftile_cache_pages {float(engine.stats().pages)}" in httpx.get(front.url + "/metrics").text


def test_when_the_front_is_killed_its_engine_is_told():
    with started() as front:
        front.begin(RelayedEngine())
        threading.Timer(0.1, front._process.kill).start()
        assert front.run() == 1
        assert front._process.exitcode == -signal.SIGKILL


def test_a_front_that_stands_still_does_not_stop_the_engine():
    """More than the kernel keeps for it, which it gets when it goes on."""
    with started() as front:
        front.begin(RelayedEngine())
        os.kill(front._process.pid, signal.SIGSTOP)
        for _ in range(4096):
            front._send("chunks", [("gone", 0, "x" * 4096)])
        os.kill(front._process.pid, signal.SIGCONT)
        assert post(front, ASK).status_code == 200


def test_a_front_that_ends_while_a_model_is_loaded():
    with started() as front:
        front._process.kill()
        with pytest.raises(RuntimeError, match="has ended"):
            front.begin(RelayedEngine())


@pytest.mark.parametrize("begun", [False, True])
def test_when_the_engines_process_is_gone_the_front_ends(begun):
    """Its end of the channel is closed, as the kernel does with what a process leaves."""
    with started() as front:
        if begun:
            front.begin(RelayedEngine())
        front._channel.shutdown(2)
        front._process.join(10)
        assert front._process.exitcode == 1


@pytest.mark.parametrize(
    ("signals", "code"), [((signal.SIGTERM,), 0), ((signal.SIGINT,), 0), ((signal.SIGTERM, signal.SIGTERM), 1)]
)
def test_a_signal_drains_and_a_second_one_cuts(signals, code):
    engine, answers = RelayedEngine(delay=0.01 if code == 0 else 0.5), []
    with started() as front:
        front.begin(engine)

        asking = threading.Thread(target=lambda: answers.append(post(front, ASK)))
        asking.start()
        until(lambda: engine.stats().running)

        def end():
            os.kill(front._process.pid, signal.SIGTERM)  # a service manager may send it to all
            send(signals[0])
            until(lambda: post(front, ASK).status_code == 503)
            for each in signals[1:]:
                send(each)

        in_background(front, end)
        began = time.monotonic()
        assert front.run() == code
        assert time.monotonic() - began < 8  # without the second one 20
        asking.join()
    if code == 0:
        assert answers[0].json()["choices"][0]["text"] == expected("hello")
    else:
        assert answers[0].status_code == 503
    assert not is_running(front._process.pid)


def test_what_does_not_end_in_time_is_aborted():
    engine, answers = RelayedEngine(answer=lambda prompt: "x" * 400, delay=0.05), []
    with started(drain_timeout=0.2) as front:
        front.begin(engine)
        asking = threading.Thread(target=lambda: answers.append(post(front, {**ASK, "max_tokens": 400})))
        asking.start()
        until(lambda: engine.stats().running)
        in_background(front, lambda: send(signal.SIGTERM))
        assert front.run() == 0
        asking.join()
    assert (answers[0].status_code, answers[0].json()["error"]["code"]) == (503, "shutting_down")
    assert not engine.stats().running
