"""The open-loop load generator against a stub server."""

import asyncio
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from sse_stub import SSE_HEAD, chunk, event, stream_tokens, stub_server

from learn.trace import Trace
from pipelines.load import client_id, client_index, load, run_load
from pipelines.workloads import make_workload
from serve_table.errors import ConfigError
from serve_table.slo import LOOSE, TIGHT, SloClass, SloTargets


def make_trace(arrival_s, prompt_tokens=20, output_tokens=3, slo_class=None):
    n = len(arrival_s)
    none = np.zeros(n, np.int64)
    return Trace(
        "test",
        np.array(arrival_s, float),
        np.full(n, prompt_tokens),
        np.full(n, output_tokens),
        none if slo_class is None else np.array(slo_class),
        none,
        none,
        none[:0],
    )


async def replay(url, trace, **options):
    return await asyncio.wait_for(run_load(url, trace, seed=1, model="m", **options), 30)


async def test_requests_carry_ids_classes_and_the_exact_lengths():
    trace = make_trace([0.0, 0.01, 0.02], slo_class=[LOOSE, TIGHT, LOOSE])
    async with stub_server() as (url, seen):
        report = await replay(url, trace)
    by_id = {request.headers["x-request-id"]: request for request in seen}
    assert sorted(by_id) == ["load-000000", "load-000001", "load-000002"]
    request = by_id["load-000001"]
    assert request.path == "/v1/completions"
    assert request.headers["x-rutter-slo-class"] == "tight"
    assert by_id["load-000002"].headers["x-rutter-slo-class"] == "loose"
    prompt = request.body.pop("prompt")
    assert len(prompt) == 20
    assert request.body == {
        "model": "m",
        "max_tokens": 3,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0,
    }
    assert report.complete
    assert report.n_ok == 3
    assert [record.output_tokens for record in report.records] == [3, 3, 3]
    assert [record.prompt_tokens for record in report.records] == [20, 20, 20]
    assert report.n_wrong_lengths(trace) == 0


async def test_chat_sends_a_text_of_about_as_many_words_and_no_class_where_unwanted():
    async with stub_server() as (url, seen):
        report = await replay(url, make_trace([0.0]), endpoint="chat/completions", slo_headers=False)
    assert report.n_ok == 1
    assert seen[0].path == "/v1/chat/completions"
    assert "x-rutter-slo-class" not in seen[0].headers
    (message,) = seen[0].body["messages"]
    assert len(message["content"].split()) == 20


async def test_f34_sending_keeps_to_absolute_deadlines_to_the_end():
    # 3 s instead of the 60 s of the case: sleeping gap by gap would add up to far more than 5 ms over 300 gaps.
    trace = make_workload("chat", 300, 1, 100.0)
    trace = make_trace(trace.arrival_s, output_tokens=2)
    async with stub_server() as (url, seen):
        report = await replay(url, trace, warmup_requests=8)
    arrived_s = {client_index(request.headers["x-request-id"]): request.at_s for request in seen[8:]}
    assert report.n_ok == 300
    late_s = np.array([record.lateness_s for record in report.records])
    assert late_s.min() >= 0.0  # never early
    # The median, since other processes may take a core from the test for a moment.
    assert np.median(late_s[-100:]) < 0.005
    assert np.median(late_s[-100:]) - np.median(late_s[:100]) < 0.002  # no drift
    # The server saw them at the same distances.
    seen_late_s = np.array([arrived_s[index] - arrived_s[0] for index in range(300)]) - trace.arrival_s
    assert np.median(np.abs(seen_late_s[-100:])) < 0.010


async def test_slow_answers_do_not_hold_back_later_requests():
    async def slow(writer, body):
        await stream_tokens(writer, body, gap_s=0.2)

    trace = make_trace(np.arange(120) / 400.0)
    async with stub_server(slow) as (url, seen):
        report = await replay(url, trace)
    assert report.n_ok == 120
    # All left within 0.3 s; one after the other would have taken 72 s.
    assert max(request.at_s for request in seen) - seen[0].at_s < 2.0
    assert 0.15 < report.records[0].ttft_s < 1.0
    assert 0.15 < report.records[0].tpot_s < 1.0


