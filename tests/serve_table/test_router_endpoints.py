"""Everything around the generative path: other endpoints, headers, prefixes, metrics, the journal."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from router_bench import CHAT, COMPLETIONS, chat_body, router_bench
from stub_engines import Out, StubRequest, decode_engine, prefill_engine, running

from serve_table import journal
from serve_table.health import ProbePolicy

NEVER = ProbePolicy(interval_s=30.0)


async def test_pass_through_reaches_one_decode_engine(tmp_path: Path) -> None:
    async with (
        running(prefill_engine, decode_engine, decode_engine) as (p, d, e),
        router_bench(tmp_path, [p], [d, e], probes=NEVER) as bench,
    ):
        models = await bench.client.get("/v1/models?x=1")
        assert models.json() == {"path": "/v1/models?x=1"}
        assert (await bench.client.post("/tokenize/", json={"prompt": "hi", "n": 2**70})).status_code == 200
        assert p.requests == []
        sent = d.requests + e.requests
        assert [r.path for r in sent] == ["/v1/models?x=1", "/tokenize"]
        assert sent[1].json == {"prompt": "hi", "n": 2**70}
        await d.stop()
        for _ in range(2):
            assert (await bench.client.get("/v1/models")).status_code == 200
        await e.stop()
        assert (await bench.client.get("/v1/models")).status_code == 503
        assert not bench.journal.exists() or not list(bench.journal.iterdir())


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/foo.php", 404),
        ("POST", "/v1/embeddings", 404),
        ("POST", "/reset_prefix_cache", 404),
        ("GET", CHAT, 405),
        ("POST", "/v1/models", 405),
    ],
)
async def test_other_paths_never_reach_an_engine(tmp_path: Path, method: str, path: str, status: int) -> None:
    async with running(decode_engine) as (d,), router_bench(tmp_path, [], [d]) as bench:
        response = await bench.client.request(method, path)
        assert (response.status_code, response.json()["error"]["code"]) == (status, status)
        assert d.requests == []


async def test_bodies_over_the_limit_are_413(tmp_path: Path) -> None:
    async with running(decode_engine) as (d,), router_bench(tmp_path, [], [d], max_body_bytes=1000) as bench:
        response = await bench.client.post(CHAT, json={"messages": "x" * 2000})
        assert (response.status_code, response.json()["error"]["code"]) == (413, 413)
        row = await bench.row()
        assert (await bench.client.post("/tokenize", json={"prompt": "x" * 2000})).status_code == 413
    assert (row.status, row.http_status, d.requests) == ("client_error", 413, [])


async def test_large_bodies_pass(tmp_path: Path) -> None:
    async with running(decode_engine) as (d,), router_bench(tmp_path, [], [d]) as bench:
        url = "data:image/png;base64," + "A" * 12_000_000
        body = chat_body(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
        assert (await bench.client.post(CHAT, json=body)).status_code == 200
        assert len(d.requests[0].body) > 12_000_000
        assert (await bench.row()).prompt_tokens < 100


async def test_ready_and_health_tell_what_is_down(tmp_path: Path) -> None:
    async with running(prefill_engine, decode_engine) as (p, d), router_bench(tmp_path, [p], [d]) as bench:
        ready = await bench.admin.get("/ready")
        assert (ready.status_code, ready.json()) == (200, {"ready": True, "reasons": []})
        await p.stop()
        assert (await bench.client.post(CHAT, json=chat_body())).status_code == 200
        ready = await bench.admin.get("/ready")
        assert (ready.status_code, ready.json()["ready"]) == (200, True)
        assert ready.json()["reasons"][0].startswith("no prefill engine is up")
        public = await bench.client.get("/ready")
        assert (public.status_code, public.json()) == (200, {"ready": True})
        await d.stop()
        await bench.client.post(CHAT, json=chat_body())
        ready = await bench.admin.get("/ready")
        assert (ready.status_code, ready.json()["reasons"][0]) == (503, "no decode engine is up")
        public = await bench.client.get("/ready")
        assert (public.status_code, public.json()) == (503, {"ready": False})
        assert (await bench.client.get("/health")).status_code == 200


async def test_engines_that_start_late_join_by_themselves(tmp_path: Path) -> None:
    async with running(decode_engine) as (d,):
        d.healthy = False
        async with router_bench(tmp_path, [], [d]) as bench:
            assert (await bench.client.get("/ready")).status_code == 503
            d.healthy = True
            for _ in range(1500):
                if (await bench.client.get("/ready")).status_code == 200:
                    break
                await asyncio.sleep(0.02)
            assert (await bench.client.get("/ready")).json()["ready"]


async def test_headers_of_the_hop_and_of_the_router_stay_here(tmp_path: Path) -> None:
    async def decode(request: StubRequest, out: Out) -> None:
        await out.whole(200, b"{}", connection="x-hop", x_hop="1", x_kept="2", x_request_id="theirs")

    async with running(decode) as (d,), router_bench(tmp_path, [], [d]) as bench:
        headers = {
            "authorization": "Bearer k",
            "x-rutter-slo-class": "tight",
            "x-rutter-predicted-output-tokens": "77.5",
            "connection": "keep-alive, x-secret",
            "x-secret": "1",
            "te": "trailers",
        }
        response = await bench.client.post(CHAT, json=chat_body(max_tokens=5), headers=headers)
        row = await bench.row()
    sent = d.requests[0].headers
    assert sent["authorization"] == "Bearer k"
    assert not {"x-secret", "te", "connection", "accept-encoding"} & set(sent)
    assert not [name for name in sent if name.startswith("x-rutter")]
    assert response.headers["x-kept"] == "2"
    assert "x-hop" not in response.headers
    assert response.headers["x-request-id"] == row.request_id
    assert (row.slo_class, row.predicted_output_tokens) == (1, 77.5)
    assert sent["x-request-id"].startswith(row.request_id)
    assert b"Bearer" not in b"".join(path.read_bytes() for path in bench.journal.iterdir())


@pytest.mark.parametrize(
    "headers",
    [
        {"x-rutter-slo-class": "gold"},
        {"x-rutter-predicted-output-tokens": "many"},
        {"x-rutter-predicted-output-tokens": "nan"},
        {"x-rutter-predicted-output-tokens": "-3"},
    ],
)
async def test_unknown_hints_are_refused(tmp_path: Path, headers: dict[str, str]) -> None:
    async with running(decode_engine) as (d,), router_bench(tmp_path, [], [d]) as bench:
        response = await bench.client.post(CHAT, json=chat_body(), headers=headers)
        row = await bench.row()
    assert response.status_code == 400
    assert next(iter(headers)) in response.json()["error"]["message"]
    assert (row.status, d.requests) == ("client_error", [])


@pytest.mark.parametrize(
    ("path", "fields", "predicted"),
    [
        (CHAT, {}, 200.0),
        (CHAT, {"max_tokens": 9}, 9.0),
        (CHAT, {"max_tokens": 9, "max_completion_tokens": 7}, 7.0),
        (CHAT, {"max_tokens": 9, "ignore_eos": True}, 200.0),
        (CHAT, {"max_tokens": 10**400}, 200.0),
        (CHAT, {"max_tokens": -1}, 1.0),
        (CHAT, {"max_tokens": "9"}, 200.0),
        (COMPLETIONS, {"prompt": "hi"}, 16.0),
        (COMPLETIONS, {"prompt": "hi", "max_tokens": 500}, 200.0),
    ],
)
async def test_the_requests_own_limit_caps_its_prediction(
    tmp_path: Path, path: str, fields: dict[str, Any], predicted: float
) -> None:
    async with running(decode_engine) as (d,), router_bench(tmp_path, [], [d]) as bench:
        await bench.client.post(path, json=chat_body(**fields))
        assert (await bench.row()).predicted_output_tokens == predicted


async def test_prefixes_are_known_where_they_were_sent(tmp_path: Path) -> None:
    async with (
        running(prefill_engine, prefill_engine, decode_engine, decode_engine) as (p, q, d, e),
        router_bench(tmp_path, [p, q], [d, e]) as bench,
    ):
        ids = {"model": "m", "prompt": list(range(200))}
        await bench.client.post(COMPLETIONS, json=ids)
        await bench.client.post(COMPLETIONS, json=ids)
        await bench.client.post(COMPLETIONS, json={**ids, "cache_salt": "b"})
        assert (await bench.admin.post("/reset_prefix_cache")).status_code == 502  # the stub prefill refuses it
        await bench.client.post(COMPLETIONS, json=ids)
        rows = await bench.rows(4)
    seen = [row.fleet for row in rows if row.fleet is not None]
    assert [fleet.prefill_cached_tokens for fleet in seen] == [[0.0, 0.0], [192.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert [fleet.decode_cached_tokens for fleet in seen] == [[0.0, 0.0], [192.0, 0.0], [0.0, 0.0], [0.0, 0.0]]
    assert {row.prompt_tokens_source for row in rows} == {"ids"}
    prompts = [r.json["prompt"] for r in d.requests + e.requests if r.path == COMPLETIONS]
    assert prompts == [list(range(200))] * 4
    assert all(any(r.path == "/reset_prefix_cache" for r in engine.requests) for engine in (p, q, d, e))


async def test_metrics_have_closed_label_sets(tmp_path: Path) -> None:
    async with running(decode_engine) as (d,), router_bench(tmp_path, [], [d]) as bench:
        await bench.client.post(CHAT, json=chat_body())
        await bench.client.get("/foo.php")
        before = len((await bench.admin.get("/metrics")).text.splitlines())
        for i in range(50):
            await bench.client.get(f"/foo{i}.php")
            await bench.client.post(CHAT, json=chat_body(model=f"m{i}"), headers={"x-request-id": str(i)})
        text = (await bench.admin.get("/metrics")).text
    assert len(text.splitlines()) == before
    labels = f'endpoint="{CHAT}",policy="round_robin",status="ok"'
    assert f"rutter_requests_total{{{labels}}} 51.0" in text
    assert f'rutter_engine_up{{engine="{d.url}",role="decode"}} 1.0' in text
    assert "rutter_decision_seconds_count 51.0" in text


async def test_a_full_disk_is_counted_and_requests_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(writer: journal.JournalWriter) -> Any:
        writer._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115 - closed by the writer
        return writer._file

    async with running(decode_engine) as (d,), router_bench(tmp_path, [], [d]) as bench:
        with monkeypatch.context() as patched:
            patched.setattr(journal.JournalWriter, "_open_next_segment", full)
            for _ in range(3):
                assert (await bench.client.post(CHAT, json=chat_body())).status_code == 200
        text = (await bench.admin.get("/metrics")).text
        assert "rutter_journal_errors_total 3.0" in text
        assert [r.message.count("No space left on device") for r in caplog.records if "journal" in r.message] == [1]
        await bench.client.post(CHAT, json=chat_body())
        assert len(await bench.rows(1)) == 1


async def test_simultaneous_requests_see_each_others_work(tmp_path: Path) -> None:
    async def slow_prefill(request: StubRequest, out: Out) -> None:
        await asyncio.sleep(0.1)
        await prefill_engine(request, out)

    async with (
        running(*[slow_prefill] * 2, *[decode_engine] * 3) as (p, q, *decodes),
        router_bench(tmp_path, [p, q], decodes, "least_loaded") as bench,
    ):
        await asyncio.gather(*(bench.client.post(CHAT, json=chat_body()) for _ in range(12)))
        assert [len(engine.requests) for engine in (p, q, *decodes)] == [6, 6, 4, 4, 4]
        assert bench.idle()


async def test_a_head_and_its_body_are_not_held_apart(tmp_path: Path) -> None:
    async with running(decode_engine) as (d,), router_bench(tmp_path, [], [d]) as bench:
        await bench.client.post(CHAT, json=chat_body())
        times_s = []
        for _ in range(10):
            began_s = time.monotonic()
            await bench.client.post(CHAT, json=chat_body())
            times_s.append(time.monotonic() - began_s)
        # Nagle's algorithm against delayed acknowledgements would cost 40 ms each.
        assert min(times_s) < 0.03


async def test_equal_client_ids_stay_apart(tmp_path: Path) -> None:
    async with running(prefill_engine, decode_engine) as (p, d), router_bench(tmp_path, [p], [d]) as bench:
        answers = await asyncio.gather(
            *(bench.client.post(CHAT, json=chat_body(), headers={"x-request-id": "0"}) for _ in range(20))
        )
        rows = await bench.rows(20)
    assert {answer.headers["x-request-id"] for answer in answers} == {"0"} == {row.client_id for row in rows}
    assert len({row.request_id for row in rows}) == 20
    assert len({request.headers["x-request-id"] for request in d.requests}) == 20
