"""The server's limits: bodies, keys, the queue, malformed requests; draining; metrics; clients that leave."""

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import httpx
import pytest
from fake_engine import HELLO, FakeEngine, MaskedEngine, expected, serve
from typer.testing import CliRunner

import rooftile
from rooftile import byte_model
from rooftile.cli import app as command_line
from rooftile.serve.app import Options, create_app
from rooftile.serve.server import BackgroundServer

ASK = {"model": "small", "prompt": "a"}
JSON = {"content-type": "application/json"}


def long_answer(prompt):
    return "x" * 400


def post(server, body=ASK, path="/v1/completions", **more):
    if isinstance(body, bytes):
        return httpx.post(server.url + path, content=body, headers={**JSON, **more.pop("headers", {})}, **more)
    return httpx.post(server.url + path, json=body, **more)


def leave(server, asked):
    """Ask, and leave before the answer has ended."""
    if asked["stream"]:
        with httpx.stream("POST", server.url + "/v1/completions", json=asked) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.ReadTimeout):
            post(server, asked, timeout=0.3)


def idle(engine, seconds=10.0):
    """Whether the engine holds nothing within that time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        stats = engine.stats()
        if not (stats.running or stats.waiting or stats.pages_used):
            return True
        time.sleep(0.01)
    return False


def until(true, seconds=20.0):
    """Wait until that is true."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def all_left(server):
    """Wait until no request is in the server: it counts and logs one after the answer was sent."""
    until(lambda: server.app.state.gate.inside == 0)


@pytest.fixture(scope="module")
def server():
    with serve(FakeEngine(), max_body=100_000) as server:
        yield server


