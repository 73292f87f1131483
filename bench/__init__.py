"""Where the benches run: `DEVICE=cpu` tries one on sizes of `bench.checkpoints.TINY`, to see that it will run on a GPU."""

import os

DEVICE = os.environ.get("DEVICE", "cuda")


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if DEVICE == "cuda":
        import torch

        torch.cuda.synchronize()


def empty_cache() -> None:
    """Give back the GPU memory that making a checkpoint left in torch's allocator, which no plan counts."""
    if DEVICE == "cuda":
        import torch

        torch.cuda.empty_cache()
