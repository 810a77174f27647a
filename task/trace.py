"""Find the channel groups of any network by running it once.

The network runs eagerly on an example while a dispatch mode sees every ATen operation. Axes carry
integer labels, operations add equalities between labels, and what is connected in the end is one
channel (`task.tracing`). Python control flow is no obstacle. What the rules do not know is kept
whole and listed in `ChannelMap.pinned`; what they claim is checked by slicing the network, so that
a map may be too careful but is not wrong.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from task.channels import ChannelMap
from task.errors import DataError
from task.skeleton import copy_around
from task.tracing.groups import build
from task.tracing.labels import Ledger, Value
from task.tracing.op import Op, tensors_in
from task.tracing.proof import prove, without
from task.tracing.rules import apply

__all__ = ["trace"]

HALF = (torch.float16, torch.bfloat16)  # too coarse to see 1e-5

WHOLE_MODULES: dict[type[nn.Module], str] = {
    nn.RNNBase: "is a recurrent layer, one operation of a fixed hidden size",
    nn.MultiheadAttention: "is an nn.MultiheadAttention, which cannot lose heads",
}


def trace(
    model: nn.Module,
    example: Tensor | tuple[Tensor, ...],
    *,
    pin: Collection[str] = (),
    inexact: bool = False,
    verify: bool = True,
) -> ChannelMap:
    """Map the channel groups of a network.

    Parameters
    ----------
    model : nn.Module
        Any network on any device; a copy is run on the CPU, and the network, its mode and the
        random state are left as they are.
    example : (n, …) tensor or tuple of tensors
        Inputs of a valid size; two samples are enough.
    pin : collection of str
        Groups to keep whole, by name.
    inexact : bool
        Keep groups of which dropping a channel is not the same as zeroing it (a LayerNorm runs
        over them); otherwise they are pinned.
    verify : bool
        Slice random halves of the groups and compare with the gated network; a group for which
        they differ by more than 1e-5 is pinned.

    Returns
    -------
    ChannelMap
        Groups in the order in which they are first written.

    Raises
    ------
    DataError
        If `pin` names a group that does not exist.
    """
    inputs = (example,) if isinstance(example, Tensor) else tuple(example)
    inputs = tuple((x.float() if x.dtype in HALF else x).to("cpu") for x in inputs)
    with _quiet():
        twin = copy_around(model, {}).to("cpu").eval()
        if any(parameter.dtype in HALF for parameter in twin.parameters()):
            twin = twin.float()
        cmap = build(_record(twin, inputs), inexact)
        cmap = without(cmap, dict.fromkeys(pin, "pinned by the caller"))
        return prove(twin, cmap, inputs) if verify else cmap


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the random state, compute no gradients, and let fused attention fall apart."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.random.fork_rng([]), torch.no_grad():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def _record(model: nn.Module, inputs: tuple[Tensor, ...]) -> Ledger:
    """Run a copy of the modules, which shares the parameters, and write down what happens."""
    twin = copy_around(model, {id(tensor): tensor for tensor in model.parameters()})
    recorder = _Recorder()
    for name, tensor in twin.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            recorder.add(name, tensor)
    for name, module in twin.named_modules():
        _watch(name, module, recorder)
        for kind, reason in WHOLE_MODULES.items():
            if isinstance(module, kind):
                recorder.ledger.whole[name] = reason
                recorder.pin([*module.parameters()], f"belongs to {name}, which {reason}")
    recorder.feed(inputs)
    with recorder:
        outputs = twin(*inputs)
    results = list(tensors_in(outputs))
    if not results:
        raise DataError(
            f"the network returned {type(outputs).__name__} without tensors; to be traced it must "
            "return tensors, alone or in lists, tuples, dicts or dataclasses"
        )
    for tensor in results:
        recorder.ledger.ends += [axis for axis in recorder.look(tensor).axes if axis is not None]
    return recorder.ledger


def _watch(name: str, module: nn.Module, recorder: _Recorder) -> None:
    """Note when the module starts and what it returns."""
    ledger = recorder.ledger

    def enter(_module: nn.Module, _args: object) -> None:
        ledger.stack.append(name)

    def leave(_module: nn.Module, _args: object, result: object) -> None:
        ledger.stack.pop()
        if isinstance(result, Tensor):
            ledger.leave(name, recorder.look(result))

    module.register_forward_pre_hook(enter, prepend=True)
    module.register_forward_hook(leave)


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Applies the rule of every operation while the network runs."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Say no: to be skipped by a compiler nobody uses here, torch would import it (seconds)."""
        return False

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ledger = Ledger()
        self.known: dict[int, Value] = {}
        self.names: dict[int, str] = {}
        self.alive: list[Tensor] = []  # Python reuses the id of a tensor that is gone

    def look(self, tensor: Tensor) -> Value:
        return self.known.get(id(tensor)) or Value((None,) * tensor.ndim, data=False)

    def learn(self, tensor: Tensor, value: Value) -> None:
        self.known[id(tensor)] = value
        self.alive.append(tensor)

    def add(self, name: str, tensor: Tensor) -> None:
        """Register a tensor of the state; shared parameters have several names."""
        if id(tensor) in self.known:
            self.ledger.state[name] = self.known[id(tensor)]
        else:
            self.learn(tensor, self.ledger.register(name, tensor.shape))
            self.names[id(tensor)] = name

    def feed(self, inputs: tuple[Tensor, ...]) -> None:
        for tensor in tensors_in(inputs):
            self.learn(tensor, Value((None,) * tensor.ndim))

    def pin(self, tensors: list[Tensor], reason: str) -> None:
        for tensor in tensors:
            for axis in self.look(tensor).axes:
                self.ledger.pin(axis, reason)

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload[..., Any],
        types: Collection[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        op = Op(func, args, kwargs or {}, self.known, self.ledger)
        self.ledger.idle.difference_update(self.names.get(id(t), "") for t in op.tensors())
        result = op.run()
        for tensor, value in zip(op.outputs, apply(op), strict=True):
            self.learn(tensor, value)
        return result
