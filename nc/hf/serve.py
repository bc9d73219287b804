"""OpenAI's API over a low-bit language model, by the server of transformers with nc's attention."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from pathlib import Path

import transformers
from huggingface_hub import constants

from nc.errors import BackendUnavailableError, InputError, UnsupportedError
from nc.hf.at_load import ATTENTION, METHOD
from nc.hf.attention import NAME, register_attention
from nc.text.json_text import parsed

#: What the server of transformers imports.
_NEEDED = ("accelerate", "fastapi", "openai", "pydantic", "uvicorn")
#: Tokens of a block of its cache.
BLOCK = 256


def check_servable(folder: Path, host: str, port: int) -> None:
    """Raise an error where a folder can't be served here; before its model is loaded.

    Raises:
        InputError: it has no model with low-bit weights, or no tokenizer; or nothing can listen there.
        UnsupportedError: this version of transformers has no such server.
        BackendUnavailableError: a package is missing, or the attention can't run here.
    """
    _check_folder(folder)
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        msg = f"The server of transformers needs {', '.join(missing)}: pip install 'transformers[serving]'."
        raise BackendUnavailableError(msg)
    if find_spec("transformers.cli") is None or find_spec("transformers.cli.serve") is None:
        msg = f"transformers {transformers.__version__} has no server: install transformers 5.23 or newer."
        raise UnsupportedError(msg)
    register_attention()
    try:
        socket.create_server((host, port)).close()
    except OSError as error:
        msg = f"Nothing can listen on {host}, port {port}: {error.strerror}. Choose another one."
        raise InputError(msg) from error


def serve(folder: Path, host: str, port: int, cache_tokens: int, batch_tokens: int) -> None:
    """Answer requests of OpenAI's chat and completions until the process is stopped.

    Requests join a batch while others are generated (continuous batching). Their keys and values are in
    blocks of one cache, and nothing is computed for padding.

    Args:
        folder: a model with low-bit weights and its tokenizer, as `save_pretrained` writes them.
        host: the address to listen on.
        port: likewise.
        cache_tokens: tokens of all requests that keys and values are kept of.
        batch_tokens: most tokens of a step.

    Raises:
        InputError, UnsupportedError, BackendUnavailableError: see `check_servable`.
    """
    check_servable(folder, host, port)
    from transformers.cli.serve import Serve

    # its list of models is an error where this folder is missing
    Path(constants.HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)
    blocks = max(1, -(-cache_tokens // BLOCK))
    asked = ATTENTION.set(NAME)
    try:
        Serve(
            str(folder),
            continuous_batching=True,
            device="cpu",
            dtype="float32",
            cb_num_blocks=blocks,
            cb_max_batch_tokens=batch_tokens,
            host=host,
            port=port,
        )
    finally:
        ATTENTION.reset(asked)


def _check_folder(folder: Path) -> None:
    """Raise InputError for a folder that has no model with low-bit weights, or no tokenizer."""
    path = folder / "config.json"
    try:
        config = parsed(path.read_bytes())
        method = config["quantization_config"]["quant_method"]
    except (OSError, ValueError, KeyError, TypeError):
        method = None
    if method != METHOD:
        msg = (
            f"{folder} has no language model with low-bit weights of nc: load one with from_pretrained(…, "
            'quantization_config=nc.hf.QuantizationConfig("int8")) and save it with save_pretrained.'
        )
        raise InputError(msg)
    if not any((folder / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        msg = f"{folder} has no tokenizer: write it there with tokenizer.save_pretrained."
        raise InputError(msg)
