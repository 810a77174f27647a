"""The ClientApp: a thin shell that hands a job to the client half of the chosen method."""

import logging
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.supercore import log

from fedsparse_app.capacity import with_capacity
from fedsparse_app.config import Config, read
from fedsparse_app.packing import packing_mod
from fedsparse_app.shares import served, tell_skipped
from fedsparse_app.state import ClientState, state_root
from fedsparse_app.workload import device, prepare, workload
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
from strategies.rounds import check_job
from task.errors import DataError

__all__ = ["app", "introductions"]

CLIENT_RAISED = 2
"""Flower's error code for an exception in the client app."""

app = ClientApp(mods=[packing_mod])


@app.query()
def hello(message: Message, context: Context) -> Message:
    """Introduce the clients that this node serves."""
    node = context.node_config
    return _reply(message, context, lambda config: encode_hellos(introductions(config, node)))


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
        prepare(config)
        return Message(answer(config), reply_to=message)
    except Exception as error:
        log(logging.ERROR, "client failed:\n%s", traceback.format_exc())
        reason = f"{type(error).__name__}: {error}"
        return Message(Error(CLIENT_RAISED, reason), reply_to=message)


def introductions(config: Config, node: Mapping[str, Any]) -> list[Hello]:
    """Return the introductions of the clients that a node with this node config serves."""
    device(config)  # an impossible device is refused before round 1
    data, hellos = workload(config).data, []
    for name, load in served(config, node).items():
        try:
            share = load()
        except DataError as error:
            hellos.append(Hello(name, {}, refusal=str(error)))
            continue
        tell_skipped(name, share.skipped)
        hello = share.hello(name, data)
        if config.privacy.on:  # tells nothing of the data
            hello = Hello(name, dict.fromkeys(data.domains, 1))
        hellos.append(with_capacity(hello, node, config))
    return hellos


def _client(config: Config, message: Message, context: Context) -> tuple[ClientHalf, Job]:
    """Return the client half that a message is for, and its job."""
    work = workload(config)
    job = decode_job(message.content, work.channels)
    check_job(job, work.model.state_dict(), work.channels)
    mine = served(config, context.node_config)
    if job.client not in mine:
        raise ValueError(f"{job.client} is not served by this node, which has {sorted(mine)}")
    place = device(config)
    share = mine[job.client]()
    me = Participant(
        id=job.client,
        model=work.model,
        channels=work.channels,
        train=share.train.to(place),
        test=share.test.to(place),
        score_shape=work.score_shape,
        training=config.train,
        seed=config.run.seed,
        memory=ClientState(_state_root(config, context), job.client),
        costs=work.costs,
        device=place,
        autocast=config.run.autocast,
        privacy=config.privacy,
    )
    return STRATEGIES[config.strategy.name].client(me, config.method), job


def _state_root(config: Config, context: Context) -> Path:
    """Return where clients of this node keep their own arrays."""
    chosen = context.node_config.get("state-dir") or config.run.state_dir
    return state_root(config.run_folder(context.run_id), str(chosen))
