"""How a client introduces itself, and what can be wrong with that."""

import json
from dataclasses import dataclass, field

__all__ = ["Hello", "read_hello"]


@dataclass(frozen=True)
class Hello:
    """A client introduces itself.

    Parameters
    ----------
    client : str
        Stable name; state is keyed by it, never by Flower's node id.
    domains : dict of str to int
        Samples per domain.
    keep : float or None
        Fraction of width that the device can carry, 1.0 = the dense network; None = not said.
    trained : int or None
        Samples that it trains on; None = not said.
    speed : float or None
        Training FLOPs per second, as measured on the device; None = not measured.
    refusal : str
        Why this client cannot take part; empty if it can.
    classes : list of int
        Samples of each class; empty = not said.
    skipped : int
        Files of its data that it cannot read.
    """

    client: str
    domains: dict[str, int]
    keep: float | None = None
    trained: int | None = None
    speed: float | None = None
    refusal: str = ""
    classes: list[int] = field(default_factory=list)
    skipped: int = 0


def read_hello(text: str) -> Hello:
    """Read the introduction of one client, as JSON.

    Raises
    ------
    TypeError, ValueError
        A field is unknown, missing, of another type or out of range.
    """
    hello = Hello(**json.loads(text))
    counts = hello.domains.items() if isinstance(hello.domains, dict) else [(None, None)]
    if not isinstance(hello.client, str) or not all(
        isinstance(domain, str) and isinstance(n, int) and n > 0 for domain, n in counts
    ):
        raise TypeError(f"client {hello.client!r}, domains {hello.domains!r}")
    if hello.keep is not None and not 0 < float(hello.keep) <= 1:
        raise ValueError(f"keep {hello.keep!r} of {hello.client} is not in (0, 1]")
    for name in ("trained", "speed"):
        value = getattr(hello, name)
        if value is not None and not 0 < float(value) < float("inf"):
            raise ValueError(f"{name} {value!r} of {hello.client} is not positive and finite")
    if not isinstance(hello.refusal, str):
        raise TypeError(f"refusal {hello.refusal!r} of {hello.client} is not a text")
    if not isinstance(hello.classes, list) or not all(
        type(n) is int and n >= 0 for n in (*hello.classes, hello.skipped)
    ):
        raise TypeError(
            f"classes {hello.classes!r}, skipped {hello.skipped!r} of {hello.client} are no counts"
        )
    return hello
