"""`python -m nc serve FOLDER`: a low-bit language model by OpenAI's API."""

from __future__ import annotations

from pathlib import Path

import click

from nc.cli.shell import FOLDER, command


@click.command()
@click.argument("folder", type=FOLDER)
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True, help="Its port.")
@click.option("--threads", type=click.IntRange(min=1), help="Threads (default: the CPUs of this process).")
@click.option(
    "--cache-tokens",
    type=click.IntRange(min=1),
    default=16384,
    show_default=True,
    help="Tokens of all requests whose keys and values are kept.",
)
@click.option(
    "--batch-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Most tokens of a step.",
)
@command
def serve(
    folder: Path, host: str, port: int, threads: int | None, cache_tokens: int, batch_tokens: int
) -> None:
    """Serve a language model with low-bit weights by OpenAI's chat and completions.

    It is the server of transformers ("pip install 'transformers[serving]'"), with nc's kernels and
    attention: requests join while others are generated, and nothing is computed for padding.
    """
    import torch

    from nc.hf import serve as server
    from nc.process.cores import cores

    server.check_servable(folder, host, port)
    torch.set_num_threads(threads or cores().usable)
    click.echo(f"nc: http://{host}:{port}/v1, {torch.get_num_threads()} threads", err=True)
    server.serve(folder, host, port, cache_tokens, batch_tokens)
