"""The router's own errors, in the shape of the OpenAI API."""

import msgspec

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    502: "upstream_error",
    503: "service_unavailable_error",
    504: "upstream_timeout_error",
}


def error_body(status: int, message: str) -> bytes:
    """JSON of one error; `code` is the HTTP status, as vLLM has it."""
    kind = TYPES.get(status, "internal_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": None, "code": status}})


def error_event(status: int, message: str) -> bytes:
    """The same error as one server-sent event, for a stream that has begun."""
    return b"data: " + error_body(status, message) + b"\n\n"
