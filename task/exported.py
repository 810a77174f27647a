"""One network as one file for devices: ``torch.export``, ONNX, or weights that are put back here.

What the network is travels inside the file (``about``): the reader of a file needs nothing else.
"""

import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save
from torch import Tensor, nn

from task.channels import ChannelMap
from task.errors import DataError
from task.models import build
from task.submodel import slice_module

__all__ = ["FORMATS", "About", "Format", "Run", "load"]

About = Mapping[str, Any]
Run = Callable[[Tensor], Tensor]

BATCH = "batch"
"""Name of the axis that may have any length."""


@dataclass(frozen=True)
class Format:
    """How a network becomes a file, and how the file runs.

    Parameters
    ----------
    suffix : str
        Of the file's name.
    write : (network in eval mode, (2, *shape) inputs, about) -> bytes
    read : bytes -> function of an input batch
    """

    suffix: str
    write: Callable[[nn.Module, Tensor, About], bytes]
    read: Callable[[bytes], Run]


def load(path: Path | str) -> nn.Module:
    """Return the network in a ``.safetensors`` file that was exported, in eval mode.

    Raises
    ------
    DataError
        The file holds no exported network.
    """
    with safe_open(path, "pt") as file:
        about = file.metadata() or {}
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return _rebuilt(about, state, str(path))


def _write_weights(network: nn.Module, example: Tensor, about: About) -> bytes:
    state = {name: tensor.contiguous() for name, tensor in network.state_dict().items()}
    return save(state, _texts(about))


def _read_weights(content: bytes) -> Run:
    length = int.from_bytes(content[:8], "little")
    about = json.loads(content[8 : 8 + length])["__metadata__"]
    return _rebuilt(about, load_tensors(content), "export")


def _rebuilt(about: Mapping[str, str], state: dict[str, Tensor], where: str) -> nn.Module:
    wanted = ("model", "shape", "classes", "channels", "kept")
    if missing := [key for key in wanted if key not in about]:
        raise DataError(
            f"{where}: its metadata lacks {', '.join(missing)}; give a file that "
            "`fedsparse export --format safetensors` wrote"
        )
    model, shape, classes, channels, kept = (json.loads(about[key]) for key in wanted)
    dense = build(model, tuple(shape), len(classes))
    cmap = ChannelMap.from_json(json.dumps(channels))
    indices = {group: torch.tensor(index).numpy() for group, index in kept.items()}
    return slice_module(dense, cmap, indices, state).eval()


def _write_program(network: nn.Module, example: Tensor, about: About) -> bytes:
    program = torch.export.export(network, (example,), dynamic_shapes=_any_batch())
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={"about.json": json.dumps(about)})
    return file.getvalue()


def _read_program(content: bytes) -> Run:
    run: Run = torch.export.load(io.BytesIO(content)).module()
    return run


def _write_onnx(network: nn.Module, example: Tensor, about: About) -> bytes:
    for package in ("onnx", "onnxscript"):
        _need(package)
    program = torch.onnx.export(
        network,
        (example,),
        dynamo=True,
        verbose=False,
        input_names=["input"],
        output_names=["logits"],
        dynamic_shapes=_any_batch(),
    )
    if program is None:
        raise DataError("torch.onnx.export returned nothing")
    model = program.model_proto
    for key, text in _texts(about).items():
        model.metadata_props.add(key=key, value=text)
    content: bytes = model.SerializeToString()
    return content


def _read_onnx(content: bytes) -> Run:
    """Run with onnxruntime on one thread, or with ONNX's own slow reference."""
    try:
        import onnxruntime
    except ImportError:
        from onnx import load_model_from_string
        from onnx.reference import ReferenceEvaluator

        session: Any = ReferenceEvaluator(load_model_from_string(content))
    else:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        session = onnxruntime.InferenceSession(content, options, ["CPUExecutionProvider"])
    return lambda x: torch.from_numpy(session.run(None, {"input": x.numpy()})[0])


def _any_batch() -> tuple[dict[int, Any]]:
    return ({0: torch.export.Dim(BATCH)},)


def _texts(about: About) -> dict[str, str]:
    return {key: json.dumps(value) for key, value in about.items()}


def _need(package: str) -> None:
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise DataError(
            f"format onnx: the package {package} is not installed; install the extra: "
            "pip install 'fedsparse[export]', from a clone pip install -e '.[export]'"
        )


FORMATS: dict[str, Format] = {
    "torch-export": Format(".pt2", _write_program, _read_program),
    "onnx": Format(".onnx", _write_onnx, _read_onnx),
    "safetensors": Format(".safetensors", _write_weights, _read_weights),
}
