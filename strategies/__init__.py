"""Methods of federated learning with submodels: one paper, one file, both halves together."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from strategies.base import SubmodelStrategy
from strategies.fedavg import FedAvg, FedAvgClient, FedAvgOptions
from strategies.federation import FederationOptions
from strategies.fedfip import FedFIP, FedFIPClient, FedFIPOptions
from strategies.local import ClientHalf
from strategies.privacy import PrivacyOptions
from strategies.subflot import SubFLOT, SubFLOTClient, SubFLOTOptions

__all__ = [
    "STRATEGIES",
    "FedAvg",
    "FedAvgClient",
    "FedAvgOptions",
    "FedFIP",
    "FedFIPClient",
    "FedFIPOptions",
    "FederationOptions",
    "Method",
    "PrivacyOptions",
    "SubFLOT",
    "SubFLOTClient",
    "SubFLOTOptions",
    "SubmodelStrategy",
]


@dataclass(frozen=True)
class Method:
    """A method: its two halves and its options."""

    server: type[SubmodelStrategy]
    client: Callable[..., ClientHalf]
    options: type[Any]


STRATEGIES: dict[str, Method] = {
    "fedavg": Method(FedAvg, FedAvgClient, FedAvgOptions),
    "fedfip": Method(FedFIP, FedFIPClient, FedFIPOptions),
    "subflot": Method(SubFLOT, SubFLOTClient, SubFLOTOptions),
}
