"""F21: what operators ask of a router is on a port of its own, closed by default, and refused without a key."""

import json
from pathlib import Path

import httpx
import pytest
from router_bench import CHAT, chat_body, router_bench
from stub_engines import decode_engine, running
from test_server import DECODE, parsed, serving

from serve_table import server
from serve_table.admin import ROUTES, Admin
from serve_table.api_keys import KeySet
from serve_table.errors import ConfigError


def client_of(admin: Admin, **headers: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(admin)
    return httpx.AsyncClient(base_url="http://router:9", transport=transport, headers=headers)


async def test_the_admin_port_answers_and_ends_with_the_router(tmp_path: Path) -> None:
    async with (
        running(decode_engine) as (d,),
        serving("--decode", d.url, "--admin-port", "0") as (process, url),
        httpx.AsyncClient(timeout=10) as client,
    ):
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        assert line.startswith("rutter serve: admin port http://127.0.0.1:")
        admin = line.split()[-1]
        assert (await client.post(url + CHAT, json=chat_body())).status_code == 200
        assert "rutter_requests_total" in (await client.get(admin + "/metrics")).text
        assert (await client.get(admin + "/ready")).json()["ready"]
        assert (await client.post(admin + "/reset_prefix_cache")).json() == {"status": "ok"}
        process.terminate()
        assert await process.wait() == 0


async def test_nothing_of_it_is_on_the_public_port(tmp_path: Path) -> None:
    others = [
        ("POST", "/workers"),
        ("DELETE", "/workers"),
        ("POST", "/reload"),
        ("POST", "/log-level"),
        ("GET", "/docs"),
    ]
    others += [("GET", path) for path in ("/journal", "/config", "/debug", "/openapi.json", "/v1", "/", "//metrics")]
    async with running(decode_engine) as (d,), router_bench(tmp_path, [], [d]) as bench:
        for method, path in [*ROUTES, *others]:
            if path in ("/health", "/ready"):
                continue
            response = await bench.client.request(method, path)
            assert response.status_code in (404, 405), path
            assert d.url not in response.text
        for path in ("/health", "/ready"):
            assert set((await bench.client.get(path)).json()) <= {"status", "ready"}
        assert d.requests == []


async def test_with_keys_every_request_needs_one_of_them(tmp_path: Path) -> None:
    async with running(decode_engine) as (d,), router_bench(tmp_path, [], [d]) as bench:
        admin = Admin(bench.context, KeySet([b"first-key", b"second-key"]))
        for key in ("Bearer first-key", "bearer second-key"):
            async with client_of(admin, authorization=key) as client:
                assert (await client.get("/metrics")).status_code == 200
        for key in ("", "first-key", "Bearer ", "Bearer first", "Bearer first-key2", "Basic first-key", "Bearer é"):
            async with client_of(admin) as client:
                for method, path in [*ROUTES, ("GET", "/nowhere")]:
                    response = await client.request(method, path, headers={"authorization": key.encode("latin-1")})
                    assert (response.status_code, response.json()["error"]["code"]) == (401, 401)
                    assert response.headers["www-authenticate"] == "Bearer"
        async with client_of(admin) as client:
            twice = [("authorization", "Bearer first-key"), ("authorization", "Bearer first-key")]
            assert (await client.get("/metrics", headers=twice)).status_code == 401
        assert d.requests == []


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "localhost:9"}, 200),
        ({"host": "127.0.0.1"}, 200),
        ({"host": "[::1]:9001"}, 200),
        ({"host": "attacker.example"}, 403),
        ({"host": "10.1.2.3"}, 403),
        ({"host": "localhost", "origin": "https://attacker.example"}, 403),
        ({"host": "localhost", "origin": "null"}, 403),
    ],
)
async def test_without_keys_no_web_page_may_ask(tmp_path: Path, headers: dict[str, str], status: int) -> None:
    async with running(decode_engine) as (d,), router_bench(tmp_path, [], [d]) as bench:
        response = await bench.admin.post("/reset_prefix_cache", headers=headers)
        assert response.status_code == status
        assert len(d.requests) == (status == 200)


async def test_unknown_paths_and_methods_are_named(tmp_path: Path) -> None:
    async with running(decode_engine) as (d,), router_bench(tmp_path, [], [d]) as bench:
        assert (await bench.admin.get("/nowhere")).status_code == 404
        wrong = await bench.admin.get("/reset_prefix_cache")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
        wrong = await bench.admin.post("/metrics/")
        assert (wrong.status_code, wrong.headers["allow"]) == (405, "GET, HEAD")
        assert (await bench.admin.head("/metrics")).status_code == 200
        assert (await bench.admin.post("/reset_prefix_cache", content=b"x" * 2**21)).status_code == 413


KEY_FILES = [
    (b"", "has no key"),
    (b"# a comment alone\n\n", "has no key"),
    (b"fine\ntwo words\n", "line 2: a key is one word"),
    ("schlüssel\n".encode(), "line 1: a key is one word"),
    (b"zero\0byte\n", "line 1: a key is one word"),
]


@pytest.mark.parametrize(("content", "message"), KEY_FILES)
def test_a_file_without_keys_opens_nothing(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "keys"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"--admin-keys {path}.*{message}") as caught:
        server.run(parsed(*DECODE, "--admin-port", "0", "--admin-keys", str(path)))
    assert "two words" not in str(caught.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--admin-port", "70000"), "--admin-port 70000"),
        (("--admin-port", "0", "--admin-host", "0.0.0.0"), "give --admin-keys"),
        (("--admin-port", "0", "--admin-host", "::"), "give --admin-keys"),
        (("--admin-port", "0", "--admin-host", "router.example"), "give --admin-keys"),
        (("--admin-port", "0", "--admin-keys", "/nowhere"), "--admin-keys /nowhere: No such file or directory"),
        (("--admin-port", "0", "--admin-keys", "/"), "--admin-keys /: Is a directory"),
        (("--admin-keys", "/nowhere"), "open it with --admin-port"),
    ],
)
def test_the_admin_port_fails_closed(flags: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        server.run(parsed(*DECODE, *flags))
    assert "\n" not in str(caught.value)


def test_keys_are_one_a_line_between_comments(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(b"# team a\r\nsk-a_1.2~+/==\r\n\n  sk-b  \n#sk-old\n")
    keys = KeySet(server.read_keys("--admin-keys", path))
    assert [keys.knows(key) for key in (b"sk-a_1.2~+/==", b"sk-b", b"sk-old", b"#sk-old", b"")] == [1, 1, 0, 0, 0]
    assert "sk-b" not in json.dumps(str(vars(keys)))
