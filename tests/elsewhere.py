"""A device that is not the CPU, for machines without one: real values, and CUDA's refusals.

A tensor on `PLACE` holds its values in an ordinary tensor. Operations that mix it with tensors of
the CPU raise as CUDA does, numpy() as well; scalars, indices and copies may cross.
"""

from contextlib import nullcontext
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

PLACE = torch.device("meta")
aten = torch.ops.aten
CROSSES = {aten.copy_, aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}


class Elsewhere(torch.Tensor):
    """A tensor on `PLACE`; ``inner`` has its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), dtype=inner.dtype, device=PLACE
        )

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class _Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


def elsewhere():
    """Return a context in which tensors can be moved to `PLACE` and computed with there."""

    def autocast(kind, *args, **kwargs):
        return nullcontext() if kind == PLACE.type else original(kind, *args, **kwargs)

    original = torch.autocast
    stack = _Stack()
    stack.patched, stack.mode = patch.object(torch, "autocast", autocast), _Mode()
    return stack


class _Stack:
    def __enter__(self):
        self.patched.__enter__()
        self.mode.__enter__()

    def __exit__(self, *error):
        self.mode.__exit__(*error)
        self.patched.__exit__(*error)


def _run(func, args, kwargs):
    tensors = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
    there = [t for t in tensors if isinstance(t, Elsewhere)]
    wanted = kwargs.get("device")
    goes = torch.device(wanted) == PLACE if wanted is not None else bool(there)
    if not there and not goes:
        return func(*args, **kwargs)
    here = [t for t in tensors if not isinstance(t, Elsewhere) and t.ndim]
    if there and here and func.overloadpacket not in CROSSES:
        raise RuntimeError(f"{func}: expected all tensors on one device, found {PLACE} and cpu")
    if wanted is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    found = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    known = {id(t.inner): t for t in there}

    def wrap(value):
        if not isinstance(value, torch.Tensor):
            return value
        return known.get(id(value)) if id(value) in known else Elsewhere(value)

    if func.overloadpacket is aten.copy_ or (tensors and not there):
        return args[0] if func.overloadpacket is aten.copy_ else tree_map(wrap, found)
    return tree_map(wrap, found) if goes else found


def _inner(value):
    return value.inner if isinstance(value, Elsewhere) else value
