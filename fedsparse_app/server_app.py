"""The ServerApp: options in, run folder out."""

import json
from logging import ERROR, INFO, WARNING

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log

from fedsparse_app.config import Config, read
from fedsparse_app.files import write_atomically
from fedsparse_app.recorder import Recorder
from fedsparse_app.state import ClientState
from fedsparse_app.workload import Workload, client_ids, split, workload
from strategies import STRATEGIES
from strategies.base import SubmodelStrategy
from task.data.partition import counts

__all__ = ["app", "make_strategy"]

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run config describes."""
    try:
        config = read(context.run_config)
        torch.set_num_threads(config.run.threads)
        work = workload(config)
        partition = _partition(config, work)
    except ValueError as error:
        log(ERROR, "%s: %s", type(error).__name__, error)
        raise
    folder = config.run_folder(context.run_id)
    log(INFO, "run folder: %s", folder)
    strategy = make_strategy(config, work)
    strategy.summary()
    if config.privacy.on:
        sampled = config.federation.sampled(config.federation.clients)
        for line in strategy.ledger.lines(config.run.rounds, sampled):
            log(INFO, "%s", line)
    recorder = Recorder(folder, config, work, strategy)
    write_atomically(folder / "partition.json", json.dumps(partition).encode())
    strategy.on_round = recorder
    strategy.store = lambda client: ClientState(folder / "histories", client)
    strategy.start(
        grid,
        ArrayRecord(work.model.state_dict()),
        config.run.rounds,
        config.federation.timeout,
    )
    recorder.close()
    _report(recorder)
    log(INFO, "run folder: %s", folder)


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


def _partition(config: Config, work: Workload) -> dict[str, object]:
    """Split the data now, so that an impossible split is known before round 1."""
    shares = split(config.data.name, config.partition, config.federation.clients)
    data, names = work.data, client_ids(config.federation.clients)
    return {
        "domains": data.domains,
        "classes": data.classes,
        "clients": {
            name: counts(data.train, index, data.domains, data.classes)
            for name, index in zip(names, shares, strict=True)
        },
    }


def _report(recorder: Recorder) -> None:
    """Write report.md and the plots; a run is not lost for want of a picture."""
    try:
        from fedsparse_app.report import write_report

        write_report(recorder.folder)
    except Exception as error:
        log(WARNING, "no report: %s: %s", type(error).__name__, error)
