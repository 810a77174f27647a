"""The ServerApp: options in, run folder out."""

import json
from contextlib import ExitStack
from dataclasses import replace
from logging import ERROR, INFO, WARNING
from pathlib import Path
from typing import cast

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.supercore import log

from fedsparse_app.checkpoint import Checkpoint
from fedsparse_app.config import Config, read
from fedsparse_app.files import write_atomically
from fedsparse_app.packing import PackingGrid
from fedsparse_app.recorder import Recorder
from fedsparse_app.resume import open_folder, resumed
from fedsparse_app.shares import attended, with_test_set
from fedsparse_app.state import ClientState
from fedsparse_app.workload import Workload, client_ids, make_strategy, prepare, split, workload
from task.data.folder import NAME as FOLDER
from task.data.partition import counts

__all__ = ["app"]

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run the experiment that the run config describes."""
    with ExitStack() as until_the_end:
        try:
            config = attended(read(context.run_config))
            prepare(config)
            work = with_test_set(workload(config), config)
            partition = _partition(config, work)
            folder = until_the_end.enter_context(open_folder(config, context.run_id))
            begun = _begun(config, folder, work, partition)
        except ValueError as error:
            log(ERROR, "%s: %s", type(error).__name__, error)
            raise
        log(INFO, "run folder: %s", folder)
        if partition is not None:
            write_atomically(folder / "partition.json", json.dumps(partition).encode())
        # The folder's config.toml is of the run, not of one of the processes that it took.
        _run(grid, replace(config, run=replace(config.run, resume="")), work, folder, begun)


def _begun(
    config: Config, folder: Path, work: Workload, partition: dict[str, object] | None
) -> Checkpoint | None:
    """Return where the run goes on, or None for a new one."""
    if not config.run.resume:
        return None
    return resumed(config, folder, work.model.state_dict(), partition)


def _run(
    grid: Grid, config: Config, work: Workload, folder: Path, begun: Checkpoint | None
) -> None:
    strategy = make_strategy(config, work)
    strategy.summary()
    if config.privacy.on:
        sampled = config.federation.sampled(config.federation.clients)
        for line in strategy.ledger.lines(config.run.rounds, sampled):
            log(INFO, "%s", line)
    recorder = Recorder(folder, config, work, strategy)
    strategy.on_round = recorder
    strategy.store = lambda client: ClientState(folder / "histories", client)
    state = work.model.state_dict()
    if begun is not None:
        strategy.resume(begun.round, begun.memory, begun.clients, begun.starved)
        strategy.ledger.recall(begun.ledger)
        recorder.resume(begun)
        state = {name: begun.model[name] for name in state}
    packing = cast(Grid, PackingGrid(grid))
    strategy.start(packing, ArrayRecord(state), config.run.rounds, config.federation.timeout)
    recorder.close()
    _report(recorder)
    log(INFO, "run folder: %s", folder)


def _partition(config: Config, work: Workload) -> dict[str, object] | None:
    """Split the data now, so that an impossible split is known before round 1.

    None where only the clients can say what they hold: the recorder writes down what they say.
    """
    if config.data.name == FOLDER:
        return None
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
