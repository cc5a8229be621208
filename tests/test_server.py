"""lily_mlx.server under real clients: neighbours, streams, disconnects, bad requests, turns."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request

import pytest

from lily_mlx import cli

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(port, log, *words, run=("-m", "lily_mlx", "server")):
    with open(log, "wb") as sink:
        return subprocess.Popen(
            [sys.executable, *run, "--port", str(port), *words],
            stdout=sink,
            stderr=sink,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )


def wait_until_ready(process, port, log):
    for _ in range(600):
        assert process.poll() is None, log.read_text()
        if healthy(port):
            return
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def healthy(port):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as reply:
            return reply.status == 200
    except OSError:
        return False


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    log = tmp_path_factory.mktemp("server") / "log"
    number = free_port()
    process = start(number, log)
    try:
        wait_until_ready(process, number, log)
        yield number
    finally:
        process.kill()
        process.wait(timeout=30)


def post(port, path, body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def ask(text, **more):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 40, **more}


def message(port, body):
    return post(port, CHAT, body)["choices"][0]["message"]


def stream(port, path, body):
    """Open a streaming request; returns the connection and its reply."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    payload = json.dumps({**body, "stream": True})
    connection.request("POST", path, payload, {"Content-Type": "application/json"})
    return connection, connection.getresponse()


def events(reply):
    for line in reply:
        if line.startswith(b"data: ") and b"[DONE]" not in line:
            yield json.loads(line[6:])


# --- what is written --------------------------------------------------------------------------


def test_requests_of_different_lengths_at_once_are_answered_as_alone(port):
    """Text completions: pads of the shorter rows must not reach the states of any."""
    prompts = ["The", "It was a dark night, and the old man " * 3, "Once upon a time there was a"]
    bodies = [{"prompt": p, "max_tokens": 12 + 6 * i} for i, p in enumerate(prompts)]
    # A seed is served alone, on the decode step; greedy words do not depend on it.
    alone = [post(port, TEXT, {**b, "seed": 1})["choices"][0]["text"] for b in bodies]
    together = [None] * len(bodies)

    def work(i):
        together[i] = post(port, TEXT, bodies[i])["choices"][0]["text"]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert together == alone


def test_a_stream_carries_the_words_of_the_whole_answer(port):
    whole = message(port, ask("hello"))
    connection, reply = stream(port, CHAT, ask("hello"))
    deltas = [e["choices"][0]["delta"] for e in events(reply)]
    connection.close()
    assert "".join(d.get("content") or "" for d in deltas) == whole["content"]
    assert "".join(d.get("reasoning") or "" for d in deltas) == whole["reasoning"]
    assert len(deltas) > 10


def test_thinking_is_told_apart_and_can_be_switched_off(port):
    thinking = message(port, ask("hello"))
    assert thinking["reasoning"].strip() and "<think>" not in thinking["content"]
    plain = message(port, ask("hello", chat_template_kwargs={"enable_thinking": False}))
    assert plain["content"].strip() and not plain.get("reasoning")


def test_a_second_turn_reuses_the_first(port):
    turns = [{"role": "user", "content": "My name is Thomas, and I live by the sea."}]
    body = {"messages": turns, "max_tokens": 30}
    first = post(port, CHAT, body)
    turns += [
        {"role": "assistant", "content": first["choices"][0]["message"]["content"]},
        {"role": "user", "content": "Go on."},
    ]
    body = {"messages": turns, "max_tokens": 20}
    second = post(port, CHAT, body)
    reused = second["usage"]["prompt_tokens_details"]["cached_tokens"]
    # At least the first message; its answer counts only if it was kept word for word.
    assert reused >= first["usage"]["prompt_tokens"] - 5
    # The reuse changes no word: a seed makes the server start from other caches, or from none.
    again = post(port, CHAT, {**body, "seed": 1})
    assert again["choices"][0]["message"] == second["choices"][0]["message"]


def test_a_prompt_that_is_cached_whole_is_answered(port):
    """mlx-lm finds no token left to run for it, which ends its generation thread."""
    prompt = "The house stood upon a hill, and"
    first = post(port, TEXT, {"prompt": prompt, "max_tokens": 8})["choices"][0]["text"]
    for body in ({"prompt": prompt + first}, {"prompt": prompt}, {"prompt": prompt, "seed": 1}):
        assert post(port, TEXT, {**body, "max_tokens": 8})["choices"][0]["text"]
    assert post(port, TEXT, {"prompt": prompt, "max_tokens": 8})["choices"][0]["text"] == first


# --- what goes wrong --------------------------------------------------------------------------


def test_a_client_that_leaves_in_mid_stream_harms_nobody(port):
    expected = message(port, ask("hello"))
    for _ in range(3):
        connection, reply = stream(port, TEXT, {"prompt": "The sea", "max_tokens": 4000})
        next(events(reply))
        reply.close()  # it owns the socket, since the server ends a stream by closing it
        connection.close()
    assert message(port, ask("hello")) == expected
    assert healthy(port)


