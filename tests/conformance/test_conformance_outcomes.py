"""Every request of the table ends as vLLM ends it, or as the table of differences says."""

import pytest
from differences import DIFFERENCES, LIFE_CYCLE, NOT_ASKED, expected
from engine_under_test import Engine
from outcomes import CASES, Case, Outcome
from shapes import ERROR, assert_shape


def assert_outcome(engine: Engine, status: int, document: object, outcome: Outcome) -> None:
    assert status == outcome.status, document
    if status == 200:
        return
    assert_shape(document, ERROR)
    error = document["error"]  # type: ignore[index]
    assert error["code"] == status
    if outcome.kind is not None:
        assert error["type"] == outcome.kind
    if outcome.message is not None:
        words = outcome.message.replace("{max_model_len}", str(engine.max_model_len)).replace("{model}", engine.model)
        if words.endswith("..."):
            assert error["message"].startswith(words.removesuffix("...")), error["message"]
        else:
            assert error["message"] == words
            assert error["param"] == outcome.param
    elif outcome.param is not None:
        assert error["param"] == outcome.param


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_request_ends_as_specified(engine: Engine, case: Case) -> None:
    body = case.body(engine)
    if isinstance(body, bytes):
        headers = {"content-type": "application/json"}
        response = engine.client.post(engine.url + case.path, content=body, headers=headers)
    else:
        response = engine.post(case.path, body)
    assert response.headers["content-type"] == "application/json"
    outcome = expected(case.name, case.outcome, engine.kind)
    assert_outcome(engine, response.status_code, response.json(), outcome)


def test_what_is_not_there_is_told_by_the_web_framework(engine: Engine) -> None:
    for path, status, words in (("/v1/nothing", 404, "Not Found"), ("/v1/models", 405, "Method Not Allowed")):
        response = engine.post(path, {})
        assert (response.status_code, response.json()) == (status, {"detail": words})
    assert engine.client.head(f"{engine.url}/health").status_code == 405


def test_a_body_of_another_media_type_is_refused(engine: Engine) -> None:
    for headers in ({"content-type": "text/plain"}, {}):
        response = engine.client.post(f"{engine.url}/v1/completions", content=b'{"prompt": "x"}', headers=headers)
        words = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        assert_outcome(engine, response.status_code, response.json(), Outcome(400, words, "Bad Request"))


def test_every_difference_is_of_a_case_has_a_reason_and_differs() -> None:
    specified = {case.name: case.outcome for case in CASES} | LIFE_CYCLE
    assert len(specified) == len(CASES) + len(LIFE_CYCLE), "two cases of one name"
    assert len({difference.case for difference in DIFFERENCES}) == len(DIFFERENCES)
    for difference in DIFFERENCES:
        assert difference.emulated != specified[difference.case]
        assert len(difference.reason) > 20
    assert all(len(reason) > 20 for reason in NOT_ASKED.values())
