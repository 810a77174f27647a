"""Every way a client can fail, under every method: it alone pays, and the reason is kept."""

import functools
import pickle
from collections import defaultdict

import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.serde import message_to_proto

from fedsparse_app.state import ClientState
from strategies import STRATEGIES, FederationOptions
from strategies.exchange import Exchange, receive
from strategies.memory import InMemory
from strategies.records import Hello, Job, encode_hellos, encode_scores
from strategies.rounds import LONGEST_REASON, Round, most_bytes
from task.train import Scores
from tests.strategies.federation import Federation

METHODS = list(STRATEGIES)
FAULTY = "client-01"


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# What becomes of the content of a reply ---------------------------------------------------------


def state(change):
    """Return a tampering that puts ``change(tensors)`` in place of the uploaded tensors."""

    def tamper(content):
        tensors = content.array_records["state"].to_torch_state_dict()
        content["state"] = ArrayRecord(change(tensors))
        return content

    return tamper


def changed(name, value):
    return state(lambda tensors: {**tensors, name: value(tensors[name])})


def array(*about):
    """Return a tampering that replaces one array by an ``Array`` of (dtype, shape, stype, data)."""

    def tamper(content):
        arrays = dict(content.array_records["state"])
        whole = arrays["0.weight"]
        given = (whole.dtype, whole.shape, whole.stype, whole.data)
        arrays["0.weight"] = Array(*(new or old for new, old in zip(about, given, strict=True)))
        content["state"] = ArrayRecord(arrays)
        return content

    return tamper


def number(name, value):
    def tamper(content):
        content.metric_records["numbers"][name] = value
        return content

    return tamper


def record(name, value):
    def tamper(content):
        content[name] = value
        return content

    return tamper


def header(shape):
    text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}"
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text.ljust(117).encode() + b"\n"


def scores(correct, total, loss=(0.0, 0.0, 0.0)):
    counts = (torch.full((3, 4), n) for n in (correct, total))
    return encode_scores(Scores(*counts, torch.tensor(loss)))["scores"]


# What becomes of the message around it ----------------------------------------------------------


def unavailable(reply):
    """Return what the SuperLink answers for a node that is gone."""
    gone = Message(Error(5, "Node Unavailable: the destination node is offline."), reply_to=reply)
    gone.metadata.__dict__["_src_node_id"] = 1
    gone.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
    return [gone]


def forged(reply):
    """Return the reply as another node would send it."""
    reply.metadata.__dict__["_src_node_id"] += 7
    return [reply]


def forged_error(reply):
    lie = Message(Error(2, "I speak for others"), reply_to=reply)
    lie.metadata.__dict__["_src_node_id"] = reply.metadata.src_node_id + 7
    lie.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
    return [lie]


def unreadable(reply):
    raise ValueError("Unexpected set of `children`.")


def unasked(reply):
    reply.metadata.__dict__["_reply_to_message_id"] = "message-77"
    return [reply]


