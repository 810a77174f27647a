"""What each client holds: its part of the split, or the images in a folder of its own."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from logging import INFO, WARNING
from pathlib import Path
from typing import Any

import numpy as np
from flwr.supercore import log

from fedsparse_app.config import Config
from fedsparse_app.errors import ConfigError
from fedsparse_app.workload import Workload, client_ids, client_share
from strategies.hello import Hello
from task.data import folder
from task.data.dataset import DataSet, Samples
from task.data.partition import counts, local_split
from task.errors import DataError

__all__ = ["TEST", "Share", "attended", "served", "tell_skipped", "with_test_set"]

TEST = "test"
"""The one folder in ``data.dir`` that is no client's."""

Node = Mapping[str, Any]


@dataclass(frozen=True)
class Share:
    """What one client holds: training and test samples, and the files that it cannot read."""

    train: Samples
    test: Samples
    skipped: tuple[str, ...] = ()

    def hello(self, client: str, data: DataSet) -> Hello:
        """Return the introduction of the client that holds this."""
        held = [
            counts(half, np.arange(len(half)), data.domains, data.classes)
            for half in (self.train, self.test)
        ]
        domains = {
            name: sum(half["domains"].get(name, 0) for half in held) for name in data.domains
        }
        classes = [sum(pair) for pair in zip(*(half["classes"] for half in held), strict=True)]
        present = {name: n for name, n in domains.items() if n}
        trained = len(self.train)
        return Hello(client, present, None, trained, classes=classes, skipped=len(self.skipped))


def served(config: Config, node: Node) -> dict[str, Callable[[], Share]]:
    """Return the clients of a node by name, each with what loads its share.

    Clients are dealt over the nodes, so that any number of simulated SuperNodes serves them all.

    Parameters
    ----------
    config : Config
        Options of the run.
    node : mapping
        Node config: with ``data.name="folder"`` its ``data-dir`` and ``client-id``, else, and in
        simulation, ``partition-id``, ``num-partitions`` and perhaps ``client-id``.

    Raises
    ------
    ConfigError
        The node config does not say what the node holds.
    """
    if config.data.name == folder.NAME:
        roots = _roots(config, node)
        return {name: partial(_own, config, name, root) for name, root in roots.items()}
    clients = config.federation.clients
    if "partition-id" not in node:
        raise ConfigError(
            "node config has no partition-id, the share of the data that this node holds: start "
            f'flower-supernode with --node-config "partition-id=0 num-partitions={clients}"'
        )
    numbers = {name: number for number, name in enumerate(client_ids(clients))}
    if "client-id" in node:
        numbers = {str(node["client-id"]): int(node["partition-id"])}
    else:
        numbers = {name: numbers[name] for name in _dealt(list(numbers), node)}
    return {name: partial(_part, config, number) for name, number in numbers.items()}


def attended(config: Config) -> Config:
    """Return the options with the clients that there can be: of ``data.dir`` its folders.

    Raises
    ------
    ConfigError
        ``data.dir`` holds too few clients.
    """
    if config.data.name != folder.NAME or not config.data.dir:
        return config
    if not Path(config.data.dir).expanduser().is_dir():
        return config  # on devices it is for them to say
    there = len(_client_folders(config))
    if there < config.federation.clients:
        log(INFO, "data.dir holds %d client folders: federation.clients = %d", there, there)
    try:
        return replace(config, federation=replace(config.federation, clients=there))
    except ValueError as error:
        raise ConfigError(f"federation.{error}; data.dir = {config.data.dir!r}") from None


def with_test_set(work: Workload, config: Config) -> Workload:
    """Return the workload with the images of ``data.test-dir``, where the server scores on them.

    Raises
    ------
    DataError
        They cannot be used.
    """
    if config.data.name != folder.NAME or config.federation.evaluate_on != "server":
        return work
    root = Path(config.data.test_dir).expanduser()
    try:
        pictures = folder.read(root, config.data.agreement())
    except DataError as error:
        raise DataError(f"data.test-dir: {error}") from None
    tell_skipped("data.test-dir", pictures.skipped)
    return replace(work, data=replace(work.data, test=pictures.samples))


def tell_skipped(owner: str, skipped: Sequence[str]) -> None:
    """Log how many files could not be read, and the first of them."""
    if skipped:
        log(WARNING, "%s: files skipped: %d, the first: %s", owner, len(skipped), skipped[0])


def _roots(config: Config, node: Node) -> dict[str, Path]:
    """Return the folder of every client of the node."""
    if "data-dir" in node and "client-id" in node:
        root = Path(str(node["data-dir"])).expanduser()
        if not root.is_absolute():
            raise ConfigError(f"node config data-dir = {str(root)!r}: must be an absolute path")
        return {str(node["client-id"]): root}
    if "data-dir" in node or not (config.data.dir and {"client-id", "partition-id"} & set(node)):
        raise ConfigError(
            "node config must name the client and the folder with its images: start "
            """flower-supernode with --node-config 'data-dir="/data" client-id="c1"'; """
            "in simulation set data.dir"
        )
    if "client-id" in node:
        name = str(node["client-id"])
        return {name: Path(config.data.dir).expanduser() / name}
    there = {root.name: root for root in _client_folders(config)}
    return {name: there[name] for name in _dealt(list(there), node)}


def _client_folders(config: Config) -> list[Path]:
    """Return the clients' folders in ``data.dir``, as many as ``federation.clients``, by name."""
    place = Path(config.data.dir).expanduser()
    there = [root for root in folder.folders(place) if root.name != TEST]
    if not there:
        raise ConfigError(f"data.dir = {config.data.dir!r}: holds no client's folder")
    return there[: config.federation.clients]


def _dealt(clients: Sequence[str], node: Node) -> Sequence[str]:
    """Return this node's of ``clients``: every n-th, of as many nodes as it says there are."""
    return clients[int(node["partition-id"]) :: int(node.get("num-partitions", len(clients)))]


def _part(config: Config, index: int) -> Share:
    return Share(*client_share(config, index))


def _own(config: Config, client: str, root: Path) -> Share:
    """Read a client's folder; its test samples depend on its name, its files and the seed."""
    pictures = folder.read(root, config.data.agreement())
    samples, least = pictures.samples, config.partition.min_samples
    if len(samples) < least:
        raise DataError(
            f"{root}: {len(samples)} images, partition.min-samples = {least}; "
            "give it more images or the federation a smaller minimum"
        )
    everything, number = np.arange(len(samples)), zlib.crc32(client.encode())
    train, test = local_split(samples, everything, config.partition, number)
    if not len(test):
        raise DataError(f"{root}: one image per domain leaves none to test on")
    return Share(samples.take(train), samples.take(test), pictures.skipped)
