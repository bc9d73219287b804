"""Calibrate on several processes, each with its own part of the data.

All get the same int8 model, bit for bit.

    python examples/distributed_calibration.py [--out DIR]                                  starts the two
    processes below torchrun --nproc-per-node 2 examples/distributed_calibration.py [--out DIR]             or
    on as many machines as you like

All that it takes is a process group: `convert` then sees what every rank has collected, so every rank must
call it.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="folder for the artefacts (default: a temporary one)")
    out = parser.parse_args().out
    if "RANK" in os.environ:  # torchrun started this process
        calibrate(out or Path(tempfile.mkdtemp(prefix="nc-distributed-")))
        return
    out = out or Path(tempfile.mkdtemp(prefix="nc-distributed-"))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    threads = str(max(1, (os.cpu_count() or 1) // 2))  # torchrun's own choice is 1
    done = subprocess.run(
        [*torchrun, __file__, "--out", str(out)], env={"OMP_NUM_THREADS": threads, **os.environ}
    )
    sys.exit(done.returncode)


def calibrate(out: Path) -> None:
    """Return what each process does."""
    import torch
    import torch.distributed as dist

    import nc

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # every rank needs the same weights and the same example
    layers = [
        torch.nn.Conv2d(3, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3),
        torch.nn.ReLU(),
    ]
    model = torch.nn.Sequential(
        *layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(32, 10)
    ).eval()
    images = torch.randn(64, 8, 3, 32, 32)  # 64 batches, of which a real data set would be read in shards

    prepared = nc.prepare(model, nc.StaticQuantConfig(act_algo="mse"), example_inputs=images[0])
    mine = images[rank::ranks]
    for batch in mine:
        prepared(batch)
    q_model = nc.convert(prepared)
    folder = out / f"rank{rank}"
    q_model.save(folder)

    checksums = [None] * ranks
    dist.all_gather_object(checksums, (folder / "checksums.json").read_text())
    if rank == 0:
        print(
            f"each of {ranks} ranks calibrated with {len(mine)} of {len(images)} batches of random images "
            "(RANDOM weights)"
        )
        print(
            f"artefacts in {out}: "
            f"{'the same bytes on every rank' if len(set(checksums)) == 1 else 'THEY DIFFER'}"
        )
    dist.destroy_process_group()
    if len(set(checksums)) != 1:
        sys.exit("the ranks have different models")


if __name__ == "__main__":
    main()
