"""How a client introduces itself, and what of it the server believes."""

import json
import math
import re
from dataclasses import asdict, dataclass, field

from flwr.app import ConfigRecord, RecordDict

from strategies.errors import ShapeError

__all__ = [
    "MOST_SAMPLES",
    "Hello",
    "check_client_id",
    "decode_hellos",
    "encode_hellos",
    "read_hello",
]

LONGEST_HELLO = 2**16
"""Characters of one introduction."""
MOST_SAMPLES = 10**9
"""Of one client and domain: sums of counts stay far from overflow."""


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


def encode_hellos(hellos: list[Hello]) -> RecordDict:
    """Write the introductions of every client that a node serves."""
    return RecordDict({"hello": ConfigRecord({"clients": [json.dumps(asdict(h)) for h in hellos]})})


def decode_hellos(content: RecordDict, most: int) -> list[Hello]:
    """Read the introductions of at most ``most`` clients.

    Raises
    ------
    ShapeError
        A field is missing or of another type, a client is there twice, or there are too many.
    """
    try:
        texts = content.config_records["hello"]["clients"]
        if not isinstance(texts, list):
            raise TypeError(f"clients is a {type(texts).__name__}, not a list")
        if len(texts) > most:
            raise ValueError(f"{len(texts)} clients on one node, federation.clients is {most}")
        hellos = [read_hello(text) for text in texts]
        if len({hello.client for hello in hellos}) < len(hellos):
            raise ValueError("the same client twice on one node")
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ShapeError(
            f"hello: not an introduction ({error}); same version everywhere?"
        ) from None
    return hellos


def read_hello(text: object) -> Hello:
    """Read the introduction of one client, as JSON.

    Raises
    ------
    TypeError, ValueError
        A field is unknown, missing, of another type or out of range.
    """
    if not isinstance(text, str) or len(text) > LONGEST_HELLO:
        raise TypeError(f"a client's introduction is a text of at most {LONGEST_HELLO} characters")
    hello = Hello(**json.loads(text))
    check_client_id(hello.client)
    if not isinstance(hello.domains, dict) or not all(
        type(n) is int and 0 < n <= MOST_SAMPLES for n in hello.domains.values()
    ):
        raise TypeError(f"domains {hello.domains!r} of {hello.client} are not samples per domain")
    _check_number(hello, "keep", 1)
    _check_number(hello, "trained", MOST_SAMPLES)
    _check_number(hello, "speed", math.inf)
    if not isinstance(hello.refusal, str):
        raise TypeError(f"refusal {hello.refusal!r} of {hello.client} is not a text")
    if not isinstance(hello.classes, list) or not all(
        type(n) is int and n >= 0 for n in (*hello.classes, hello.skipped)
    ):
        raise TypeError(
            f"classes {hello.classes!r}, skipped {hello.skipped!r} of {hello.client} are no counts"
        )
    return hello


def _check_number(hello: Hello, name: str, most: float) -> None:
    value = getattr(hello, name)
    if value is None:
        return
    if type(value) not in (int, float) or not 0 < value <= most or math.isinf(value):
        raise ValueError(f"{name} {value!r} of {hello.client} is not in (0, {most:g}]")


def check_client_id(client: object) -> None:
    """Refuse what cannot be the name of a client, and of its folder.

    Raises
    ------
    ValueError
        Not up to 64 letters, digits, dots, underscores or hyphens.
    """
    if not isinstance(client, str) or not re.fullmatch(r"[\w][\w.-]{0,63}", client):
        raise ValueError(f"client id {client!r}: use up to 64 letters, digits, '.', '_' or '-'")