CONTENTS = {
    "raises": (ValueError("boom"), "error 2: ValueError: boom"),
    "process exits": (Error(8, "ClientApp stopped responding."), "error 8: ClientApp stopped"),
    "hangs": (None, "no reply within"),
    "nan": (changed("0.weight", lambda t: t * float("nan")), "0.weight: NaN"),
    "infinite": (changed("0.weight", lambda t: t / 0), "0.weight: NaN or infinite"),
    "wrong shape": (changed("0.weight", lambda t: t[:1]), "0.weight: shape (1,"),
    "wrong type": (changed("0.weight", lambda t: t.double()), "0.weight: torch.float64"),
    "missing": (state(lambda t: {k: t[k] for k in t if k != "7.bias"}), "7.bias: missing"),
    "extra": (state(lambda t: {**t, "ghost": torch.zeros(1)}), "ghost: not a tensor"),
    "stale round": (number("round", 7), "round 7"),
    "another client": (record("update", ConfigRecord({"client": "client-03"})), "client-03"),
    "huge tensor": (state(lambda t: {**t, "ghost": torch.zeros(9999, 99)}), "can be an answer"),
    "no records": (lambda content: RecordDict(), "numbers"),
    "texts for numbers": (record("numbers", ConfigRecord({"samples": "20"})), "numbers"),
    "no samples": (number("samples", 0), "samples 0"),
    "negative samples": (number("samples", -20), "samples -20"),
    "too many samples": (number("samples", 10**15), "more than the 26"),
    "negative loss": (number("loss", -1.0), "loss -1.0"),
    "absurd loss": (number("loss", 1e300), "loss 1e+300"),
}
# Refused before a method sees it.
WIRE = {
    "diverged": (changed("0.weight", lambda t: t * 0 + 1e30), "0.weight: values beyond 1e+12"),
    "huge text": (
        record("update", ConfigRecord({"client": FAULTY, "x": "x" * 10**6})),
        "can be an answer",
    ),
    "empty array": (array(None, None, None, b"no array"), "0.weight: not an array"),
    "zip": (array(None, None, None, b"PK\x03\x04rubbish"), "0.weight: not an array"),
    "huge header": (array(None, None, None, header((10**9, 10**9))), "0.weight: not an array"),
    "lying header": (array(None, (8, 2, 9), None, None), "0.weight: not an array"),
    "pickle": (array(None, None, "pickle", pickle.dumps({})), "0.weight: not an array"),
    "no numbers": (record("numbers", MetricRecord({"round": 1})), "missing"),
    "list for number": (number("samples", [20]), "samples is [20]"),
    "fraction for count": (number("samples", 2.5), "samples is 2.5"),
    "unknown record": (record("more", MetricRecord({"x": 1})), "unknown record more"),
    "too many steps": (number("steps", 2**62), "steps 4611686018427387904"),
    "loss nan": (number("loss", float("nan")), "loss nan"),
    "cost nan": (number("cost.parameters", float("nan")), "cost parameters = nan"),
    "absurd cost": (number("cost.train-flops", 1e308), "cost train-flops = 1e+308"),
    "more right than asked": (record("scores", scores(3, 2)), "more right answers"),
    "counts that overflow": (record("scores", scores(1, 2**62)), "more than there can be"),
    "scores nan": (record("scores", scores(1, 2, (0.0, 0.0, float("nan")))), "scores: NaN"),
}
MESSAGES = {
    "node unavailable": (unavailable, "error 5: Node Unavailable"),
    "another node's reply": (forged, "answered by another node"),
    "another node's error": (forged_error, "answered by another node"),
    "answer to nothing": (unasked, "no reply within"),
    "unreadable": (unreadable, "Flower cannot read the reply (ValueError: Unexpected set"),
}


def tampered(run, change):
    """Let ``change`` decide what arrives instead of the replies to trained jobs of FAULTY."""
    pull, node = run.grid.pull_messages, list(run.grid.contexts)[int(FAULTY[-2:])]

    def pulled(message_ids):
        for reply in pull(message_ids):
            mine = reply.metadata.src_node_id == node and reply.metadata.message_type == "train"
            yield from change(reply) if mine else [reply]

    run.grid.pull_messages = pulled
    return run


@functools.cache
def never_sampled(method, rounds):
    """Return a run in which FAULTY is never asked, and what the others answered in it."""
    run, answers = Federation(method), defaultdict(dict)
    sample = run.server.exchange.sample
    run.server.exchange.sample = lambda *about: [c for c in sample(*about) if c != FAULTY]
    run.run(rounds)
    for round in run.rounds:
        answers[round.number] = {update.client: update for update in round.updates}
    return run, answers


def replayed(method, **options):
    """Return a federation in which nobody trains what was trained before for the same job."""
    run, answers = Federation(method, **options), never_sampled(method, 2)[1]

    def train(job, half):
        if job.client not in answers[job.round]:  # FAULTY, the first time
            answers[job.round][job.client] = type(half).train(half, job)
        return answers[job.round][job.client]

    for half in run.halves.values():
        half.train = functools.partial(train, half=half)
    memories = defaultdict(InMemory)
    run.server.store, run.memories = memories.__getitem__, memories
    return run


CASES = [(fault, method) for fault in (*CONTENTS, *MESSAGES) for method in METHODS]


@pytest.mark.parametrize(("fault", "method"), [*CASES, *((fault, "fedavg") for fault in WIRE)])
def test_a_faulty_client_costs_its_own_reply_alone(fault, method):
    what, reason = {**CONTENTS, **WIRE, **MESSAGES}[fault]
    run = replayed(method, tamper=None if fault in MESSAGES else {FAULTY: what})
    if fault in MESSAGES:
        tampered(run, what)
    rounds = 2 if fault in ("raises", "nan", "node unavailable") else 1
    run.run(rounds)
    without = never_sampled(method, rounds)[0].server
    assert equal(run.server.state, without.state)
    assert equal(run.server.memory(), without.memory())
    assert FAULTY not in run.memories or run.memories[FAULTY].saved == {}
    for round in run.rounds[1:]:
        assert round.merged
        assert list(round.failures) == [FAULTY]
        assert reason in round.failures[FAULTY]
        assert [u.client for u in round.updates] == ["client-00", "client-02", "client-03"]


