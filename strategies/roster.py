"""Who speaks for whom: clients by name on one side, the nodes that introduce them on the other.

A client belongs to the first node that introduced it for as long as that node lives. Another one
that claims the same name waits; when the first is gone, it is taken for the restarted device.
"""

from collections.abc import Mapping

from strategies.hello import Hello

__all__ = ["Roster"]


class Roster:
    """The clients introduced so far and the node of each.

    Parameters
    ----------
    bind_keys : bool
        A client stays with the key of the node that introduced it first, alive or not.

    Attributes
    ----------
    clients : dict of str to Hello
        Everyone met, also those whose node is gone.
    node : dict of str to int
        Node of each client that can be asked.
    refused : dict of str to str
        Client to the reason why another introduction of it does not count now.
    """

    def __init__(self, bind_keys: bool = False) -> None:
        self.bind_keys = bind_keys
        self.clients: dict[str, Hello] = {}
        self.node: dict[str, int] = {}
        self.refused: dict[str, str] = {}
        self._claims: dict[str, dict[int, Hello]] = {}  # in the order of introduction
        self._key: dict[str, bytes] = {}

    def introduce(self, node: int, hellos: list[Hello]) -> None:
        """Write down what ``node`` says it serves, in place of what it said before."""
        names = {hello.client for hello in hellos}
        for client, claims in self._claims.items():
            if client not in names:
                claims.pop(node, None)
        for hello in hellos:
            self._claims.setdefault(hello.client, {})[node] = hello

    def settle(self, alive: Mapping[int, bytes]) -> None:
        """Give every client a node of those ``alive`` (node id to key), or none."""
        self.refused = {}
        for client, claims in self._claims.items():
            for node in claims.keys() - alive.keys():
                del claims[node]
            nodes = [node for node in claims if self._may(client, alive[node])]
            if len(nodes) < len(claims):
                self.refused[client] = (
                    f"{client} was introduced by a SuperNode with another key than before: "
                    "start it with the key it had, or switch federation.bind-keys off"
                )
            if not nodes:
                self.node.pop(client, None)
                continue
            self.node[client] = nodes[0]
            self.clients[client] = claims[nodes[0]]
            if len(nodes) > 1:
                self.refused[client] = (
                    f"{client} is on two nodes, the first keeps it; give each its own client-id"
                )

    def _may(self, client: str, key: bytes) -> bool:
        return not self.bind_keys or self._key.setdefault(client, key) == key
