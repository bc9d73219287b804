"""Serve a quantized model by KServe's protocols: v1 and v2 over REST, v2 over gRPC, and OpenAI's embeddings.

    pip install kserve
    python examples/serve/kserve_model.py DIR [--model_name NAME] [--http_port 8080] [--grpc_port 8081]
        [--most_tokens 4096] [--most_items 64] [--most_waiting 1024] [--timeout 30]

DIR is what `nc.save`, `nc.hf.quantize` or `nc.hf.quantize_sentence_transformer` wrote; under an
InferenceService it is /mnt/models. The server is ready when the model is loaded. SIGHUP loads DIR again while
requests go on; SIGTERM lets the server answer what it has accepted. /metrics has items, tokens and seconds of
each call. 429 with Retry-After (gRPC: RESOURCE_EXHAUSTED) says that too much waits.

v1: {"instances": [...]}: texts, or objects with the inputs of one item. v2: named tensors, or BYTES "text".
OpenAI, of models over texts: base_url="http://HOST:8080/v1".
"""

from __future__ import annotations

import argparse
import json
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse
from grpc_interceptor import exceptions as of_grpc
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer, model_server
from kserve.errors import InvalidInput
from kserve.utils.numpy_codec import from_np_dtype
from prometheus_client import Histogram

sys.path.insert(0, str(Path(__file__).parent))
import web
from batching import ClosedError, OverloadedError, TooLateError
from served import BadRequestError, Service, Texts, add_limits, limits_of

_ROWS = Histogram("nc_batch_rows", "Items that one call computed", buckets=(1, 2, 4, 8, 16, 32, 64))
_TOKENS = Histogram("nc_batch_tokens", "Tokens that one call computed", buckets=[4**i for i in range(1, 8)])
_SECONDS = Histogram("nc_batch_seconds", "Seconds of one call")
#: Errors of a request, and what gRPC calls them.
_GRPC = {
    OverloadedError: of_grpc.ResourceExhausted,
    ClosedError: of_grpc.Unavailable,
    TooLateError: of_grpc.DeadlineExceeded,
}


def _seen(items: int, tokens: int, seconds: float) -> None:
    _ROWS.observe(items)
    _TOKENS.observe(tokens)
    _SECONDS.observe(seconds)


class Served(Model):
    """A model of a folder."""

    def __init__(self, name: str, folder: str, limits: dict[str, Any]) -> None:
        super().__init__(name)
        self.folder, self.limits = folder, limits

    def load(self) -> bool:
        """Load the folder."""
        self.service = Service(self.folder, seen=_seen, **self.limits)
        self.ready = True
        return True

    async def predict(
        self, payload: Any, headers: dict[str, str] | None = None, response_headers: Any = None
    ) -> Any:
        """Answer a request of version 1 or 2."""
        try:
            if isinstance(payload, InferRequest):
                found = await self.service.ask({each.name: each.as_numpy() for each in payload.inputs})
                return InferResponse(
                    payload.id or str(uuid.uuid4()),
                    self.name,
                    [_output(*item) for item in found.items()],
                    use_binary_outputs=payload.use_binary_outputs,
                    requested_outputs=payload.request_outputs,
                )
            found = await self.service.ask(web.given_of(_instances(payload)))
        except BadRequestError as error:
            raise InvalidInput(str(error)) from error
        except tuple(_GRPC) as error:
            if isinstance(payload, InferRequest) and payload.from_grpc:
                raise _GRPC[type(error)](str(error)) from error
            raise
        return {"predictions": web.predictions(found)}

    def stop(self) -> None:
        """Stay ready until the server has answered what it accepted."""

    async def embeddings(self, request: Request) -> JSONResponse:
        """Answer /v1/embeddings of OpenAI's protocol (KServe's own needs vLLM)."""
        return await web.embeddings(self.service, self.name, request)


def _output(name: str, value: np.ndarray) -> InferOutput:
    output = InferOutput(name, list(value.shape), from_np_dtype(value.dtype))
    output.set_data_from_numpy(np.ascontiguousarray(value), binary_data=False)
    return output


def _instances(payload: Any) -> Any:
    """Return what a request of version 1 has; None where it has nothing."""
    if isinstance(payload, (bytes, str)):  # without a header that says JSON
        try:
            payload = json.loads(payload)
        except ValueError as error:
            msg = f"the request is not JSON: {error}"
            raise InvalidInput(msg) from error
    return payload.get("instances") if isinstance(payload, dict) else None


def main() -> None:
    """Load and serve."""
    parser = argparse.ArgumentParser(
        parents=[model_server.parser],
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", help="of the quantized model")
    add_limits(parser)
    options = parser.parse_args()
    model = Served(options.model_name, options.folder, limits_of(options))
    model.load()
    model.service.reload_on_hangup()
    model_server.app.add_middleware(web.Disconnects)
    for error in web.STATUS:
        model_server.app.add_exception_handler(error, web.handle)
    if isinstance(model.service.served, Texts):
        model_server.app.add_api_route("/v1/embeddings", model.embeddings, methods=["POST"])
    ModelServer().start([model])


if __name__ == "__main__":
    main()
