"""What SIGTERM, SIGHUP and Ctrl-C do while something must be cleaned up afterwards."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

__all__ = ["ignoring_signals", "leaving_on_signals"]

SIGNALS = (signal.SIGTERM, signal.SIGHUP)

Handler = Callable[[int, FrameType | None], None] | signal.Handlers


@contextmanager
def leaving_on_signals() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into an exit that runs the ``finally`` blocks, as Ctrl-C does."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    with _handlers(dict.fromkeys(SIGNALS, leave)):
        yield


@contextmanager
def ignoring_signals() -> Iterator[None]:
    """Let a second signal not interrupt the cleaning up."""
    with _handlers(dict.fromkeys((signal.SIGINT, *SIGNALS), signal.SIG_IGN)):
        yield


@contextmanager
def _handlers(handlers: Mapping[signal.Signals, Handler]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only it receives signals
        return
    before = {number: signal.signal(number, new) for number, new in handlers.items()}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
