"""Where tensors live and how they get there; all of it does nothing on a machine without CUDA."""

import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn

__all__ = ["DTYPES", "Autocast", "lowered", "make_deterministic", "move", "place", "to_host"]

Autocast = Literal["off", "bf16", "fp16"]

DTYPES: dict[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}


def move(tensor: Tensor, device: torch.device) -> Tensor:
    """Return ``tensor`` on ``device``; to CUDA through pinned memory, without waiting for it."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def place(model: nn.Module, device: torch.device) -> nn.Module:
    """Move ``model`` in place as `move` does with a tensor; return it."""
    if device.type == "cuda":
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type == "cpu":
                tensor.data = tensor.data.pin_memory()
    return model.to(device, non_blocking=True)


def to_host(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors detached and on the CPU; from CUDA all are copied before one wait."""
    copies = {name: t.detach().to("cpu", non_blocking=True) for name, t in tensors.items()}
    if any(t.is_cuda for t in tensors.values()):
        torch.cuda.synchronize()
    return copies


def lowered(precision: Autocast, device: torch.device) -> AbstractContextManager[Any]:
    """Return a context for one forward pass in ``precision``."""
    if precision == "off":
        return nullcontext()
    return torch.autocast(device.type, DTYPES[precision])


def make_deterministic(wanted: bool) -> None:
    """Let torch use deterministic algorithms alone, or whatever is fastest.

    An operation without a deterministic algorithm then raises, naming itself. cuBLAS needs a fixed
    workspace, which it reads from the environment when it is first used.
    """
    if wanted == torch.are_deterministic_algorithms_enabled():
        return  # the switch alone imports torch's compiler, which takes seconds
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(wanted)
    torch.backends.cudnn.deterministic = wanted