async def test_dilation_stretches_time_and_measures_are_in_engine_time():
    async def paced(writer, body):
        await stream_tokens(writer, body, gap_s=0.1)

    trace = make_trace([0.0, 0.1])
    async with stub_server(paced) as (url, seen):
        report = await replay(url, trace, dilation=4.0)
    assert 0.35 < seen[1].at_s - seen[0].at_s < 0.8
    first = report.records[0]
    # 0.025, 0.025 and 0.075 s on an idle machine; undilated they would be 0.1, 0.1 and 0.3 s.
    assert 0.02 < first.ttft_s < 0.08
    assert 0.02 < first.tpot_s < 0.08
    assert 0.07 < first.e2e_s < 0.25
    assert report.duration_s < 0.8


async def test_a_blocked_generator_says_that_it_was_late():
    async def blocking(writer, body):
        time.sleep(0.05)  # the stub shares the generator's loop
        await stream_tokens(writer, body)

    async with stub_server(blocking) as (url, _):
        report = await replay(url, make_trace(np.arange(40) / 100.0))
    assert report.n_ok == 40
    assert not report.kept_schedule
    assert report.lateness.p99 > 0.02
    assert report.lag.max > 0.03
    assert any("did not keep its schedule" in line for line in report.lines())


async def test_the_lateness_limit_can_be_set():
    async with stub_server() as (url, _):
        report = await replay(url, make_trace(np.arange(20) / 100.0), lateness_limit_s=1.0)
        strict = await replay(url, make_trace(np.arange(20) / 100.0), lateness_limit_s=1e-7)
    assert report.kept_schedule
    assert not strict.kept_schedule


def whole(status, body):
    return b"HTTP/1.1 %s\r\ncontent-length: %d\r\n\r\n%s" % (status, len(body), body)


TOKEN = event({"choices": [{"text": "a"}]})
DONE = b"data: [DONE]\n\n"
BROKEN_ANSWERS = {
    "status": (whole(b"503 Service Unavailable", b"no engine"), "HTTP 503: no engine"),
    "reset": (None, "closed the connection"),
    "not http": (b"hello there\r\n\r\n", "not HTTP"),
    "torn": (SSE_HEAD + chunk(TOKEN), "closed the connection"),
    "no done": (SSE_HEAD + chunk(TOKEN) + b"0\r\n\r\n", "without [DONE]"),
    "empty": (SSE_HEAD + chunk(DONE) + b"0\r\n\r\n", "no token"),
    "in band": (SSE_HEAD + chunk(TOKEN + event({"error": {"message": "gone"}}) + DONE) + b"0\r\n\r\n", "gone"),
    "not json": (SSE_HEAD + chunk(TOKEN + b"data: {oops\n\n" + DONE) + b"0\r\n\r\n", "not as expected"),
}


@pytest.mark.parametrize("case", BROKEN_ANSWERS)
async def test_failures_are_counted_not_raised_and_spare_the_others(case):
    answer, message = BROKEN_ANSWERS[case]
    n_seen = 0

    async def second_fails(writer, body):
        nonlocal n_seen
        n_seen += 1
        if n_seen != 2:
            await stream_tokens(writer, body)
            return
        if answer is not None:
            writer.write(answer)
        if not (answer or b"").startswith(b"HTTP/1.1 503"):
            writer.close()

    async with stub_server(second_fails) as (url, _):
        report = await replay(url, make_trace([0.0, 0.05, 0.1]))
    assert [record.error is None for record in report.records] == [True, False, True]
    assert message in report.records[1].error
    assert report.complete
    assert sum(report.errors.values()) == 1
    assert any(message in line for line in report.lines())


async def test_a_server_that_is_down_is_an_error_of_every_request():
    async with stub_server() as (url, _):
        pass
    report = await replay(url, make_trace([0.0, 0.01]))
    assert report.n_ok == 0
    assert all("ConnectError" in record.error for record in report.records)
    assert report.lateness is None
    assert not report.kept_schedule


async def test_an_answer_that_never_ends_is_given_up():
    async def hang(writer, body):
        writer.write(SSE_HEAD)
        await asyncio.sleep(5)

    async with stub_server(hang) as (url, _):
        report = await replay(url, make_trace([0.0]), timeout_s=0.2)
    assert report.records[0].error == "no whole answer within 0.2 s"
    assert report.records[0].http_status == 200


async def test_connections_are_used_again_and_idle_ones_found_closed_are_not():
    writers = set()

    async def remember(writer, body):
        writers.add(writer)
        await stream_tokens(writer, body)
        if len(writers) == 1 and body["max_tokens"] == 3:
            writer.write_eof()
            writer.close()

    async with stub_server(remember) as (url, _):
        report = await replay(url, make_trace(np.arange(5) * 0.06))
    assert report.n_ok == 5
    assert len(writers) == 2


