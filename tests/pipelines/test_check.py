"""`rutter check`: which engines it takes, what it prints, how it exits."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_engines import FakeCluster, fake_cluster

from pipelines import check, cli, gates
from pipelines.cluster_state import ClusterState, EngineRecord, write_state
from pipelines.engine_urls import named_cluster
from serve_table.errors import ClusterError, ConfigError

Serve = Callable[[FakeCluster], None]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Serve:
    """Lets the command reach a fake cluster, in an empty working folder."""
    monkeypatch.chdir(tmp_path)

    def install(cluster: FakeCluster) -> None:
        def run(urls: gates.ClusterUrls, model: str | None, **settings: object) -> object:
            return gates.gates(urls, model, transport=cluster.transport, **settings)  # type: ignore[arg-type]

        monkeypatch.setattr(check, "gates", run)

    return install


def start(name: str, ready: bool = True) -> None:
    """Leave the state file of a 1P+1D cluster behind."""
    engines = [
        EngineRecord(name=f"{role}-0", role=role, url=f"http://{role}-0", pid=1, identity="x", log="log")
        for role in ("prefill", "decode")
    ]
    folder = Path("build/clusters") / name
    folder.mkdir(parents=True)
    state = ClusterState(
        name=name,
        kind="vllm-cpu",
        hardware="a40-3b",
        dilation=8.0,
        kv_tokens=60_000,
        model="tiny",
        started="now",
        ready=ready,
        engines=engines,
    )
    write_state(state, folder)


URLS = ["--prefill-url", "http://prefill-0", "--decode-url", "http://decode-0"]


def test_one_line_a_gate_and_0_where_all_pass(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    serve(fake_cluster(1, 1))
    assert cli.main(["check", *URLS]) == 0
    captured = capsys.readouterr()
    *lines, verdict = captured.out.splitlines()
    assert len(lines) == 7
    assert all(line.startswith("pass  ") for line in lines)
    assert verdict.startswith("all 7 gates passed on 1P+1D in ")
    assert all(line.startswith("check: ") for line in captured.err.splitlines())


def test_a_failed_gate_says_what_to_do_and_exits_1(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = fake_cluster(1, 1)
    cluster.decode[0].has_reset = False
    serve(cluster)
    assert cli.main(["check", *URLS]) == 1
    *_, line, verdict = capsys.readouterr().out.splitlines()
    assert line.startswith("FAIL  prefix caches http://decode-0 has no /reset_prefix_cache -> start the engines with")
    assert verdict.startswith("1 of 7 gates failed")


@pytest.mark.parametrize("fault", [False, True])
def test_json_holds_every_gate_and_problem(fault: bool, serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = fake_cluster(1, 1)
    cluster.decode[0].refuses_handles_of = "http://prefill-0" if fault else None
    serve(cluster)
    assert cli.main(["check", *URLS, "--json"]) == int(fault)
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is not fault
    assert report["prefill_urls"] == ["http://prefill-0"]
    pairs = next(gate for gate in report["gates"] if gate["name"] == "pairs")
    assert bool(pairs["problems"]) is fault


def test_a_cluster_is_found_by_its_name_or_by_being_alone(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    serve(fake_cluster(1, 1))
    start("mine")
    assert cli.main(["check"]) == 0
    assert cli.main(["check", "mine"]) == 0
    start("other")
    assert cli.main(["check"]) == 2
    assert "several clusters are known, name one: mine, other" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "status", "line"),
    [
        ([], 2, "no cluster is running"),
        (["gone"], 1, "no cluster 'gone' is running: none is"),
        (["mine", *URLS], 2, "not both"),
        (["--prefill-url", "http://x"], 2, "--decode-url is missing"),
        (["--decode-url", "localhost:1"], 2, "'localhost:1' is no URL"),
        ([*URLS, "--timeout-s", "0"], 2, "--timeout-s 0.0: must be above 0"),
    ],
)
def test_wrong_words_are_one_line(
    words: list[str], status: int, line: str, serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(fake_cluster(1, 1))
    assert cli.main(["check", *words]) == status
    assert line in capsys.readouterr().err


def test_a_cluster_that_is_still_starting_is_not_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    start("slow", ready=False)
    with pytest.raises(ClusterError, match="is not ready"):
        named_cluster("slow")
    with pytest.raises(ConfigError, match="several"):
        start("second")
        named_cluster(None)


def test_engines_that_nobody_serves_fail_and_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["check", "--decode-url", "http://127.0.0.1:9"]) == 1
    assert "http://127.0.0.1:9 cannot be reached" in capsys.readouterr().out