class TestBodies:
    def test_a_body_that_is_not_sent_as_json(self, server):
        """As curl sends it without a header."""
        url, kind = f"{server.url}/v1/completions", "application/x-www-form-urlencoded"
        found = httpx.post(url, content=b'{"model": "small", "prompt": "a"}', headers={"content-type": kind})
        assert (found.status_code, "content-type is not application/json" in found.text) == (400, True)

    @pytest.mark.parametrize(
        ("body", "part"),
        [
            (b"", "Field required"),
            (b"{", "no JSON"),
            (b"null", "no JSON object"),
            (b"[1]", "no JSON object"),
            (b"[" * 50_000, "no JSON"),
            (b'{"model": "small", "prompt": "\xff\xfe"}', "no JSON"),
            (b'{"model": "small", "prompt": "\\ud800"}', "can't be tokenized"),
            (b'{"model": "small", "prompt": "a", "temperature": NaN}', "finite number"),
            (b'{"model": "small", "prompt": "a", "seed": 1e400}', "seed"),
            (b'{"model": "small", "prompt": "a", "max_tokens": 1' + b"0" * 10_000 + b"}", ""),
            (b'{"model": "small", "prompt": 5}', "prompt"),
        ],
        ids=str,
    )
    def test_what_is_malformed(self, server, body, part):
        found = post(server, body)
        assert found.status_code == 400
        assert found.json()["error"]["type"] == "invalid_request_error"
        assert part in found.json()["error"]["message"]

    LONE = "x\ud800y"  # in JSON an escape, and in no UTF-8

    @pytest.mark.parametrize(
        ("path", "extra", "status"),
        [
            ("completions", {"model": LONE}, 404),
            ("completions", {"prompt": [LONE]}, 400),
            ("completions", {"prompt": LONE, "echo": True, "max_tokens": 0}, 400),
            ("completions", {"stop": [LONE]}, 400),
            ("completions", {"logit_bias": {LONE: 1}}, 400),
            ("completions", {LONE: 1}, 400),
            ("completions", {"user": LONE}, 200),
            ("completions", {"structured_outputs": {"regex": LONE}}, 400),
            ("completions", {"structured_outputs": {"choice": [LONE]}}, 400),
            ("completions", {"structured_outputs": {"json": {"const": LONE}}}, 400),
            ("chat/completions", {"messages": [{"role": "user", "content": LONE}]}, 400),
            ("chat/completions", {"messages": [{"role": LONE, "content": "a"}]}, 400),
            ("chat/completions", {"messages": [{"role": "user", "content": [{"type": LONE}]}]}, 400),
            ("chat/completions", {"tools": [{"type": "function", "function": {"name": LONE}}]}, 400),
            ("chat/completions", {"response_format": {"type": LONE}}, 400),
        ],
    )
    def test_text_that_has_no_utf8(self, path, extra, status):
        body = {"model": "small"} | ({"messages": HELLO} if "chat" in path else {"prompt": "a"}) | extra
        with serve(MaskedEngine()) as server:
            found = post(server, json.dumps(body).encode(), f"/v1/{path}")
            assert found.status_code == status
            assert status == 200 or found.json()["error"]["message"]
            assert post(server).status_code == 200

    def test_a_prompt_over_the_servers_own_limit(self):
        with serve(FakeEngine(), max_prompt_tokens=30) as server:
            chat = {"model": "small", "messages": HELLO}
            for prompt, body, path in (("a" * 31, ASK, "completions"), (None, chat, "chat/completions")):
                long = {"prompt": prompt} if prompt else {"messages": HELLO * 2}
                found = post(server, body | long, f"/v1/{path}")
                assert (found.status_code, found.json()["error"]["code"]) == (400, "context_length_exceeded")
                assert "expected at most 30" in found.json()["error"]["message"]
                assert post(server, body, f"/v1/{path}").status_code == 200
            assert post(server, {**ASK, "prompt": "a" * 30}).status_code == 200

    def test_a_client_that_leaves_within_its_body(self, caplog):
        with serve(FakeEngine()) as server, caplog.at_level("INFO", logger="rooftile.serve"):
            host, port = server.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=10) as client:
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
                until(lambda: server.app.state.gate.inside)
            all_left(server)
            assert any("499" in r.getMessage() and "left=True" in r.getMessage() for r in caplog.records)
            assert post(server).status_code == 200

    def test_another_content_type(self, server):
        found = httpx.post(server.url + "/v1/completions", data={"prompt": "a"})
        assert found.status_code == 400
        assert "application/json" in found.json()["error"]["message"]

    def test_a_body_that_is_too_large(self, server):
        found = post(server, {**ASK, "prompt": "a" * 200_000})
        assert found.status_code == 413
        assert "larger than 100000 bytes" in found.json()["error"]["message"]

        def parts():
            for _ in range(20):
                yield b"x" * 10_000

        assert httpx.post(server.url + "/v1/completions", content=parts(), headers=JSON).status_code == 413

    def test_a_body_that_does_not_come(self):
        with serve(FakeEngine(), body_timeout=0.2) as server:
            host = server.url.removeprefix("http://").split(":")
            with socket.create_connection((host[0], int(host[1])), timeout=10) as client:
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
                assert client.recv(4096).startswith(b"HTTP/1.1 408 ")
            assert post(server).status_code == 200

    @pytest.mark.parametrize(
        ("method", "path", "status"),
        [
            ("GET", "/v1/completions", 405),
            ("GET", "/nothing", 404),
            ("POST", "/v1/%ff%00", 404),
            ("PUT", "/health", 405),
        ],
    )
    def test_other_paths_and_methods(self, server, method, path, status):
        found = httpx.request(method, server.url + path)
        assert (found.status_code, list(found.json())) == (status, ["error"])

    def test_a_path_without_v1_names_those_that_there_are(self, server):
        said = post(server, path="/completions").json()["error"]["message"]
        assert said == (
            "there is no '/completions', expected one of /health, /metrics, /v1/chat/completions, /v1/completions, "
            "/v1/models"
        )

    def test_health_without_a_body(self, server):
        found = httpx.head(server.url + "/health")
        assert (found.status_code, found.content) == (200, b"")


class TestKeys:
    def test_v1_needs_one_of_them(self):
        with serve(FakeEngine(), api_keys=("first", "sécond")) as server:
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic first"}):
                found = post(server, headers=headers)
                assert found.status_code == 401
                assert found.json()["error"]["type"] == "authentication_error"
            for key in ("first", "sécond"):
                assert post(server, headers={"authorization": f"Bearer {key}".encode()}).status_code == 200
            assert httpx.get(server.url + "/v1/models").status_code == 401
            assert httpx.get(server.url + "/health").status_code == 200