@pytest.mark.parametrize("method", METHODS)
def test_a_reply_that_comes_twice_counts_once(method):
    twice, once = Federation(method), Federation(method)
    tampered(twice, lambda reply: [reply, reply]).run(1)
    assert equal(twice.server.state, once.run(1))
    assert twice.rounds[1].bytes_up == once.rounds[1].bytes_up
    assert twice.rounds[1].failures == {}


def test_the_node_that_was_asked_counts_though_another_answered_first():
    def both(reply):
        return [*forged_error(reply), reply]

    run = tampered(Federation(), both)
    assert equal(run.run(1), Federation().run(1))
    assert run.rounds[1].failures == {}


@pytest.mark.parametrize("method", METHODS)
def test_patience_ends_and_the_reason_is_said(method):
    federation = FederationOptions(patience=2, wait=1.0)
    tamper = dict.fromkeys(("client-00", "client-01", "client-02"), ValueError("out of cheese"))
    run = Federation(method, tamper=tamper, federation=federation)
    with pytest.raises(RuntimeError, match=r"2 rounds .*min-replies = 2.*client-00: .*cheese"):
        run.run(rounds=5)
    assert [round.merged for round in run.rounds] == [False, False]


def test_a_superlink_that_is_gone_ends_the_run():
    run = Federation()

    def gone(*_):
        raise ConnectionError("no SuperLink")

    def lost(messages):
        run.grid.pull_messages = run.grid.get_node_ids = gone
        return [m.metadata.message_id for m in messages]

    run.server.on_round = lambda _: setattr(run.grid, "push_messages", lost)
    with pytest.raises(ConnectionError, match="no SuperLink"):
        run.run(1)


def test_a_message_that_could_not_be_sent_is_not_waited_for():
    run = Federation(clients=2)
    push = run.grid.push_messages
    run.grid.push_messages = lambda messages: push(messages[:1])
    hello = [Message(RecordDict(), node, "query") for node in run.grid.contexts]
    assert len(receive(run.grid, hello, timeout=1000)) == 1


def test_reasons_are_one_short_printable_line():
    long = "\x1b[31m" + "words \n of a hostile client \ud800 " * 10**5
    run = Federation(tamper={FAULTY: Error(2, long.replace("\ud800", "\x07"))})
    run.run(1)
    reason = run.rounds[1].failures[FAULTY]
    assert len(reason) <= LONGEST_REASON
    assert reason.isprintable()
    round = Round(1)
    round.fail(FAULTY, long)
    assert round.failures[FAULTY].isprintable()


def test_what_cannot_be_serialised_is_refused():
    """In simulation replies are not serialised on their way."""
    run = Federation()
    run.run(0)
    run.server._round = Round(1)
    jobs = {FAULTY: Job(FAULTY, 1, {}, {}, {})}
    (sent,) = run.server.exchange.messages(jobs, "train", run.server._round)
    odd = RecordDict({"update": ConfigRecord({"client": "\ud800"})})
    round, reply = Round(1), Message(odd, reply_to=sent)
    assert run.server.exchange.answers([reply], round, lambda job: 1000) == []
    assert "not a message (UnicodeEncodeError" in round.failures[FAULTY]


@pytest.mark.parametrize("method", METHODS)
def test_the_limit_on_bytes_leaves_room_for_every_honest_reply(method):
    options = {"sa": False} if method == "fedfip" else {}
    run = Federation(method, **options)
    run.run(2)
    for round in run.rounds[1:]:
        for client, job in round.jobs.items():
            held = round.bytes_up[client]
            assert 0.1 < held / most_bytes(job, run.channels.size, run.server.score_shape) < 0.9


# Who speaks for whom ----------------------------------------------------------------------------


def introducing(run, names):
    """Let every node of ``run`` introduce what ``names`` says it does."""
    handle = run.grid._handle

    def handled(message):
        node = message.metadata.dst_node_id
        if message.metadata.message_type == "query" and node in names:
            hellos = [Hello(name, {"0": 26}) for name in names[node]]
            return message_to_proto(Message(encode_hellos(hellos), reply_to=message))
        return handle(message)

    run.grid._handle = handled
    return run


def nodes_asked(run):
    """Return the nodes that get jobs, by round and client, as the run goes on."""
    asked, messages = [], run.server.exchange.messages

    def noted(jobs, kind, round):
        sent = messages(jobs, kind, round)
        asked.append({c: m.metadata.dst_node_id for c, m in zip(jobs, sent, strict=True)})
        return sent

    run.server.exchange.messages = noted
    return asked


