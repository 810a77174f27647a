"""A federation small enough for unit tests: a toy network, three toy domains, the real driver."""

import functools
from dataclasses import replace

import torch
from flwr.app import ArrayRecord, Error, Message
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity
from torch import nn

from fedsparse_app.inprocess import InProcessGrid
from strategies import STRATEGIES, FederationOptions
from strategies.local import Participant
from strategies.memory import InMemory
from strategies.privacy import OFF
from strategies.records import Hello, decode_job, encode_hellos, encode_scores, encode_update
from strategies.rounds import check_job
from task.data.dataset import Samples
from task.seeding import seeded
from task.trace import trace
from task.train import TrainingOptions

DOMAINS, CLASSES = 3, 4


def network():
    with seeded(1, "toy"):
        return nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 12, 3, padding=1, stride=2),
            nn.BatchNorm2d(12),
            nn.ReLU(),
            nn.Flatten(1),
            nn.Linear(12 * 9, CLASSES),
        )


@functools.cache
def channel_map():
    return trace(network(), torch.randn(2, 2, 6, 6), verify=False)


def shares(client, n=26):
    """Two domains per client; a class shows as a bright quadrant, a domain as an offset."""
    draw = torch.Generator().manual_seed(100 + client)
    y = torch.randint(CLASSES, (n,), generator=draw)
    domain = torch.tensor([client % DOMAINS, (client + 1) % DOMAINS])[
        (torch.rand(n, generator=draw) < 0.4).long()
    ]
    x = 0.5 * torch.randn(n, 2, 6, 6, generator=draw) + domain.view(-1, 1, 1, 1)
    for i, c in enumerate(y.tolist()):
        x[i, :, 3 * (c // 2) : 3 * (c // 2) + 3, 3 * (c % 2) : 3 * (c % 2) + 3] += 2
    whole = Samples(x, y, domain)
    return whole.take(range(n - 6)), whole.take(range(n - 6, n))


class Federation:
    """The server half of a method and its clients in one process, talking through Flower's records.

    ``tamper`` maps a client name to what becomes of its reply content: a function of the content,
    or an exception to raise, or None for silence. ``keeps`` maps it to what its device carries.
    """

    def __init__(
        self,
        method="fedavg",
        clients=4,
        seed=1,
        tamper=None,
        federation=None,
        nodes=None,
        training=None,
        keeps=None,
        privacy=OFF,
        **options,
    ):
        self.model = network()
        self.channels = channel_map()
        made = STRATEGIES[method].options(**options)
        self.rounds, self.tamper, self.keeps = [], tamper or {}, keeps or {}
        self.privacy = privacy
        self.server = STRATEGIES[method].server(
            self.channels,
            replace(
                federation
                or FederationOptions(clients=clients, min_replies=min(2, clients), wait=1.0),
                clients=clients,
            ),
            made,
            seed=seed,
            score_shape=(DOMAINS, CLASSES),
            privacy=privacy,
        )
        self.server.on_round = self.rounds.append
        self.halves = {
            f"client-{i:02d}": STRATEGIES[method].client(self.participant(i, seed, training), made)
            for i in range(clients)
        }
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
        self.grid = InProcessGrid(self.app(), nodes or clients, {}, 1)

    def participant(self, i, seed, training):
        train, test = shares(i)
        return Participant(
            id=f"client-{i:02d}",
            model=self.model,
            channels=self.channels,
            train=train,
            test=test,
            score_shape=(DOMAINS, CLASSES),
            training=training or TrainingOptions(epochs=1, batch_size=8, lr=0.05),
            seed=seed,
            memory=InMemory(),
            costs=lambda net: {"parameters": sum(p.numel() for p in net.parameters())},
            device=torch.device("cpu"),
            privacy=self.privacy,
        )

    def app(self):
        app = ClientApp()

        @app.query()
        def hello(message, context):
            node, nodes = (context.node_config[k] for k in ("partition-id", "num-partitions"))
            names = [name for i, name in enumerate(self.halves) if i % nodes == node]
            hellos = [Hello(n, self.domains(n), self.keeps.get(n)) for n in names]
            return Message(encode_hellos(hellos), reply_to=message)

        @app.train()
        def train(message, context):
            job = decode_job(message.content, self.channels)
            return self.reply(message, job, lambda half: encode_update(half.train(job)))

        @app.evaluate()
        def evaluate(message, context):
            job = decode_job(message.content, self.channels)
            return self.reply(message, job, lambda half: encode_scores(half.evaluate(job)))

        return app

    def domains(self, client):
        me, counts = self.halves[client].me, {}
        for half in (me.train, me.test):
            for k, n in half.counts().items():
                counts[str(k)] = counts.get(str(k), 0) + n
        return counts

    def reply(self, message, job, answer):
        check_job(job, self.model.state_dict(), self.channels)
        what = self.tamper.get(job.client, lambda content: content)
        if what is None:
            return None
        if isinstance(what, Exception):
            raise what
        if isinstance(what, Error):
            return Message(what, reply_to=message)
        return Message(what(answer(self.halves[job.client])), reply_to=message)

    def run(self, rounds=2):
        """Run and return the final global state."""
        # The grid answers at once or never, so silence need not be waited for.
        self.result = self.server.start(
            self.grid, ArrayRecord(self.model.state_dict()), rounds, 0.01
        )
        return self.server.state
