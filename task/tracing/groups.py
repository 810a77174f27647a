"""From equalities to groups: connected labels are channels, channels of the same places a group."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from task.channels import FIXED, Axis, ChannelMap, GatePoint
from task.tracing.labels import STAYS, Labels, Ledger

__all__ = ["build"]

Ints = NDArray[np.int64]
WRITERS = ("out", "depthwise")


def build(ledger: Ledger, inexact: bool = False) -> ChannelMap:
    """Turn what one run told into a channel map.

    Parameters
    ----------
    ledger : Ledger
        Equalities, pins, roles and places for gates.
    inexact : bool
        Keep groups for which slicing is not zeroing.

    Returns
    -------
    ChannelMap
        Everything that is connected to a pin is in `pinned` instead of `groups`.
    """
    channels = _Channels(ledger, inexact)
    gates = channels.find_gates()
    channels.pin_unread(gates)
    groups, group, channel = channels.number()

    def pairs(labels: Ints) -> tuple[NDArray[np.int32], Ints]:
        return group[channels.of[labels]], channel[channels.of[labels]]

    def axis(labels: Labels, default: str) -> Axis | None:
        if labels is None or (group[channels.of[labels]] == FIXED).all():
            return None
        return Axis(*pairs(labels), ledger.role_of(labels) or default)

    axes = {
        name: tuple(
            axis(labels, _usual_role(len(value.axes), d)) for d, labels in enumerate(value.axes)
        )
        for name, value in ledger.state.items()
    }
    points = [GatePoint(module, d, *pairs(labels)) for (module, d), labels in gates.items()]
    points = [point for point in points if (point.group != FIXED).any()]
    exact = dict.fromkeys(groups, True)
    names = list(groups)
    for number in set(group[channels.doubted].tolist()) - {FIXED}:
        exact[names[number]] = False
    return ChannelMap(groups, axes, tuple(points), exact, channels.report())


def _usual_role(rank: int, axis: int) -> str:
    """Role of a parameter that no rule named, for instance one used through a mask."""
    return "bias" if rank == 1 else ("out", "in")[min(axis, 1)]


class _Channels:
    """Connected atoms, each either free or pinned for a reason.

    Attributes
    ----------
    of : (atoms,) channel of each atom
    doubted : (channels,) True where dropping is not the same as zeroing
    why : (channels,) index into `reasons`, -1 for a free channel
    """

    def __init__(self, ledger: Ledger, inexact: bool) -> None:
        self.ledger = ledger
        first = np.concatenate([np.zeros(0, np.int64), *(a for a, _ in ledger.ties)])
        second = np.concatenate([np.zeros(0, np.int64), *(b for _, b in ledger.ties)])
        edges = coo_array((np.ones(len(first), np.int8), (first, second)), (ledger.size,) * 2)
        self.count, self.of = connected_components(edges, directed=False)
        self.why = np.full(self.count, -1, np.int64)
        self.reasons: list[str] = []
        self.doubted = np.zeros(self.count, np.bool_)
        # The first reason is the one that is shown: from what users can see to what they cannot.
        for atoms in ledger.ends:
            self.pin(atoms, "gives the outputs of the network")
        for atoms, reason in ledger.doubts:
            self.doubted[self.of[atoms]] = True
            if not inexact:
                self.pin(atoms, reason)
        for atoms, reason in sorted(ledger.pins, key=lambda pin: not pin[1]):
            self.pin(atoms, reason)
        self.pin(np.array([STAYS]), "are joined to padding, which stays")

    def pin(self, atoms: Labels, reason: str) -> None:
        """Keep the channels of these atoms whole, unless they are already."""
        if atoms is not None:
            channels = self.of[atoms]
            self.why[channels[self.why[channels] == -1]] = len(self.reasons)
            self.reasons.append(reason)

    def find_gates(self) -> dict[tuple[str, int], Ints]:
        """Find module outputs to gate, (module, axis) -> labels; pin channels without one."""
        found: dict[tuple[str, int], Ints] = {}
        for site in self.ledger.sites:
            if not site.required:
                continue
            source = f"the result of {site.cause}" if site.cause else "it"
            if site.hidden or site.output is None:
                why = f"cannot be gated: {source} is read inside {site.module or 'the network'!r}"
                self._pin_all(site.axes, f"{why} before a module returns it; wrap it in a module")
                continue
            calls = self.ledger.outputs[site.module]
            if site.output[:1] != (None,) or any(not self._same(site.output, c) for c in calls):
                why = f"cannot be gated: module {site.module!r} runs several times"
                self._pin_all(site.output, f"{why} on different channels; use one module per place")
                continue
            for axis, labels in enumerate(site.output):
                if labels is not None:
                    found[site.module, axis] = labels
        return found

    def _pin_all(self, axes: tuple[Labels, ...], reason: str) -> None:
        for labels in axes:
            self.pin(labels, reason)

    def _same(self, first: tuple[Labels, ...], second: tuple[Labels, ...]) -> bool:
        """Tell whether two outputs carry the same channels on the same axes."""
        if len(first) != len(second):
            return False
        for a, b in zip(first, second, strict=True):
            if (a is None) != (b is None):
                return False
            if a is not None and b is not None and not np.array_equal(self.of[a], self.of[b]):
                return False
        return True

    def pin_unread(self, gates: dict[tuple[str, int], Ints]) -> None:
        """Pin channels without a gate: nothing reads them, or they belong to no layer at all."""
        gated = np.zeros(self.count, np.bool_)
        for labels in gates.values():
            gated[self.of[labels]] = True
        everything = np.arange(self.ledger.size)
        self.pin(everything[~gated[self.of]], "is not read by any layer")

    def number(self) -> tuple[dict[str, int], NDArray[np.int32], Ints]:
        """Group free channels that touch the same axes of the same tensors.

        Returns
        -------
        groups : name -> width
        group, channel : (channels,) — number of the group or -1, and place inside it
        """
        group = np.full(self.count, FIXED, np.int32)
        channel = np.zeros(self.count, np.int64)
        groups: dict[str, int] = {}
        signature = self._signatures()
        order = [*self._in_order(WRITERS), *self._in_order(())]
        for place in order:
            atoms = self.ledger.atoms(place)
            members, first = np.unique(self.of[atoms], return_index=True)
            members = members[np.argsort(first)]
            members = members[(self.why[members] == -1) & (group[members] == FIXED)]
            while len(members):
                same = signature[members] == signature[members[0]]
                group[members[same]] = len(groups)
                channel[members[same]] = np.arange(same.sum())
                groups[_new_name(self.ledger.owners[place][0], groups)] = int(same.sum())
                members = members[~same]
        return groups, group, channel

    def _in_order(self, roles: tuple[str, ...]) -> list[int]:
        """Axes of parameters with one of these roles (any if none is given) as they were used."""
        place = {owner: k for k, owner in enumerate(self.ledger.owners)}
        return [
            place[owner] for owner, role in self.ledger.roles.items() if not roles or role in roles
        ]

    def _signatures(self) -> NDArray[np.uint64]:
        """Give each channel a number that is equal for channels on the same axes."""
        starts = np.array([*self.ledger.starts, self.ledger.size])
        place = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
        pairs = np.unique(self.of[1:].astype(np.int64) * len(starts) + place)
        words = np.random.default_rng(0).integers(0, 2**63, len(starts), dtype=np.uint64)
        signature = np.zeros(self.count, np.uint64)
        np.add.at(signature, pairs // len(starts), words[pairs % len(starts)])
        return signature

    def report(self) -> dict[str, str]:
        """Writers that are not groups, operations without a rule, tensors that are not used."""
        pinned = dict(self.ledger.whole)
        for place in self._in_order(WRITERS):
            tensor, why = self.ledger.owners[place][0], self.why[self.of[self.ledger.atoms(place)]]
            if (why >= 0).any() and tensor.rpartition(".")[0] not in self.ledger.whole:
                reason = self.reasons[why[why >= 0][0]] or "has a fixed size"
                part = "" if (why >= 0).all() else "some of its channels "
                pinned[_layer(tensor)] = part + reason
        for operation, tensors in self.ledger.unknown.items():
            pinned[operation] = (
                f"has no rule in the trace; keeps whole: {', '.join(sorted(tensors))}"
            )
        for name, value in self.ledger.state.items():
            if value.axes and name in self.ledger.idle:
                pinned[name] = "is not used when the network runs"
        return pinned


def _layer(tensor: str) -> str:
    return tensor.removesuffix(".weight")


def _new_name(tensor: str, taken: dict[str, int]) -> str:
    """Name of the layer; a second kind of channels of the same layer gets a number."""
    name, number = _layer(tensor), 2
    while name in taken:
        name, number = f"{_layer(tensor)}#{number}", number + 1
    return name