class TestQueue:
    def test_a_full_queue(self):
        engine = FakeEngine(answer=long_answer, delay=0.05, max_batch=1, max_waiting=1)
        with serve(engine) as server:
            stop = threading.Event()

            def ask():
                with httpx.stream(
                    "POST", server.url + "/v1/completions", json={**ASK, "stream": True, "max_tokens": 400}
                ):
                    stop.wait(20)

            threads = [threading.Thread(target=ask) for _ in range(2)]
            for thread, (running, waiting) in zip(threads, [(1, 0), (1, 1)], strict=True):
                thread.start()
                until(lambda r=running, w=waiting: (engine.running, engine.waiting) == (r, w))
            found = post(server)
            assert found.status_code == 429
            assert int(found.headers["retry-after"]) >= 1
            assert found.json()["error"]["code"] == "queue_full"
            stop.set()
            for thread in threads:
                thread.join()
            assert idle(engine)

    def test_a_request_is_admitted_as_a_whole_or_not_at_all(self):
        engine = FakeEngine(max_batch=1, max_waiting=6)
        with serve(engine) as server:
            found = post(server, {**ASK, "prompt": ["a", "b"], "n": 4})
            assert (found.status_code, engine.added) == (400, 0)
            found = post(server, {**ASK, "prompt": ["a", "b"], "n": 3})
            assert (found.status_code, engine.added) == (200, 6)

    def test_an_engine_that_has_failed(self):
        class Failed(FakeEngine):
            def add(self, prompt, **options):
                raise RuntimeError("the engine has failed")

        engine = Failed()
        with serve(engine) as server:
            assert httpx.get(server.url + "/health").status_code == 200
            found = post(server)
            assert (found.status_code, "retry-after" in found.headers) == (503, True)
            engine.failed = True
            assert httpx.get(server.url + "/health").status_code == 503

    def test_an_error_in_the_server_is_answered(self):
        class Broken(FakeEngine):
            def add(self, prompt, **options):
                raise KeyError("a fault")

        with serve(Broken()) as server:
            found = post(server)
            assert (found.status_code, found.json()["error"]["type"]) == (500, "server_error")
            assert found.headers["x-request-id"]


