"""Export a quantized model as one TorchScript file, and serve it without `nc`.

The process that serves it imports only torch and IPEX.

    python examples/serve_torchscript.py [--out DIR]   quantize, export, then start the server process below
    python examples/serve_torchscript.py --serve DIR   the server: needs neither `nc` nor the model's class

C++ does the same with `torch::jit::load` after loading IPEX's library. The file holds the graph for IPEX's
fuser, which compiles it on the first calls, so a server warms up before it takes requests.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the file (default: a temporary one)")
    parser.add_argument(
        "--serve", type=Path, metavar="DIR", help="load and run what an earlier run exported to this folder"
    )
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    out = options.out or Path(tempfile.mkdtemp(prefix="nc-serve-"))
    out.mkdir(parents=True, exist_ok=True)
    export(out)
    server = subprocess.run(
        [sys.executable, __file__, "--serve", str(out)], stderr=subprocess.PIPE, text=True
    )
    if server.returncode:
        sys.exit(server.stderr)  # else it holds only what IPEX says when it is imported


def export(out: Path) -> None:
    """Quantize a network; write model.pt and its result for one image."""
    import torch
    from torchvision.models import resnet18

    import nc

    torch.manual_seed(0)
    model = resnet18(weights=None).eval()
    images = torch.randn(4, 3, 224, 224)
    config = nc.StaticQuantConfig()
    q_model = nc.quantize(
        model, config, lambda prepared: prepared(images), example_inputs=images[:1], backend="ipex"
    )
    nc.export_torchscript(q_model, out / "model.pt")
    torch.save({"input": images[:1], "output": q_model(images[:1])}, out / "expected.pt")
    megabytes = (out / "model.pt").stat().st_size / 1e6
    print(f"exported resnet18 (RANDOM weights) to {out / 'model.pt'}, {megabytes:.1f} MB")


def serve(out: Path) -> None:
    """Return what a server does."""
    import intel_extension_for_pytorch  # noqa: F401 - registers the fuser
    import torch

    model = torch.jit.load(out / "model.pt")
    expected = torch.load(out / "expected.pt", weights_only=True)
    image = expected["input"].contiguous()  # IPEX's fuser wants one memory layout for the life of the process
    with torch.no_grad():
        for _ in range(3):  # profile, compile, run
            model(image)
        times = []
        for _ in range(20):
            start = time.perf_counter()
            (output,) = model(image)  # inputs and outputs are flat: a tuple of tensors
            times.append(1e3 * (time.perf_counter() - start))
    difference = float((output - expected["output"]).abs().max())
    same = difference <= 1e-4 * float(expected["output"].abs().mean())
    verdict = "the same numbers" if same else "OTHER NUMBERS"
    print(f"served without importing nc: {'nc' not in sys.modules}")
    print(f"one image in {statistics.median(times):.1f} ms; {verdict}, largest difference {difference:.1e}")
    if not same:
        sys.exit("the served model computes something else than the exported one")


if __name__ == "__main__":
    main()
