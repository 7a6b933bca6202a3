"""Errors as OpenAI's API returns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(HTTPException):
    """An answer other than 200, with a message for the client.

    Args:
        param: the field that is wrong.
        retry_after: seconds after which the client may try again.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(status, message, None if retry_after is None else {"retry-after": str(retry_after)})
        self.param, self.code = param, code


def body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def response(error: HTTPException) -> JSONResponse:
    message = str(error.detail)
    if message == "There was an error parsing the body":  # FastAPI's, for what json.loads fails on in other ways
        message = "the body is no JSON in UTF-8"
    content = body(error.status_code, message, getattr(error, "param", None), getattr(error, "code", None))
    return JSONResponse(content, error.status_code, error.headers)


def of_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """The first of pydantic's errors.

    What is wrong with a whole request is said with the name of the field first.
    """
    error = errors[0]
    if error["type"] == "json_invalid":
        return ApiError(400, f"the body is no JSON: {error.get('ctx', {}).get('error', error['msg'])}")
    at = [x for x in error["loc"] if x != "body"]
    param = ".".join(str(x) for x in at if isinstance(x, int) or x.isidentifier())
    said = str(error["msg"]).removeprefix("Value error, ")
    if error["type"] == "model_attributes_type" and not at:
        if isinstance(error.get("input"), bytes):
            return ApiError(400, "the content-type is not application/json, which the body is expected to be")
        return ApiError(400, "the body is no JSON object")
    if error["type"] == "value_error" and not at:
        return ApiError(400, said, param=said.split()[0])
    return ApiError(400, f"{param}: {said}" if param else said, param=param or None)
