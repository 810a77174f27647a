"""What server and clients both build from the options: data, network, channel map, split."""

import copy
import functools
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn

from fedsparse_app.config import Config
from fedsparse_app.errors import ConfigError
from strategies import STRATEGIES
from strategies.base import SubmodelStrategy
from task.channels import ChannelMap
from task.cost import flops, parameters
from task.data import folder, load
from task.data.dataset import DataSet, Samples
from task.data.options import DataOptions
from task.data.partition import PartitionOptions, local_split, partition
from task.device import make_deterministic
from task.models import build, example
from task.seeding import seeded
from task.trace import trace

__all__ = [
    "Workload",
    "client_ids",
    "client_share",
    "device",
    "make_strategy",
    "prepare",
    "split",
    "workload",
]


Widths = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Workload:
    """A data set, the dense network with its initial weights, and its channels."""

    data: DataSet
    model: nn.Module
    channels: ChannelMap
    example: torch.Tensor
    known_costs: dict[Widths, dict[str, float]] = field(default_factory=dict)

    @property
    def score_shape(self) -> tuple[int, int]:
        """Domains and classes of every score."""
        return len(self.data.domains), len(self.data.classes)

    def costs(self, network: nn.Module) -> dict[str, float]:
        """Return ``parameters``, ``flops`` and ``train-flops`` of one sample."""
        widths = tuple(tuple(p.shape) for p in network.parameters())
        if widths not in self.known_costs:
            # On the CPU wherever the network is: a device's fused kernels count as nothing.
            forward, training = flops(copy.deepcopy(network).cpu(), self.example)
            self.known_costs[widths] = {
                "parameters": parameters(network),
                "flops": forward,
                "train-flops": training,
            }
        return dict(self.known_costs[widths])


def workload(config: Config) -> Workload:
    """Build the workload, or return the one this process has built before.

    Raises
    ------
    ConfigError
        The method prunes and the network has nothing that can be pruned.
    """
    made = _workload(config.data, config.model.name, config.run.seed)
    if getattr(config.method, "keep", 1.0) < 1 and not made.channels.groups:
        why = "; ".join(f"{name}: {reason}" for name, reason in made.channels.pinned.items())
        raise ConfigError(
            f"model.name = {config.model.name!r}: no channel group can be sliced ({why}); "
            f"choose another model or {config.strategy.name}.keep=1.0"
        )
    return made


def make_strategy(config: Config, work: Workload) -> SubmodelStrategy:
    """Return the server half of the chosen method."""
    return STRATEGIES[config.strategy.name].server(
        work.channels,
        config.federation,
        config.method,
        seed=config.run.seed,
        score_shape=work.score_shape,
        privacy=config.privacy,
    )


@functools.lru_cache(maxsize=2)
def _workload(options: DataOptions, model_name: str, seed: int) -> Workload:
    own = options.name == folder.NAME
    data = folder.data_set(options.agreement()) if own else load(options.name)
    with seeded(seed, "initial weights"):
        model = build(model_name, data.shape, len(data.classes))
    inputs = example(model_name, data.shape)
    return Workload(data, model, trace(model, inputs), inputs)


def client_ids(clients: int) -> list[str]:
    """Return the names of simulated clients, in the order of their shares."""
    digits = max(2, len(str(clients - 1)))
    return [f"client-{index:0{digits}d}" for index in range(clients)]


@functools.lru_cache(maxsize=2)
def split(data_name: str, options: PartitionOptions, clients: int) -> tuple[np.ndarray, ...]:
    """Return the training rows of every client."""
    return tuple(partition(load(data_name).train, options, clients))


def client_share(config: Config, index: int) -> tuple[Samples, Samples]:
    """Return the training and the test share of client ``index``."""
    return _client_share(config.data.name, config.partition, config.federation.clients, index)


@functools.lru_cache(maxsize=128)
def _client_share(
    data_name: str, options: PartitionOptions, clients: int, index: int
) -> tuple[Samples, Samples]:
    samples = load(data_name).train
    train, test = local_split(samples, split(data_name, options, clients)[index], options, index)
    return samples.take(train), samples.take(test)


def device(config: Config) -> torch.device:
    """Return where to compute.

    Raises
    ------
    ConfigError
        CUDA is asked for and there is none, or it lacks the precision that is asked for.
    """
    found = torch.cuda.is_available()
    if config.run.device == "cuda" and not found:
        raise ConfigError("run.device = 'cuda': no CUDA device is visible; use 'auto' or 'cpu'")
    if not found or config.run.device == "cpu":
        return torch.device("cpu")
    if config.run.autocast == "bf16" and not torch.cuda.is_bf16_supported(
        False
    ):  # emulated is none
        raise ConfigError("run.autocast = 'bf16': this CUDA device has no bfloat16; use 'fp16'")
    return torch.device("cuda")


def prepare(config: Config) -> None:
    """Set this process up as the options say: threads, deterministic algorithms."""
    torch.set_num_threads(config.run.threads)
    make_deterministic(config.run.deterministic)
