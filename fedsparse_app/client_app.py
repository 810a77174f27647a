"""The ClientApp: a thin shell that hands a job to the client half of the chosen method."""

import logging
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore import log

from fedsparse_app.config import Config, read
from fedsparse_app.errors import ConfigError
from fedsparse_app.state import ClientState
from fedsparse_app.workload import client_ids, client_share, device, split, workload
from strategies import STRATEGIES
from strategies.local import ClientHalf, Participant
from strategies.records import (
    Hello,
    Job,
    decode_job,
    encode_hellos,
    encode_scores,
    encode_update,
)
from task.data import load

__all__ = ["app"]

CLIENT_RAISED = 2
"""Flower's error code for an exception in the client app."""

app = ClientApp()


@app.query()
def hello(message: Message, context: Context) -> Message:
    """Introduce the clients that this node serves."""
    return _reply(message, context, lambda config: encode_hellos(_introductions(config, context)))


@app.train()
def train(message: Message, context: Context) -> Message:
    """Train one client's submodel."""

    def answer(config: Config) -> RecordDict:
        half, job = _client(config, message, context)
        return encode_update(half.train(job))

    return _reply(message, context, answer)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Score a network on one client's own test share."""

    def answer(config: Config) -> RecordDict:
        half, job = _client(config, message, context)
        return encode_scores(half.evaluate(job))

    return _reply(message, context, answer)


def _reply(message: Message, context: Context, answer: Callable[[Config], RecordDict]) -> Message:
    """Answer, or say in one line why not: a failing client costs its own reply alone."""
    try:
        config = read(context.run_config)
        torch.set_num_threads(config.run.threads)
        return Message(answer(config), reply_to=message)
    except Exception as error:
        log(logging.ERROR, "client failed:\n%s", traceback.format_exc())
        reason = f"{type(error).__name__}: {error}"
        return Message(Error(CLIENT_RAISED, reason), reply_to=message)


def _served(config: Config, context: Context) -> dict[str, int]:
    """Return the clients of this node: name -> share of the data.

    Clients are dealt over the nodes, so that any number of simulated SuperNodes serves them all.
    """
    clients, node = config.federation.clients, context.node_config
    if "partition-id" not in node:
        raise ConfigError(
            "node config has no partition-id, the share of the data that this node holds: start "
            f'flower-supernode with --node-config "partition-id=0 num-partitions={clients}"'
        )
    number = int(node["partition-id"])
    nodes = int(node.get("num-partitions", clients))
    if "client-id" in node:
        return {str(node["client-id"]): number}
    return {name: i for i, name in enumerate(client_ids(clients)) if i % nodes == number}


def _introductions(config: Config, context: Context) -> list[Hello]:
    device(config)  # an impossible device is refused before round 1
    data = load(config.data.name)
    rows = split(config.data.name, config.partition, config.federation.clients)
    hellos = []
    for name, index in _served(config, context).items():
        held = torch.bincount(data.train.domain[rows[index]], minlength=len(data.domains))
        domains = {k: int(n) for k, n in zip(data.domains, held, strict=True) if n}
        if config.privacy.on:
            domains = dict.fromkeys(data.domains, 1)  # tells nothing
        keep = context.node_config.get("keep")
        hellos.append(Hello(name, domains, None if keep is None else float(keep)))
    return hellos


def _client(config: Config, message: Message, context: Context) -> tuple[ClientHalf, Job]:
    """Return the client half that a message is for, and its job."""
    work = workload(config)
    job = decode_job(message.content, work.channels)
    served = _served(config, context)
    if job.client not in served:
        raise ValueError(f"{job.client} is not served by this node, which has {sorted(served)}")
    place = device(config)
    train_share, test_share = client_share(config, served[job.client])
    me = Participant(
        id=job.client,
        model=work.model,
        channels=work.channels,
        train=train_share.to(place),
        test=test_share.to(place),
        score_shape=work.score_shape,
        training=config.train,
        seed=config.run.seed,
        memory=ClientState(_state_root(config, context), job.client),
        costs=work.costs,
        device=place,
        privacy=config.privacy,
    )
    return STRATEGIES[config.strategy.name].client(me, config.method), job


def _state_root(config: Config, context: Context) -> Path:
    """Return where clients of this node keep their own arrays."""
    chosen = context.node_config.get("state-dir") or config.run.state_dir
    folder = config.run_folder(context.run_id)
    return Path(str(chosen)).expanduser() / folder.name if chosen else folder / "clients"
