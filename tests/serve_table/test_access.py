"""F21: clients' keys open the public port and go no further; F30: tenants do not choose what keeps them apart."""

import logging
from pathlib import Path
from typing import Any

import pytest
from router_bench import CHAT, COMPLETIONS, chat_body, router_bench
from stub_engines import Out, StubRequest, decode_engine, invalid, prefill_engine, running
from test_server import DECODE, parsed

from serve_table import server
from serve_table.access import Access
from serve_table.api_keys import KeySet
from serve_table.errors import ConfigError
from serve_table.tenant_salts import TenantSalts

KEYS = Access(api_keys=KeySet([b"sk-first", b"sk-second"]))
PATHS = [("POST", CHAT), ("POST", COMPLETIONS), ("POST", "/v1/responses"), ("GET", "/v1/models"), ("POST", "/tokenize")]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_without_a_key_nothing_but_health_and_readiness_answers(tmp_path: Path) -> None:
    async with running(decode_engine) as (d,), router_bench(tmp_path, [], [d], access=KEYS) as bench:
        wrong = [bearer(key) for key in ("sk-third", "sk-first x")]
        wrong += [{"authorization": "sk-first"}, {"x-api-key": "sk-first"}]
        for headers in ({}, *wrong):
            for method, path in [*PATHS, ("GET", CHAT), ("GET", "/nowhere"), ("POST", "/metrics")]:
                response = await bench.client.request(method, path, json=chat_body(), headers=headers)
                assert response.status_code == 401
                assert response.headers["www-authenticate"] == "Bearer"
                assert response.json()["error"]["type"] == "authentication_error"
        assert [(await bench.client.get(path)).status_code for path in ("/health", "/ready")] == [200, 200]
        # What was refused leaves no row: nobody fills the journal who may not ask.
        assert (d.requests, await bench.rows(0)) == ([], [])
        assert 'rutter_refusals_total{status="401"} 40.0' in (await bench.admin.get("/metrics")).text
        for key in ("sk-first", "sk-second"):
            assert (await bench.client.post(CHAT, json=chat_body(), headers=bearer(key))).status_code == 200
            assert (await bench.client.get("/v1/models", headers=bearer(key))).status_code == 200
        assert {"authorization"} & {name for request in d.requests for name in request.headers} == set()


