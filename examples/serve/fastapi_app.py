"""Serve a quantized model by FastAPI and uvicorn.

    pip install fastapi uvicorn
    python examples/serve/fastapi_app.py DIR [--name NAME] [--host 127.0.0.1] [--port 8000]
        [--most_tokens 4096] [--most_items 64] [--most_waiting 1024] [--timeout 30]

DIR is what `nc.save`, `nc.hf.quantize` or `nc.hf.quantize_sentence_transformer` wrote.

    GET  /health         200 when the model is loaded
    POST /predict        {"instances": [...]}: texts, or objects with the inputs of one item
    POST /v1/embeddings  OpenAI's protocol, of models over texts: base_url="http://HOST:8000/v1"

400: a bad request. 429 with Retry-After: too much waits. 503: the server is closing. 504: it took too long.
SIGHUP loads DIR again while requests go on; SIGTERM lets the server answer what it has accepted.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request

sys.path.insert(0, str(Path(__file__).parent))
import web
from served import Service, Texts, add_limits, limits_of


def application(service: Service, name: str) -> FastAPI:
    """Return the application of a model."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.batches.close()

    app = FastAPI(lifespan=lifespan)
    app.add_middleware(web.Disconnects)
    for error in web.STATUS:
        app.add_exception_handler(error, web.handle)

    @app.get("/health")
    async def health() -> dict[str, str]:
        return {"model": name}

    @app.post("/predict")
    async def predict(request: Request) -> Any:
        return await web.predict(service, request)

    if isinstance(service.served, Texts):

        @app.post("/v1/embeddings")
        async def embeddings(request: Request) -> Any:
            return await web.embeddings(service, name, request)

    return app


def main() -> None:
    """Load and serve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", help="of the quantized model")
    parser.add_argument("--name", default="model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    add_limits(parser)
    options = parser.parse_args()
    service = Service(options.folder, **limits_of(options))
    service.reload_on_hangup()
    uvicorn.run(application(service, options.name), host=options.host, port=options.port, access_log=False)


if __name__ == "__main__":
    main()
