"""What servers over HTTP share: bodies of requests, errors as statuses, and clients that go away."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from batching import ClosedError, OverloadedError, TooLateError
from served import EMBEDDING, TEXT, Arrays, BadRequestError, Service
from starlette.requests import Request
from starlette.responses import JSONResponse

#: Errors of a request, and their status.
STATUS: dict[type[Exception], int] = {
    BadRequestError: 400,
    OverloadedError: 429,
    ClosedError: 503,
    TooLateError: 504,
}


class Disconnects:
    """ASGI: cancels the answer of a client that has closed its connection.

    What waits in `batching.Batches` for it is then left out. Starlette and FastAPI compute on.
    """

    def __init__(self, app: Callable[..., Any]) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Run the application until its answer is sent or nobody reads it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        messages: asyncio.Queue[Any] = asyncio.Queue(1)
        gone, sent = asyncio.Event(), False

        async def listen() -> None:
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    gone.set()
                    break
                await messages.put(message)
            while True:
                await messages.put(message)

        async def sending(message: Any) -> None:
            nonlocal sent
            sent = sent or (message["type"] == "http.response.body" and not message.get("more_body"))
            await send(message)

        answer = asyncio.create_task(self.app(scope, messages.get, sending))
        listener, left = asyncio.create_task(listen()), asyncio.create_task(gone.wait())
        try:
            await asyncio.wait((answer, left), return_when=asyncio.FIRST_COMPLETED)
            if sent or answer.done():  # what an application does after its answer is not cut off
                await answer
            else:
                answer.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await answer
        finally:
            for task in (listener, left, answer):
                task.cancel()


def failure(error: Exception) -> JSONResponse:
    """Return an error as its status and `{"error": ...}`, with Retry-After where to come again may help."""
    status = next((code for kind, code in STATUS.items() if isinstance(error, kind)), 500)
    headers = {}
    if isinstance(error, (OverloadedError, ClosedError)):
        headers["retry-after"] = str(getattr(error, "retry_after", 1))
    return JSONResponse({"error": str(error)}, status, headers)


async def handle(_: Request, error: Exception) -> JSONResponse:
    """Be the handler of the exceptions in `STATUS` for an application."""
    return failure(error)


def given_of(instances: Any) -> Arrays:
    """Return the items of a request, texts or objects, as arrays with one row for each.

    Raises:
        BadRequestError: they are neither texts nor objects with the same names and shapes; or there is none.
    """
    if not isinstance(instances, list) or not instances:
        msg = 'expected {"instances": [...]} with one item or more'
        raise BadRequestError(msg)
    if all(isinstance(each, str) for each in instances):
        return {TEXT: np.array(instances, dtype=object)}
    if not all(isinstance(each, dict) and set(each) == set(instances[0]) for each in instances):
        msg = "instances: expected texts, or objects that have the same inputs"
        raise BadRequestError(msg)
    try:
        return {name: np.array([each[name] for each in instances]) for name in instances[0]}
    except ValueError as error:
        msg = f"instances: items have different shapes ({error})"
        raise BadRequestError(msg) from error


def predictions(outputs: Arrays) -> list[Any]:
    """Return a prediction for each row: values by name of the output, or the value of the only one."""
    rows = [dict(zip(outputs, values, strict=True)) for values in zip(*outputs.values(), strict=True)]
    plain = [{name: value.tolist() for name, value in row.items()} for row in rows]
    return [next(iter(row.values())) if len(row) == 1 else row for row in plain]


async def predict(service: Service, request: Request) -> JSONResponse:
    """Answer `{"instances": [...]}` by `{"predictions": [...]}`."""
    try:
        body = await request.json()
    except ValueError as error:
        msg = f"the request is not JSON: {error}"
        raise BadRequestError(msg) from error
    instances = body.get("instances") if isinstance(body, dict) else None
    return JSONResponse({"predictions": predictions(await service.ask(given_of(instances)))})


async def embeddings(service: Service, name: str, request: Request) -> JSONResponse:
    """Answer /v1/embeddings of OpenAI's protocol."""
    try:
        body = await request.json()
        given = body["input"]
    except (ValueError, KeyError, TypeError):
        return _refused('expected {"model": ..., "input": a text or a list of texts}')
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        return _refused("input: expected a text, or a list of one or more texts")
    if body.get("model") != name:
        return _refused(f"there is no model {body.get('model')!r}; there is {name!r}", 404)
    rows = await service.rows({TEXT: np.array(texts, dtype=object)})
    vectors = [answer[EMBEDDING][0] for answer in await service.batches.ask(rows)]
    as_text = body.get("encoding_format") == "base64"
    encoded = [
        base64.b64encode(vector.astype("<f4").tobytes()).decode() if as_text else vector.tolist()
        for vector in vectors
    ]
    data = [{"object": "embedding", "embedding": vector, "index": i} for i, vector in enumerate(encoded)]
    tokens = sum(row.tokens for row in rows)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JSONResponse({"object": "list", "data": data, "model": name, "usage": usage})


def _refused(why: str, status: int = 400) -> JSONResponse:
    """Return an error as OpenAI's clients read it."""
    return JSONResponse({"error": {"message": why, "type": "invalid_request_error", "code": None}}, status)