@pytest.mark.parametrize("access", [KEYS, Access()], ids=["api keys", "none"])
async def test_keys_and_prompts_are_in_no_journal_log_or_metric(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, access: Access
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = chat_body(messages=[{"role": "user", "content": "the launch code is walnut"}], max_tokens=-1)

    async def broken(request: StubRequest, out: Out) -> None:
        out.cut()

    async with (
        running(prefill_engine, broken, decode_engine) as (p, d, e),
        router_bench(tmp_path, [p], [d, e], access=access) as bench,
    ):
        for body in (secret, {**secret, "max_tokens": 5}, {**secret, "stream": True}, {"walnut": 1}):
            for _ in range(2):
                await bench.client.post(CHAT, json=body, headers=bearer("sk-first"))
        await bench.client.post(CHAT, content=b'{"walnut', headers=bearer("sk-first"))
        await bench.rows(9)
        written = b"".join(path.read_bytes() for path in bench.journal.iterdir()).decode()
        written += caplog.text + (await bench.admin.get("/metrics")).text + (await bench.admin.get("/ready")).text
    assert "sk-first" not in written
    assert "walnut" not in written
    assert "sk-first" not in repr(access)


async def test_the_router_shows_its_own_key_to_engines(tmp_path: Path) -> None:
    access = Access(engine_key=b"ek-1")
    async with (
        running(prefill_engine, decode_engine) as (p, d),
        router_bench(tmp_path, [p], [d], access=access) as bench,
    ):
        assert (await bench.client.post(CHAT, json=chat_body(), headers=bearer("sk-client"))).status_code == 200
        assert (await bench.client.get("/v1/models")).status_code == 200
        await bench.admin.post("/reset_prefix_cache")
        assert [request.headers["authorization"] for request in p.requests + d.requests] == ["Bearer ek-1"] * 5
    assert "ek-1" not in repr(access)


async def test_an_engine_that_refuses_the_routers_key_is_not_the_clients_fault(tmp_path: Path) -> None:
    async def closed(request: StubRequest, out: Out) -> None:
        await out.whole(401, invalid("Unauthorized"))

    async with (
        running(closed, decode_engine) as (p, d),
        router_bench(tmp_path, [p], [d], access=Access(engine_key=b"ek-old")) as bench,
    ):
        assert (await bench.client.post(CHAT, json=chat_body())).status_code == 200
        assert (await bench.row()).fallback_reason == "prefill_broken"
        d.behaviour = closed
        assert (await bench.client.post(CHAT, json=chat_body())).status_code == 502
        assert (await bench.client.get("/v1/models")).status_code == 502


async def test_without_keys_of_the_router_the_engines_are_asked(tmp_path: Path) -> None:
    async def closed(request: StubRequest, out: Out) -> None:
        await out.whole(
            401 if request.headers.get("authorization") != "Bearer theirs" else 200, invalid("Unauthorized")
        )

    async with running(closed) as (d,), router_bench(tmp_path, [], [d]) as bench:
        assert (await bench.client.get("/v1/models")).status_code == 401
        assert (await bench.client.get("/v1/models", headers=bearer("theirs"))).status_code == 200


IDS = {"model": "m", "prompt": list(range(200))}


def cached(rows: list[Any]) -> list[tuple[float, float]]:
    """Tokens that the router expected on the prefill and on the decode engine, by request."""
    return [(row.fleet.prefill_cached_tokens[0], row.fleet.decode_cached_tokens[0]) for row in rows]


async def test_salts_pass_unchanged_and_keep_prompts_apart(tmp_path: Path) -> None:
    async with running(prefill_engine, decode_engine) as (p, d), router_bench(tmp_path, [p], [d]) as bench:
        for salt in ("A", "B", "A", None):
            await bench.client.post(COMPLETIONS, json={**IDS, "cache_salt": salt})
        # The same salt and none at all, spelled otherwise.
        await bench.client.post(
            COMPLETIONS, content=rb'{"model":"\u006d","cache_salt":"\u0041","prompt":%a}' % IDS["prompt"]
        )
        await bench.client.post(COMPLETIONS, json=IDS)
        rows = await bench.rows(6)
    assert cached(rows) == [(0, 0), (0, 0), (192, 192), (0, 0), (192, 192), (192, 192)]
    for engine in (p, d):
        assert [request.json.get("cache_salt") for request in engine.requests] == ["A", "B", "A", None, "A", None]
    hashes = [row.prefix_hashes for row in rows]
    assert hashes[0] == hashes[2] == hashes[4]
    assert not set(hashes[0]) & set(hashes[1])


async def test_in_tenant_mode_the_salt_is_the_tenants(tmp_path: Path) -> None:
    access = Access(api_keys=KEYS.api_keys, tenant_salts=TenantSalts.passing())
    async with (
        running(prefill_engine, decode_engine) as (p, d),
        router_bench(tmp_path, [p], [d], access=access) as bench,
    ):
        for key, salt in (("sk-first", "victim"), ("sk-second", "victim"), ("sk-first", "other"), ("sk-first", None)):
            await bench.client.post(COMPLETIONS, json={**IDS, "cache_salt": salt}, headers=bearer(key))
        await bench.client.post(COMPLETIONS, json=IDS, headers=bearer("sk-second"))
        rows = await bench.rows(5)
    assert cached(rows) == [(0, 0), (0, 0), (192, 192), (192, 192), (192, 192)]
    for engine in (p, d):
        salts = [request.json["cache_salt"] for request in engine.requests]
        assert [salts.index(salt) for salt in salts] == [0, 1, 0, 0, 1]
        assert not {"victim", "other", "sk-first", "sk-second"} & set(salts)


async def test_tenants_of_the_operators_header_have_salts_as_well(tmp_path: Path) -> None:
    access = Access(tenant_salts=TenantSalts(b"s" * 16))
    async with (
        running(decode_engine) as (d,),
        router_bench(tmp_path, [], [d], access=access, tenant_header=True) as bench,
    ):
        for tenant in ("a", "b", "a"):
            headers = {"x-rutter-tenant": tenant, **bearer("of-the-proxy")}
            await bench.client.post(CHAT, json=chat_body(), headers=headers)
        await bench.client.post(CHAT, json=chat_body())
    salts = [request.json["cache_salt"] for request in d.requests]
    assert [salts.index(salt) for salt in salts] == [0, 1, 0, 3]


def test_salts_outlive_a_restart_by_their_secret_alone(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef\n")
    flags = (*DECODE, "--tenant-header", "--tenant-salts")
    first, again = (server.access.from_arguments(parsed(*flags, str(path))) for _ in range(2))
    passing, other = (server.access.from_arguments(parsed(*flags)) for _ in range(2))
    salts = [access.tenant_salts.of(b"key") for access in (first, again, passing, other) if access.tenant_salts]
    assert [salts.index(salt) for salt in salts] == [0, 0, 2, 3]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--api-keys", "/nowhere"), "--api-keys /nowhere: No such file or directory"),
        (("--engine-key", "/nowhere"), "--engine-key /nowhere: No such file or directory"),
        (("--tenant-salts",), "give --api-keys or --tenant-header"),
        (("--tenant-salts", "/nowhere", "--tenant-header"), "--tenant-salts /nowhere: No such file"),
        (("--api-keys", "{empty}"), "{empty} has no key"),
        (("--engine-key", "{two}"), "{two} has 2 keys: engines are shown one"),
        (("--tenant-header", "--tenant-salts", "{two}"), "{two}: a secret has at least 16 bytes"),
    ],
)
def test_access_fails_closed(tmp_path: Path, flags: tuple[str, ...], message: str) -> None:
    names = {"empty": tmp_path / "empty", "two": tmp_path / "two"}
    names["empty"].write_text("# nothing yet\n")
    names["two"].write_text("k-1\nk-2\n")
    with pytest.raises(ConfigError) as caught:
        server.run(parsed(*DECODE, *(flag.format(**names) for flag in flags)))
    assert message.format(**names) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "k-1" not in str(caught.value)
