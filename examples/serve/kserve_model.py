"""Serve a quantized model by KServe's protocols: v1 and v2 over REST, v2 over gRPC, and OpenAI's embeddings.

    pip install kserve
    python examples/serve/kserve_model.py DIR [--model_name NAME] [--http_port 8080] [--grpc_port 8081]
        [--window_ms 3] [--max_batch 16] [--lengths 16,32,64,128,256]

DIR is what `nc.save`, `nc.hf.quantize` or `nc.hf.quantize_sentence_transformer` wrote; under an
InferenceService it is /mnt/models. The server is ready when the model is loaded and its kernels for all sizes
are made. SIGTERM lets it answer what it has accepted. /metrics has rows and seconds of each call.

v1: {"instances": [...]}: texts, or objects with the inputs of one item. v2: named tensors, or BYTES "text".
OpenAI, of models over texts: base_url="http://HOST:8080/v1".
"""

from __future__ import annotations

import argparse
import base64
import json
import sys
import uuid
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse
from kserve import InferOutput, InferRequest, InferResponse, Model, ModelServer, model_server
from kserve.errors import InvalidInput
from kserve.utils.numpy_codec import from_np_dtype
from prometheus_client import Histogram

sys.path.insert(0, str(Path(__file__).parent))
from served import EMBEDDING, TEXT, Arrays, BadRequest, Batcher, Texts, opened, warm_sizes

_ROWS = Histogram("nc_batch_rows", "Items that one call computed", buckets=(1, 2, 4, 8, 16, 32, 64))
_SECONDS = Histogram("nc_batch_seconds", "Seconds of one call")


class Served(Model):
    """A model of a folder."""

    def __init__(self, name: str, folder: str, options: argparse.Namespace) -> None:
        super().__init__(name)
        self.folder, self.options = folder, options

    def load(self) -> bool:
        """Load the folder, and make the kernels for all sizes."""
        lengths = [int(length) for length in self.options.lengths.split(",") if length]
        served = opened(self.folder, warm_sizes(self.options.max_batch, lengths))
        self.batcher = Batcher(served, self.options.window_ms, self.options.max_batch)
        self.ready = True
        return True

    async def predict(
        self, payload: Any, headers: dict[str, str] | None = None, response_headers: Any = None
    ) -> Any:
        """Answer a request of version 1 or 2."""
        if isinstance(payload, InferRequest):
            found = await self._asked({each.name: each.as_numpy() for each in payload.inputs})
            return InferResponse(
                payload.id or str(uuid.uuid4()),
                self.name,
                [_output(*item) for item in found.items()],
                use_binary_outputs=payload.use_binary_outputs,
                requested_outputs=payload.request_outputs,
            )
        instances = _instances(payload)
        if not isinstance(instances, list) or not instances:
            msg = 'expected {"instances": [...]} with one item or more'
            raise InvalidInput(msg)
        found = await self._asked(_stacked(instances))
        rows = [{name: value[i].tolist() for name, value in found.items()} for i in range(len(instances))]
        return {"predictions": [next(iter(row.values())) if len(row) == 1 else row for row in rows]}

    async def _asked(self, given: Arrays) -> Arrays:
        done = len(self.batcher.batches)
        try:
            return await self.batcher.ask(given)
        except BadRequest as error:
            raise InvalidInput(str(error)) from error
        finally:
            for rows, seconds in self.batcher.batches[done:]:
                _ROWS.observe(rows)
                _SECONDS.observe(seconds)
            del self.batcher.batches[done:]

    def stop(self) -> None:
        """Stay ready until the server has answered what it accepted."""

    async def embeddings(self, request: Request) -> JSONResponse:
        """Answer /v1/embeddings of OpenAI's protocol (KServe's own needs vLLM)."""
        try:
            body = await request.json()
            given = body["input"]
        except (ValueError, KeyError, TypeError):
            return _refused('expected {"model": ..., "input": a text or a list of texts}')
        texts = [given] if isinstance(given, str) else given
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
            return _refused("input: expected a text, or a list of one or more texts")
        if body.get("model") != self.name:
            return _refused(f"there is no model {body.get('model')!r}; there is {self.name!r}", 404)
        vectors = (await self._asked({TEXT: np.array(texts, dtype=object)}))[EMBEDDING]
        as_text = body.get("encoding_format") == "base64"
        encoded = [
            base64.b64encode(row.astype("<f4").tobytes()).decode() if as_text else row.tolist()
            for row in vectors
        ]
        data = [{"object": "embedding", "embedding": row, "index": i} for i, row in enumerate(encoded)]
        tokens = sum(len(ids) for ids in self.batcher.served.model.tokenizer(texts)["input_ids"])
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        return JSONResponse({"object": "list", "data": data, "model": self.name, "usage": usage})


def _refused(why: str, status: int = 400) -> JSONResponse:
    """Return an error as OpenAI's clients read it."""
    return JSONResponse({"error": {"message": why, "type": "invalid_request_error", "code": None}}, status)


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
            msg = f"the request is no JSON: {error}"
            raise InvalidInput(msg) from error
    return payload.get("instances") if isinstance(payload, dict) else None


def _stacked(instances: list[Any]) -> Arrays:
    """Return the items of a request of version 1 as arrays with one row for each.

    Raises:
        InvalidInput: they are no texts, and no objects with the same names and shapes.
    """
    if all(isinstance(each, str) for each in instances):
        return {TEXT: np.array(instances, dtype=object)}
    if not all(isinstance(each, dict) and set(each) == set(instances[0]) for each in instances):
        msg = "instances: expected texts, or objects that have the same inputs"
        raise InvalidInput(msg)
    try:
        return {name: np.array([each[name] for each in instances]) for name in instances[0]}
    except ValueError as error:
        msg = f"instances: items have different shapes ({error})"
        raise InvalidInput(msg) from error


def main() -> None:
    """Load and serve."""
    parser = argparse.ArgumentParser(
        parents=[model_server.parser],
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", help="of the quantized model")
    parser.add_argument("--window_ms", type=float, default=3.0, help="how long a request waits for others")
    parser.add_argument("--max_batch", type=int, default=16, help="items of one call")
    parser.add_argument("--lengths", default="16,32,64,128,256", help="of texts, for which kernels are made")
    options = parser.parse_args()
    model = Served(options.model_name, options.folder, options)
    model.load()
    if isinstance(model.batcher.served, Texts):
        model_server.app.add_api_route("/v1/embeddings", model.embeddings, methods=["POST"])
    ModelServer().start([model])


if __name__ == "__main__":
    main()