class TestRequestIds:
    def test_the_client_may_choose_it(self, server):
        assert post(server, headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
        for bad in ("a b", "x" * 200, 'a"b'):
            assert re.fullmatch("[0-9a-f]{32}", post(server, headers={"x-request-id": bad}).headers["x-request-id"])

    def test_it_is_in_the_log(self, server, caplog):
        with caplog.at_level("INFO", logger="rooftile.serve"):
            post(server, headers={"x-request-id": "mine-2"})
            all_left(server)
        (line,) = [r.getMessage() for r in caplog.records if "mine-2" in r.getMessage()]
        assert "'/v1/completions' 200" in line
        assert "prompt=1 tokens=16" in line


class TestMetrics:
    def test_they_count(self):
        engine = FakeEngine()
        with serve(engine) as server:
            post(server)
            post(server, b"{")
            httpx.get(server.url + "/" + "x" * 50)
            all_left(server)
            text = httpx.get(server.url + "/metrics").text
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert lines['rooftile_http_requests_total{path="/v1/completions",status="200"}'] == "1.0"
        assert lines['rooftile_http_requests_total{path="/v1/completions",status="400"}'] == "1.0"
        assert lines['rooftile_http_requests_total{path="other",status="404"}'] == "1.0"
        assert lines["rooftile_generated_tokens_total"] == "16.0"
        assert lines["rooftile_time_to_first_token_seconds_count"] == "1.0"
        assert lines["rooftile_time_per_output_token_seconds_count"] == "1.0"
        assert lines['rooftile_requests_finished_total{reason="length"}'] == "1.0"
        assert lines["rooftile_requests_running"] == lines["rooftile_cache_usage"] == "0.0"
        assert "rooftile_prefix_cache_hit_tokens_total" in lines

    @pytest.mark.parametrize("stream", [False, True])
    def test_requests_by_outcome(self, stream):
        """The first is left by its client, the second fails in the engine, and the third ends."""
        engine = FakeEngine(answer=long_answer, delay=0.01, fails=lambda stream, i: len(stream.prompt_tokens) == 3)
        with serve(engine) as server:
            asked = {**ASK, "stream": stream, "n": 2}
            leave(server, {**asked, "max_tokens": 400})
            post(server, {**asked, "prompt": "bad"})
            post(server, asked)
            post(server, {**asked, "max_tokens": -1})
            all_left(server)
            text = httpx.get(server.url + "/metrics").text
        found = dict(re.findall(r'rooftile_requests_total{outcome="(\w+)"} (\S+)', text))
        assert found == {"finished": "1.0", "aborted": "1.0", "failed": "1.0"}


class TestClientsThatLeave:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize("n", [1, 4])
    def test_their_slots_are_free(self, stream, n):
        engine = FakeEngine(answer=long_answer, delay=0.05, max_batch=2)
        with serve(engine) as server:
            leave(server, {**ASK, "stream": stream, "n": n, "max_tokens": 400})
            assert idle(engine)  # it would need 20 seconds to end, or more

    def test_one_that_never_reads(self):
        """Its answer is larger than all buffers between."""
        engine = FakeEngine(answer=lambda prompt: "ab" * 3_000, max_seq_len=10_000)
        with serve(engine, send_timeout=0.3) as server:
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            host, port = server.url.removeprefix("http://").split(":")
            client.connect((host, int(port)))
            body = json.dumps({**ASK, "stream": True, "max_tokens": 9_000, "n": 8}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n"
            client.sendall(f"{head}content-type: application/json\r\n\r\n".encode() + body)
            assert idle(engine)
            all_left(server)
            assert post(server).status_code == 200
            client.close()


class TestDraining:
    def test_new_requests_are_refused(self):
        engine = FakeEngine(delay=0.02)
        with serve(engine) as server:
            answers = []
            thread = threading.Thread(target=lambda: answers.append(post(server, {**ASK, "max_tokens": 30})))
            thread.start()
            until(lambda: engine.running)
            server.app.state.gate.closed = True
            found = post(server)
            assert (found.status_code, found.json()["error"]["code"]) == (503, "shutting_down")
            assert int(found.headers["retry-after"]) >= 1
            assert httpx.get(server.url + "/health").status_code == 503
            assert httpx.get(server.url + "/metrics").status_code == 200
            thread.join()
            assert answers[0].json()["choices"][0]["text"] == expected("a")[:30]

    def test_what_does_not_end_in_time_is_aborted(self):
        engine = FakeEngine(answer=long_answer, delay=0.05)
        app = create_app(engine, Options(names=("small",)))
        with BackgroundServer(app, abort=engine.close, drain_timeout=0.2) as server:
            answers = []

            def ask(stream):
                answers.append(post(server, {**ASK, "max_tokens": 200, "stream": stream}))

            threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
            for thread in threads:
                thread.start()
            until(lambda: engine.running == 2)
            server._server.handle_exit(signal.SIGTERM, None)
            for thread in threads:
                thread.join(5)
            server._thread.join(5)
            assert not server._thread.is_alive()
        whole, events = sorted(answers, key=lambda answer: answer.status_code, reverse=True)
        assert (whole.status_code, whole.json()["error"]["code"]) == (503, "shutting_down")
        *before, error, done, end = events.text.split("\n\n")
        assert {json.loads(e.removeprefix("data: "))["choices"][0]["finish_reason"] for e in before} == {None}
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "shutting_down"
        assert (done, end) == ("data: [DONE]", "")

    @pytest.mark.nightly  # signals to a process: test_serve_front.py; what they do: the tests above
    def test_sigterm(self, tmp_path):
        """The command, in a process of its own: what runs is finished, and the process ends with code 0."""
        template = tmp_path / "template.jinja"
        template.write_text("{{ messages[0].content }}")
        arguments = ["serve", "demo", "--port", "0", "--max-batch", "2", "--max-seq-len", "64", "--dtype", "fp32"]
        arguments += ["--chat-template", str(template), "--served-model-name", "small"]
        process = subprocess.Popen(
            [sys.executable, "-m", "rooftile", *arguments],
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "ROOFTILE_API_KEY": "secret"},
        )
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if found := re.search(r"listening on (http://\S+)", line):
                    break
            assert found, "".join(lines)
            rest = threading.Thread(target=lambda: lines.extend(process.stderr))
            rest.start()
            url, key = found[1], {"authorization": "Bearer secret"}
            asked = {"model": "small", "messages": [{"role": "user", "content": "a"}], "max_tokens": 6}
            asked |= {"stream": True, "temperature": 0}
            to = url + "/v1/chat/completions"
            with httpx.stream("POST", to, json=asked, headers=key, timeout=60) as stream:
                events = stream.iter_lines()
                next(events)
                process.send_signal(signal.SIGTERM)
                until(lambda: httpx.get(url + "/health").status_code == 503)
                assert httpx.post(url + "/v1/completions", json=ASK, headers=key).status_code == 503
                events = [line for line in events if line]
            assert events[-1] == "data: [DONE]"
            assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
            assert process.wait(20) == 0
            rest.join()
            assert any("SIGTERM: 1 request running; new ones are refused" in line for line in lines), lines
        finally:
            process.kill()
            process.wait()


class TestCommands:
    @pytest.mark.parametrize("name", ["serve", "chat"])
    def test_a_checkpoint_that_is_not_there(self, name):
        found = CliRunner().invoke(command_line, [name, "/no/such/folder"])
        assert found.exit_code == 2
        assert "does not exist" in found.output

    def test_without_the_extra(self, monkeypatch):
        import importlib.util

        find = importlib.util.find_spec
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "uvicorn" else find(name, *a))
        found = CliRunner().invoke(command_line, ["serve", "demo"])
        assert found.exit_code == 2
        assert (
            found.output.strip()
            == "rooftile serve: the server needs uvicorn: pip install '.[serve]' in a clone of Rooftile"
        )

    def test_the_tokens_of_a_step_reach_the_engine(self):
        options = ["--port", "0", "--max-batch", "2", "--max-seq-len", "64", "--step-tokens", "2", "--dtype", "fp32"]
        found = CliRunner().invoke(command_line, ["serve", "demo", *options])
        assert found.exit_code == 2
        assert "rooftile serve: --step-tokens is 2, expected more than --max-batch, 2" in found.output

    def test_an_empty_key_protects_nothing(self):
        found = CliRunner().invoke(command_line, ["serve", "demo", "--port", "0", "--api-key", ""])
        assert found.exit_code == 2
        assert "--api-key is empty, expected a key" in found.output

    def test_chat_needs_a_template(self):
        found = CliRunner().invoke(command_line, ["chat", str(byte_model.folder())])
        assert found.exit_code == 2
        assert "has no chat template" in found.output

    def test_a_system_message_that_is_not_utf8(self):
        found = CliRunner().invoke(command_line, ["chat", "demo", "--system", "\udcff"])
        assert found.exit_code == 2
        assert "--system is not UTF-8" in found.output

    @pytest.mark.parametrize(
        ("command", "flag", "keeps"),
        [
            ("chat", [], True),
            ("chat", ["--prefix-cache"], True),
            ("chat", ["--no-prefix-cache"], False),
            ("serve", ["--port", "0", "--no-prefix-cache"], False),
        ],
    )
    def test_whether_a_prefix_cache_is_kept_reaches_the_engine(self, command, flag, keeps, tmp_path, monkeypatch):
        def loaded(folder, *, prefix_cache, **options):
            raise ValueError(f"it is asked for {prefix_cache}")

        monkeypatch.setattr(rooftile.AsyncEngine, "from_pretrained", loaded)
        template = tmp_path / "template.jinja"
        template.write_text("{{ messages[0].content }}")
        found = CliRunner().invoke(command_line, [command, "demo", "--chat-template", str(template), *flag])
        assert found.exit_code == 2
        assert f"rooftile {command}: it is asked for {keeps}" in found.output

    def test_a_conversation(self, tmp_path):
        """The history is part of the next prompt until /reset; what is too long, or not UTF-8, is reported."""
        template = tmp_path / "template.jinja"
        template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
        lines = [
            "    for line in ",
            "",
            "/help",
            "    for line in ",
            "x" * 100,
            "/reset",
            "    for line in ",
            "/quit",
            "no",
        ]
        arguments = ["chat", "demo", "--chat-template", str(template), "--max-new-tokens", "3", "--temperature", "0"]
        asked = "\n".join(lines).encode().replace(b"/help", b"/help\n\xff\xfe\xe2\x82")
        found = CliRunner().invoke(command_line, [*arguments, "--max-seq-len", "64"], input=asked)
        assert found.exit_code == 0, found.output
        assert found.stderr.count("the line is not UTF-8") == 1
        assert found.stderr.count("3 tokens, the first after") == 3
        first, third = found.stdout[:3], found.stdout[-4:-1]  # a token is a byte
        assert first == third
        assert "/reset forgets the conversation" in found.output
        assert "and --max-seq-len is 64: /reset" in found.output


def test_slow_readers_get_everything():
    async def read(url, i):
        async with httpx.AsyncClient(timeout=30) as client:
            asked = {"model": "small", "prompt": f"{i}", "max_tokens": 64, "stream": True}
            async with client.stream("POST", url + "/v1/completions", json=asked) as answer:
                events = []
                async for line in answer.aiter_lines():
                    await asyncio.sleep(0.002)
                    events.append(line)
        parts = [json.loads(e.removeprefix("data: ")) for e in events if e.startswith("data: {")]
        return "".join(part["choices"][0]["text"] for part in parts)

    async def run(url):
        return await asyncio.gather(*(read(url, i) for i in range(4)))

    with serve(FakeEngine()) as server:
        assert asyncio.run(run(server.url)) == [expected(f"{i}") for i in range(4)]