async def test_an_answer_without_framing_ends_with_its_connection():
    async def unframed(writer, body):
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + TOKEN + DONE)
        writer.close()

    async with stub_server(unframed) as (url, _):
        report = await replay(url, make_trace([0.0, 0.05]))
    assert report.n_ok == 2


async def test_cancelling_returns_what_there_is_flagged_incomplete():
    closed = []

    async def endless(writer, body):
        if body["max_tokens"] == 3:
            writer.write(SSE_HEAD)
            while not writer.is_closing():
                writer.write(chunk(TOKEN))
                await asyncio.sleep(0.01)
            closed.append(writer)

    async with stub_server(endless) as (url, seen):
        task = asyncio.create_task(run_load(url, make_trace([0.0, 0.05, 60.0]), seed=1, model="m"))
        while len(seen) < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        report = await asyncio.wait_for(task, 5)
        assert not report.complete
        assert not report.kept_schedule
        assert [record.index for record in report.records] == [0, 1]
        assert all("interrupted" in record.error for record in report.records)
        for _ in range(200):
            if len(closed) == 2:
                break
            await asyncio.sleep(0.01)
        assert len(closed) == 2  # the server saw both connections go


def test_ctrl_c_ends_load_with_a_report(tmp_path):
    script = tmp_path / "interrupted.py"
    script.write_text(
        "import socket\n"
        "from pipelines.load import load\n"
        "from pipelines.workloads import make_workload\n"
        "listener = socket.create_server(('127.0.0.1', 0), backlog=64)\n"
        "url = f'http://127.0.0.1:{listener.getsockname()[1]}'\n"
        "print('ready', flush=True)\n"
        "report = load(url, make_workload('chat', 500, 1, 10.0), seed=1, model='m')\n"
        "print('report', report.complete, len(report.records) < 500, flush=True)\n"
    )
    root = Path(__file__).resolve().parents[2]
    with subprocess.Popen(
        [sys.executable, script], cwd=root, env={"PYTHONPATH": str(root)}, stdout=-1, text=True
    ) as run:
        assert run.stdout.readline() == "ready\n"
        time.sleep(0.7)
        run.send_signal(signal.SIGINT)
        assert run.stdout.readline() == "report False True\n"
        assert run.wait(10) == 0


async def test_warm_up_is_sent_first_and_not_recorded():
    trace = make_trace([0.0, 0.01], prompt_tokens=100, output_tokens=50)
    async with stub_server() as (url, seen):
        report = await replay(url, trace, warmup_requests=2)
    warm, real = seen[:2], seen[2:]
    assert {request.headers["x-request-id"] for request in warm} == {"load-warmup-000000", "load-warmup-000001"}
    assert all(request.body["max_tokens"] == 4 and len(request.body["prompt"]) == 32 for request in warm)
    assert {tuple(request.body["prompt"]) for request in warm}.isdisjoint(
        tuple(request.body["prompt"][:32]) for request in real
    )
    assert len(report.records) == 2


async def test_goodput_counts_failures_as_missed():
    async def every_second(writer, body):
        if body["max_tokens"] == 3:
            await stream_tokens(writer, body)

    def targets(ttft_s):
        return SloTargets(SloClass("loose", ttft_s, 0.0, 5.0), SloClass("tight", 0.0, 0.0, 5.0))

    trace = make_trace([0.0, 0.01, 0.02, 0.03], slo_class=[LOOSE, LOOSE, TIGHT, LOOSE])
    async with stub_server(every_second) as (url, _):
        report = await replay(url, trace)
    assert report.goodput(trace, targets(5.0)) == 0.75
    assert report.goodput(trace, targets(0.0)) == 0.0


def test_client_ids_lead_back_to_the_trace():
    assert client_index(client_id(1_234_567)) == 1_234_567
    assert client_index(client_id(5, "run-2")) == 5
    assert client_index("abc") is None


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("127.0.0.1:8000", {}, "http://host:port"),
        ("ftp://host", {}, "http://host:port"),
        ("http://", {}, "http://host:port"),
        ("http://h:99999999", {}, "http://host:port"),
        ("http://h:x", {}, "is none"),
        ("http://h", {"dilation": 0.0}, "dilation"),
        ("http://h", {"timeout_s": float("nan")}, "timeout_s"),
        ("http://h", {"endpoint": "responses"}, "endpoint"),
    ],
)
def test_bad_arguments_are_named(url, options, message):
    with pytest.raises(ConfigError, match=message):
        load(url, make_trace([0.0]), seed=1, model="m", **options)
