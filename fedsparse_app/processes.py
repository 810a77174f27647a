"""The processes of a session, found and ended.

A process can leave its parent and its process group, but not be forgotten by its session unless
it opens another one; so what a server started is found by session also after the server is gone.
"""

import os
import signal
import subprocess
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["end_sessions", "members", "sessions_below"]


def sessions_below(pid: int) -> set[int]:
    """Return the sessions of a process's descendants and its own, without the caller's."""
    table = list(_processes())
    family = {pid}
    while more := {child for child, parent in table if parent in family} - family:
        family |= more
    return {session for one in family if (session := _session(one))} - {os.getsid(0)}


def members(sessions: Collection[int]) -> set[int]:
    """Return the living processes of some sessions."""
    return {pid for pid, _ in _processes() if _session(pid) in sessions}


def end_sessions(sessions: Collection[int], within: float) -> None:
    """Ask every process of some sessions to end, and kill those that have not after a while.

    Parameters
    ----------
    sessions : set of int
        Session ids; the caller's own session is left alone.
    within : float, seconds
        Between asking and killing.
    """
    sessions = set(sessions) - {os.getsid(0)}
    _signal(members(sessions), signal.SIGTERM)
    deadline = time.monotonic() + within
    while (left := members(sessions)) and time.monotonic() < deadline:
        time.sleep(0.05)
    while left:  # a process may have started another one meanwhile
        _signal(left, signal.SIGKILL)
        time.sleep(0.05)
        left = members(sessions)


def _signal(pids: Collection[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _session(pid: int) -> int | None:
    with suppress(ProcessLookupError, PermissionError):
        return os.getsid(pid)
    return None


def _processes() -> Iterator[tuple[int, int]]:
    """Yield (process, parent) of everything alive; zombies are not."""
    proc = Path("/proc")
    if (proc / "self" / "stat").exists():
        for folder in proc.iterdir():
            if folder.name.isdigit():
                with suppress(OSError):  # it ended while we looked
                    # the name in parentheses may hold spaces and parentheses itself
                    fields = (folder / "stat").read_text("latin-1").rpartition(")")[2].split()
                    if fields[0] not in "ZX":
                        yield int(folder.name), int(fields[1])
        return
    # no /proc (macOS)
    listing = subprocess.run(["ps", "-axo", "pid=,ppid=,stat="], capture_output=True, text=True)
    for line in listing.stdout.splitlines():
        pid, parent, state = line.split()
        if not state.startswith("Z"):
            yield int(pid), int(parent)
