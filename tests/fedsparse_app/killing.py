"""Runs that are killed with SIGKILL, each in a process forked from this one.

``python -m tests.fedsparse_app.killing OUT`` leaves ``OUT/<method>/<how>/<run folder>``, all ended:
``whole`` never stopped, ``killed`` at some of its writes, ``killed-from-outside`` at any time.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
from functools import partial
from pathlib import Path

import torch

from fedsparse_app import cli, inprocess, server_app
from fedsparse_app.config import read
from fedsparse_app.workload import workload
from tests.fedsparse_app import toy

KILLED = -signal.SIGKILL
KILLS = 3  # of each run


def main(out):
    torch.set_num_threads(1)  # a thread pool does not survive a fork
    toy.install()
    server_app._report = lambda recorder: None
    for method in toy.METHODS:  # built once, and there in every fork
        config = read(toy.options(method, out))
        work = workload(config)
        work.costs(work.model)
        server_app._partition(config, work)
    for method in toy.METHODS:
        in_writes(method, out / method)
    from_outside("fedfip", out / "fedfip" / "killed-from-outside")


def in_writes(method, out):
    """Kill a run at seeded writes, go on each time, and let the last attempt end."""
    expect(0, forked(lambda: inprocess.run(toy.options(method, out / "whole"))))
    draw, options = random.Random(method), toy.options(method, out / "killed")
    for _ in range(KILLS):
        # A start and a round are 4 to 7 and 6 to 10 writes; one round makes it a run.
        at, torn = draw.randint(8, 18), draw.randint(0, 60)
        expect(KILLED, forked(partial(inprocess.run, dict(options)), at, torn))
        (folder,) = (out / "killed").iterdir()
        options |= {"run.resume": str(folder)}
    expect(0, forked(lambda: inprocess.run(options)))


def from_outside(method, out):
    """Kill ``fedsparse run`` while it computes, and go on with ``fedsparse run --resume``."""
    typed = " ".join(f"{k}={json.dumps(v)}" for k, v in toy.options(method, out).items())
    child = begin(lambda: cli.app(["run", "--in-process", "-c", typed]))
    while not list(out.glob("*/metrics.jsonl")):
        if os.waitpid(child, os.WNOHANG)[0]:
            raise RuntimeError("ended before it could be killed")
        time.sleep(0.01)
    (metrics,) = out.glob("*/metrics.jsonl")
    while metrics.read_bytes().count(b"\n") < 3:
        time.sleep(0.001)
    time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    expect(KILLED, end(child))
    typed = ["run", "--in-process", "--resume", str(metrics.parent)]
    expect(0, forked(lambda: cli.app(typed)))


def forked(work, at=None, torn=0):
    return end(begin(work, at, torn))


def begin(work, at=None, torn=0):
    """Do ``work`` in a fork that dies at its ``at``-th write, of which ``torn`` bytes are lost."""
    child = os.fork()
    if child:
        return child
    os.dup2(2, 1)
    if at is not None:
        die_at(at, torn)
    try:
        work()
    except SystemExit as left:
        os._exit(left.code or 0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def die_at(at, torn):
    """Replace fsync, which every write ends in, by one that counts and kills."""
    sync, seen = os.fsync, iter(range(1, 10**6))

    def fsync(file):
        if next(seen) == at:
            os.ftruncate(file, max(0, os.fstat(file).st_size - torn))
            os.kill(os.getpid(), signal.SIGKILL)
        sync(file)

    os.fsync = fsync


def end(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def expect(wanted, found):
    if wanted != found:
        raise RuntimeError(f"ended with {found}, not {wanted}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
