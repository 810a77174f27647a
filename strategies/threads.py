"""Work of the server on one client after the other, on all cores."""

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["in_threads"]

In = TypeVar("In")
Out = TypeVar("Out")


def in_threads(work: Callable[[In], Out], items: Iterable[In]) -> Iterator[Out]:
    """Yield ``work`` of every item, in order; POT, numpy and torch let other threads run.

    At most one result more than there are cores is held, so that a reader who adds them up needs
    the memory of a few and not of all.
    """
    cores = os.cpu_count() or 1
    waiting: deque[Future[Out]] = deque()
    with ThreadPoolExecutor(cores) as pool:
        for item in items:
            if len(waiting) > cores:
                yield waiting.popleft().result()
            waiting.append(pool.submit(work, item))
        while waiting:
            yield waiting.popleft().result()
