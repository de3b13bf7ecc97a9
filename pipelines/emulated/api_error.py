"""Refusals of the emulated engines, word for word as vLLM 0.32 answers them where its words are stable."""

import json

import msgspec

from serve_table.errors import RequestError

INTERNAL_ERROR = "Internal server error"
"""All that vLLM tells a client of a failure of its own; the reason is in the engine's log."""


class ApiError(RequestError):
    """A request that the engine refuses. kind: the type of the error; param: the field at fault."""

    def __init__(self, status: int, message: str, kind: str, param: str | None = None) -> None:
        super().__init__(status, message)
        self.kind = kind
        self.param = param


def invalid(message: str, param: str | None = None, value: int | None = None) -> ApiError:
    """A value that cannot be served; vLLM appends the field and the value to its words."""
    extras = [f"{name}={given}" for name, given in (("parameter", param), ("value", value)) if given is not None]
    suffix = f" ({', '.join(extras)})" if extras else ""
    return ApiError(400, message + suffix, "BadRequestError", param)


def unreadable(problem: str, param: str | None = None) -> ApiError:
    """A body of the wrong form: refused before the request is looked at."""
    return ApiError(400, f"1 validation error:\n  {problem}", "Bad Request", param)


def unknown_model(name: str, served: str) -> ApiError:
    """A model that is not served."""
    message = f"The model `{name}` does not exist. Valid aliases: {served}."
    return ApiError(404, message, "NotFoundError", "model")


def unsupported(name: str) -> ApiError:
    """What vLLM does and the emulated engine does not."""
    return ApiError(400, f"{name} is not supported by the emulated engine", "BadRequestError", name)


def no_route_body(known_path: bool) -> bytes:
    """JSON for a path, or a method of a path, that is not there: of vLLM's web framework, not of its API."""
    return msgspec.json.encode({"detail": "Method Not Allowed" if known_path else "Not Found"})


def internal() -> ApiError:
    """A failure of the engine."""
    return ApiError(500, INTERNAL_ERROR, "InternalServerError")


def _document(error: RequestError) -> dict[str, dict[str, str | int | None]]:
    kind = "ServiceUnavailableError" if error.status == 503 else "InternalServerError"
    param = None
    if isinstance(error, ApiError):
        kind, param = error.kind, error.param
    return {"error": {"message": str(error), "type": kind, "param": param, "code": error.status}}


def error_body(error: RequestError) -> bytes:
    """JSON of one refusal."""
    return msgspec.json.encode(_document(error))


def error_event(error: RequestError) -> bytes:
    """The same as an event of a stream that has begun; vLLM writes these with spaces."""
    return b"data: " + json.dumps(_document(error)).encode() + b"\n\n"
