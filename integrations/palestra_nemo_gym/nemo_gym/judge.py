"""A judge that gives no verdict is no wrong answer: the row goes to the failures, and may be tried again."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi.encoders import jsonable_encoder
from fastapi.responses import JSONResponse
from pydantic import BaseModel

from nemo_gym.server_utils import ServerClient, get_response_json, raise_for_status

JUDGE_FAILED = "judge_failed"
SHOWN_BYTES = 2_000

Answer = TypeVar("Answer", bound=BaseModel)
Result = TypeVar("Result")


class JudgeError(Exception):
    """A judge gave no answer, or an error."""


async def reraise_judge_errors(coro: Awaitable[Result]) -> Result:
    """For the call alone: whatever goes wrong in it counts as the judge's failure."""
    try:
        return await coro
    except JudgeError:
        raise
    except Exception as error:  # whatever keeps a judge from answering is its failure
        text = getattr(error, "response_content", b"")[:SHOWN_BYTES].decode(errors="replace")
        raise JudgeError(f"{type(error).__name__}: {error}{text and f'; it said: {text}'}") from error


async def call_judge(
    server_client: ServerClient, *, server_name: str, url_path: str, json: object, response_model: type[Answer]
) -> Answer:
    """Raises JudgeError for any answer but a good one of that shape."""

    async def called() -> Answer:
        response = await server_client.post(server_name=server_name, url_path=url_path, json=json)
        await raise_for_status(response)
        return response_model.model_validate(await get_response_json(response))

    return await reraise_judge_errors(called())


def judge_failsafe(verify_fn: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """The same, but a JudgeError is answered with the request as a failed row. FastAPI sees the signature of the
    original."""

    @functools.wraps(verify_fn)
    async def verified(*args: object, **kwargs: object) -> object:
        try:
            return await verify_fn(*args, **kwargs)
        except JudgeError as error:
            given = (
                one for one in (*kwargs.values(), *args) if isinstance(one, BaseModel) and hasattr(one, "response")
            )
            body = next(given, None)
            if body is None:
                raise
            row = {
                **body.model_dump(),
                "reward": 0.0,
                "_ng_failure_class": JUDGE_FAILED,
                "_ng_failure_judge_error": str(error),
            }
            return JSONResponse(jsonable_encoder(row))

    return verified
