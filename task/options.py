"""Options as frozen dataclasses that check themselves.

A field says what it accepts in its type: ``Literal["layer", "global"]`` or
``Annotated[float, Interval(0, 1, open_low=True)]``.
"""

import math
from collections.abc import Iterator
from dataclasses import Field, dataclass, fields
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

__all__ = ["Interval", "check_options", "field_types"]


@dataclass(frozen=True)
class Interval:
    """The numbers from ``low`` to ``high``, ends included unless said open."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        above = value > self.low if self.open_low else value >= self.low
        below = value < self.high if self.open_high else value <= self.high
        return above and below

    def __str__(self) -> str:
        if self.high == math.inf:
            finite = " and finite" if self.open_high else ""
            return f"{'>' if self.open_low else '>='} {self.low:g}{finite}"
        left, right = "(" if self.open_low else "[", ")" if self.open_high else "]"
        return f"in {left}{self.low:g}, {self.high:g}{right}"


def field_types(cls: type) -> Iterator[tuple[Field[Any], type, tuple[Any, ...], Interval | None]]:
    """Yield (field, plain type, choices or (), interval or None) of an options class."""
    hints = get_type_hints(cls, include_extras=True)
    for field in fields(cls):
        hint, interval = hints[field.name], None
        if get_origin(hint) is Annotated:
            hint, interval = get_args(hint)[:2]
        choices = get_args(hint) if get_origin(hint) is Literal else ()
        yield field, str if choices else hint, choices, interval


def check_options(options: Any) -> None:
    """Check every field of ``options`` against its type.

    Raises
    ------
    ValueError
        Naming the field, the value found and what is accepted.
    """
    for field, kind, choices, interval in field_types(type(options)):
        name, value = field.name.replace("_", "-"), getattr(options, field.name)
        fits = isinstance(value, (int, float) if kind is float else kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise ValueError(f"{name} = {value!r}: must be {_article(kind)}")
        if choices and value not in choices:
            raise ValueError(f"{name} = {value!r}: must be one of {', '.join(choices)}")
        if interval is not None and value not in interval:
            raise ValueError(f"{name} = {value!r}: must be {interval}")


def _article(kind: type) -> str:
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}[kind]