@pytest.mark.parametrize("method", METHODS)
def test_a_second_node_cannot_take_a_living_nodes_client(method):
    run = introducing(Federation(method), {1021: ["client-03", "client-00"]})
    asked = nodes_asked(run)
    assert equal(run.run(2), Federation(method).run(2))
    assert [round["client-00"] for round in asked] == [1000, 1000]
    assert "client-00 is on two nodes" in run.rounds[2].refused["client-00"]
    assert run.rounds[2].failures == {}


def test_a_client_whose_node_died_is_taken_up_from_the_node_that_waited():
    run = introducing(Federation(), {1021: ["client-03", "client-00"]})
    asked = nodes_asked(run)

    def died(round):
        run.rounds.append(round)
        if round.number == 1:
            del run.grid.contexts[1000]

    run.server.on_round = died
    run.run(2)
    assert [round["client-00"] for round in asked] == [1000, 1021]
    assert run.rounds[2].refused == {}


def test_a_duplicate_is_said_when_clients_are_missing():
    run = introducing(Federation(clients=3), {1007: ["client-00"]})
    with pytest.raises(RuntimeError, match=r"2 of 3 clients.*client-00 is on two nodes"):
        run.run(1)


def test_a_node_that_returns_under_its_id_is_greeted_again():
    run = Federation(clients=3)
    gone = {}

    def restart(round):
        run.rounds.append(round)
        if round.number == 1:
            gone[1014] = run.grid.contexts.pop(1014)
        if round.number == 2:
            run.grid.contexts |= gone
            introducing(run, {1014: ["client-02b"]})

    run.server.on_round = restart
    run.run(3)
    assert [sorted(round.jobs) for round in run.rounds[1:]] == [
        ["client-00", "client-01", "client-02"],
        ["client-00", "client-01"],
        ["client-00", "client-01", "client-02b"],
    ]


@pytest.mark.parametrize("bound", [False, True])
def test_with_bound_keys_a_dead_nodes_client_stays_with_its_key(bound):
    run = Federation(clients=3)
    keys = {1000: b"a", 1007: b"b", 1014: b"c", 999: b"x", 998: b"a"}
    run.server.exchange = Exchange(
        FederationOptions(clients=3, wait=1.0, bind_keys=bound), run.channels, 1
    )
    nodes = run.grid.get_nodes

    def with_keys():
        for node in nodes():
            node.public_key = keys[node.node_id]
            yield node

    def restart(round):
        run.rounds.append(round)
        if round.number == 1:  # another device with the same client-id
            run.grid.contexts[999] = run.grid.contexts.pop(1000)
        if round.number == 2:  # the device itself
            run.grid.contexts[998] = run.grid.contexts.pop(999)

    run.grid.get_nodes, run.server.on_round = with_keys, restart
    run.run(3)
    assert [len(round.jobs) for round in run.rounds[1:]] == [3, 2 if bound else 3, 3]
    assert ("client-00" in run.rounds[2].refused) == bound
    assert run.rounds[3].refused == {}


def killed(run, disk, restart):
    """Kill the node of FAULTY in round 2 and go on with a new process under a new id."""

    def start(client, root):
        half = run.halves[client]
        half.me.__dict__["memory"] = ClientState(root, client)
        run.halves[client] = type(half)(half.me, half.options)

    def after(round):
        run.rounds.append(round)
        if round.number == 2 and restart:
            run.grid.contexts[5] = run.grid.contexts.pop(1007)
            start(FAULTY, disk if restart == "with its state-dir" else disk / "empty")

    def crash(reply):
        return unavailable(reply) if len(run.rounds) == 2 else [reply]

    for client in run.halves:
        start(client, disk)
    run.server.on_round = after
    return tampered(run, crash).run(3)


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedavg", {}),
        ("fedfip", {"keep": 0.5, "phi": 0.0, "react_max": 0.25, "fisher_samples": 8}),
        ("subflot", {"rates": "0.5, 0.25", "bn_local": True}),
    ],
)
def test_a_client_killed_in_a_round_is_itself_again_under_a_new_node_id(method, options, tmp_path):
    runs = {how: Federation(method, **options) for how in ("", "with its state-dir", "without it")}
    states = {how: killed(run, tmp_path / (how or "never"), how) for how, run in runs.items()}
    moved = runs["with its state-dir"]
    assert "error 5" in moved.rounds[2].failures[FAULTY]
    assert [len(round.updates) for round in moved.rounds] == [0, 4, 3, 4]
    assert equal(states["with its state-dir"], states[""])
    assert equal(states["without it"], states[""]) == (method == "fedavg")
