"""Refusals of the emulated engines, in the shape in which vLLM answers them."""

import msgspec

from serve_table.errors import RequestError

TYPES = {
    400: "BadRequestError",
    404: "NotFoundError",
    405: "MethodNotAllowed",
    413: "RequestEntityTooLarge",
    500: "InternalServerError",
    503: "ServiceUnavailable",
}


class ApiError(RequestError):
    """A request that the engine refuses; param: the field at fault."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(status, message)
        self.param = param


def error_body(error: RequestError) -> bytes:
    """JSON of one refusal."""
    return msgspec.json.encode(
        {
            "error": {
                "message": str(error),
                "type": TYPES.get(error.status, "InternalServerError"),
                "param": error.param if isinstance(error, ApiError) else None,
                "code": error.status,
            }
        }
    )