BAD = {
    "no prompt": (TEXT, {"prompt": ""}, "no tokens"),
    "too long a prompt": (TEXT, {"prompt": "a " * 40000}, "max_position_embeddings"),
    "a bias beyond the vocabulary": (CHAT, ask("hi", logit_bias={"999999": 1.0}), "999999"),
    "top_k beyond the vocabulary": (CHAT, ask("hi", top_k=10**9, temperature=1.0), "top_k"),
    "stop words that are no text": (CHAT, ask("hi", stop=[5]), "text input"),
    "stop words that are no list": (CHAT, ask("hi", stop=5), "iterable"),
    "a seed that is none": (CHAT, ask("hi", seed=-1), "seed -1"),
    "template settings that are none": (CHAT, ask("hi", chat_template_kwargs=5), "int"),
    "a model that is not there": (CHAT, ask("hi", model="/none"), "does not exist"),
    "no messages": (CHAT, {"messages": []}, "message"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_fails_alone(port, name):
    path, body, word = BAD[name]
    # A neighbour is being served while the bad request comes in.
    connection, reply = stream(port, TEXT, {"prompt": "The sea was", "max_tokens": 150})
    neighbour = events(reply)
    next(neighbour)
    with pytest.raises(urllib.error.HTTPError) as error:
        post(port, path, body)
    assert 400 <= error.value.code < 500
    assert word in json.load(error.value)["error"]
    last = list(neighbour)[-1]
    connection.close()
    assert last["choices"][0]["finish_reason"] in ("length", "stop")
    assert healthy(port)


def test_generation_that_fails_gives_its_requests_the_error_and_goes_on():
    """An error that no check foresaw: in process, a model that fails once."""
    from queue import Queue
    from types import SimpleNamespace

    from lily_mlx.private import private_copy
    from lily_mlx.serving import isolate_requests

    command = private_copy("server", "failing")
    isolate_requests(command)

    failures = [RuntimeError("one bad moment")]

    class Generator(command.ResponseGenerator):
        def _generate(self):
            while not self._stop:
                request = self._next_request(timeout=0.05)
                if request is not None:
                    if failures:
                        raise failures.pop()
                    request[0].put("answer")

    provider = SimpleNamespace(load_default=lambda: None, reset=lambda: None)
    generator = Generator(provider, command.LRUPromptCache(2))
    try:
        first, second = Queue(), Queue()
        generator.requests.put((first, None, None))
        assert "one bad moment" in str(first.get(timeout=10))
        assert generator.is_healthy
        generator.requests.put((second, None, None))
        assert second.get(timeout=10) == "answer"
    finally:
        generator.stop_and_join()
    # That thread ran in this process: another command's end must not take the process with it.
    assert command.generation_has_run
    with pytest.raises(SystemExit):
        cli.main(["server", "--help"])


COUNTING = """
import weakref
from lily_mlx import cli, model
made, build = [], model.TextModel.__init__
def count(self, *args):
    print("alive:", sum(m() is not None for m in made), flush=True)
    build(self, *args)
    made.append(weakref.ref(self))
model.TextModel.__init__ = count
cli.main()
"""


def test_wrong_model_names_leave_no_models_behind(tmp_path):
    """mlx-lm lets the model go before it looks for another, and makes it again when asked."""
    number, log = free_port(), tmp_path / "log"
    process = start(number, log, run=("-c", COUNTING, "server"))
    try:
        wait_until_ready(process, number, log)
        first = message(number, ask("hello"))
        for i in range(5):
            with pytest.raises(urllib.error.HTTPError):
                message(number, ask("hello", model=f"/none/{i}"))
            # Alone, with a seed, and in a batch.
            assert message(number, ask("hello", **({"seed": 1} if i % 2 else {}))) == first
    finally:
        process.kill()
        process.wait(timeout=30)
    alive = [int(x.split(":")[1]) for x in log.read_text().splitlines() if x.startswith("alive:")]
    # The one before, which mlx-lm's loop still has at hand, and none of those before that.
    assert len(alive) == 6 and alive[0] == 0 and max(alive) <= 1


# --- starting and stopping --------------------------------------------------------------------


def ended(port, log, *words):
    process = start(port, log, *words)
    try:
        code = process.wait(timeout=60)
    finally:
        process.kill()
    return code, log.read_text().strip()


def test_a_model_that_cannot_be_loaded_ends_the_server_in_a_sentence(tmp_path):
    code, said = ended(free_port(), tmp_path / "log", "--model", str(tmp_path / "none"))
    assert code == 2 and "\n" not in said and "does not exist" in said


def test_a_port_that_is_taken_ends_the_server_in_a_sentence(port, tmp_path):
    code, said = ended(port, tmp_path / "log")
    assert code == 2 and "\n" not in said and f"127.0.0.1:{port}" in said and "--port" in said


def test_an_interrupt_ends_the_server_quietly(tmp_path):
    number, log = free_port(), tmp_path / "log"
    process = start(number, log)
    try:
        wait_until_ready(process, number, log)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
    assert "Traceback" not in log.read_text() and "terminate" not in log.read_text()
