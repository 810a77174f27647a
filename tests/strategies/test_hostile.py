"""Malformed messages, many and odd: they cost their sender and change nothing else."""

import functools
import io
import json
import math
import pickle
import re
import tracemalloc
from collections import defaultdict

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strategies import STRATEGIES
from strategies.arrays import decode_arrays
from strategies.errors import ShapeError
from strategies.hello import LONGEST_HELLO
from strategies.memory import InMemory
from strategies.records import (
    Job,
    decode_hellos,
    decode_job,
    decode_update,
    encode_job,
    encode_update,
)
from strategies.rounds import Round
from tests.strategies.federation import Federation

METHODS = list(STRATEGIES)
HONEST = ["client-00", "client-01"]
HOSTILE = [f"client-{i:02d}" for i in range(2, 8)]
RECORDS = ["numbers", "state", "update"]
WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
BAD = [math.nan, math.inf, -math.inf, 1e300, -1e30, 2**62, -(2**63)]


def fuzz(examples):
    return settings(
        derandomize=True,
        deadline=None,
        database=None,
        max_examples=examples,
        suppress_health_check=list(HealthCheck),
    )


def npy(value, **options):
    file = io.BytesIO()
    np.save(file, value, **options)
    return file.getvalue()


def huge(dtype="<f4", shape=(10**6, 10**6), keys="'fortran_order': False"):
    """Return the header of an array far larger than any memory, and a few bytes."""
    text = f"{{'descr': '{dtype}', {keys}, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + b"1234"


# Ways to spoil a reply: (draw, content) -> None, each leaves something that is no answer ----------


def drop_record(draw, content):
    del content[draw(st.sampled_from([*RECORDS, "extras"]))]


def rename_record(draw, content):
    name = draw(st.sampled_from([*RECORDS, "extras", "scores"]))
    content[draw(WORDS) + "?"] = content.pop(name)


def add_record(draw, content):
    kinds = [ArrayRecord(), MetricRecord({"x": 1}), ConfigRecord({"nested": '{"a": {"b": 1}}'})]
    content[draw(WORDS) + "?"] = draw(st.sampled_from(kinds))


def other_kind_of_record(draw, content):
    name = draw(st.sampled_from([*RECORDS, "extras", "scores"]))
    value = draw(st.sampled_from(["x", b"\xff\xfe", 1, True, 0.5, [1, 2], ["a"]]))
    content[name] = ConfigRecord({"round": value, "samples": value, "state": value})


def number(draw, content):
    name = draw(st.sampled_from(["round", "samples", "steps", "loss", "cost.parameters"]))
    bad = [*BAD, -1, [1], [0.5, 2.0], []]
    content.metric_records["numbers"][name] = draw(st.sampled_from(bad))


def number_missing(draw, content):
    name = draw(st.sampled_from(["round", "samples", "steps", "loss"]))
    del content.metric_records["numbers"][name]


def numbers_in_texts(draw, content):
    texts = {name: str(value) for name, value in content.metric_records["numbers"].items()}
    content["numbers"] = ConfigRecord(texts)


def client_name(draw, content):
    odd = st.one_of(WORDS, st.binary(max_size=9), st.booleans(), st.integers(-9, 9))
    content["update"] = ConfigRecord({"client": draw(odd)})


def heavy(draw, content):
    key = draw(WORDS) + "?"
    content["update"] = ConfigRecord({**content.config_records["update"], key: "x" * 2**20})


def tensor(change):
    """Return a way that replaces one uploaded tensor by ``change(draw, tensor)``."""

    def spoil(draw, content):
        arrays = content.array_records["state"]
        name = draw(st.sampled_from(sorted(arrays)))
        value = torch.from_numpy(arrays[name].numpy().copy())
        changed = change(draw, value)
        if changed is None:
            del arrays[name]
        else:
            arrays[name] = Array(changed.numpy())

    return spoil


def other_type(draw, value):
    types = {torch.float64, torch.float32, torch.float16, torch.int32, torch.uint8, torch.bool}
    return value.to(draw(st.sampled_from(sorted(types - {value.dtype}, key=str))))


def other_shape(draw, value):
    shapes = [value[None], value.flatten()[:, None], torch.stack([value, value])]
    shapes += [value[:-1], value[:0], value.flatten()[0]] if value.dim() else []
    return draw(st.sampled_from([s.contiguous() for s in shapes if s.shape != value.shape]))


def no_numbers(draw, value):
    flat = value.double().flatten() if value.dtype == torch.int64 else value.flatten()
    flat[draw(st.integers(0, len(flat) - 1))] = draw(
        st.sampled_from([math.nan, math.inf, -math.inf, 1e30, -1e25])
    )
    return flat.view(value.shape)


def extra_tensor(draw, content):
    content.array_records["state"][draw(WORDS) + "?"] = Array(np.zeros(draw(st.integers(0, 9))))


def array(*, anywhere=("state", "scores")):
    """Return a decorator for ways that replace the parts of one array."""

    def of(change):
        def spoil(draw, content):
            arrays = content.array_records[draw(st.sampled_from(anywhere))]
            key = draw(st.sampled_from(sorted(arrays)))
            old = arrays[key]
            parts = {name: getattr(old, name) for name in ("dtype", "shape", "stype", "data")}
            arrays[key] = Array(**parts | change(draw, old))

        return spoil

    return of


@array()
def truncated(draw, old):
    return {"data": old.data[: draw(st.integers(0, len(old.data) - 1))]}


@array()
def too_long(draw, old):
    return {"data": old.data + draw(st.binary(min_size=1, max_size=40))}


@array()
def wrong_dtype_said(draw, old):
    return {"dtype": draw(st.sampled_from(["int8", "object", "", "float128", "<f4", "V4"]))}


@array()
def wrong_shape_said(draw, old):
    odd = [(), (-1,), (2**62, 2), (0,), (*old.shape, 1), (*old.shape, 7), (1,) * 70]
    return {"shape": draw(st.sampled_from([shape for shape in odd if shape != old.shape]))}


@array()
def wrong_stype(draw, old):
    return {"stype": draw(st.sampled_from(["", "pickle", "torch.tensor", "numpy.ndarray "]))}


@array()
def huge_header(draw, old):
    odd = [
        huge(),
        huge(shape=(-1, -4)),
        huge(shape=(0, 10**30)),
        huge(shape=(1,) * 70),
        huge(shape="(1"),
        huge(shape="(True,)"),
        huge(dtype="|O", shape=(1,)),
        huge(dtype=">f4", shape=(1,)),
        huge(dtype="<U1", shape=(1,)),
        huge(keys="'fortran_order': 3"),
        huge(shape="(" * 40),
        b"\x93NUMPY\x03\x00" + huge()[8:],
        b"\x93NUMPY\xff\xff",
    ]
    return {"data": draw(st.sampled_from(odd))}


@array()
def pickled(draw, old):
    objects = np.array([{"a": 1}], dtype=object)
    raw = [pickle.dumps(old.shape), npy(objects, allow_pickle=True)]
    return {"data": draw(st.sampled_from(raw))}


@array()
def noise(draw, old):
    return {"data": draw(st.binary(max_size=200))}


@array(anywhere=("scores",))
def counts(draw, old):
    value = old.numpy().copy()
    bad = [2**62, -1, -(2**63)] if value.dtype == np.int64 else [math.nan, math.inf, 1e300]
    value.flat[draw(st.integers(0, value.size - 1))] = draw(st.sampled_from(bad))
    return {"data": npy(value)}


WAYS = [
    drop_record,
    rename_record,
    add_record,
    other_kind_of_record,
    number,
    number_missing,
    numbers_in_texts,
    client_name,
    heavy,
    tensor(lambda draw, value: None),
    tensor(other_type),
    tensor(other_shape),
    tensor(no_numbers),
    extra_tensor,
    truncated,
    too_long,
    wrong_dtype_said,
    wrong_shape_said,
    wrong_stype,
    huge_header,
    pickled,
    noise,
    counts,
]


def fisher(draw, content):
    bad = [-1.0, math.inf, -math.inf]
    extras, kind = content.array_records["extras"], draw(st.integers(0, 3))
    value = extras["fisher"].numpy().copy()
    if kind == 0:
        del extras["fisher"]
    elif kind == 1:
        extras["fisher"] = Array(value[:-1])
    elif kind == 2:
        extras["fisher"] = Array(value.astype(np.float64))
    else:
        value[draw(st.integers(0, len(value) - 1))] = draw(st.sampled_from(bad))
        extras["fisher"] = Array(value)


def signatures(draw, content):
    extras = content.array_records["extras"]
    ids, samples = extras["domains"].numpy(), extras["counts"].numpy()
    rows = extras["signatures"].numpy()
    spoilt = [
        {"domains": ids + 90},
        {"domains": ids - 9},
        {"domains": ids * 0},
        {"domains": ids.astype(np.int32)},
        {"counts": samples * 0 + 2**62},  # two of them add up to a negative number
        {"counts": samples * 0},
        {"counts": samples * 10},
        {"counts": samples[:0]},
        {"signatures": rows * -1},
        {"signatures": rows * np.float16("nan")},
        {"signatures": rows[:, 1:].copy()},
        {"signatures": rows.astype(np.float32)},
    ]
    extras.update({k: Array(v) for k, v in draw(st.sampled_from(spoilt)).items()})


MORE = {"fedfip": [fisher, signatures]}


# Replies ----------------------------------------------------------------------------------------


class Answered:
    """A server in round 1 with honest answers to all its jobs, that takes others in their place."""

    def __init__(self, method):
        self.run = Federation(method, clients=8)
        self.server = self.run.server
        send = self.server.exchange.messages

        def noted(jobs, kind, round):
            self.sent = dict(zip(jobs, send(jobs, kind, round), strict=True))
            return list(self.sent.values())

        self.server.exchange.messages = noted
        before = {n: t.clone() for n, t in self.run.model.state_dict().items()}
        self.merge, self.server.merge = self.server.merge, lambda *_: {}
        self.run.run(1)
        self.server.merge = self.merge
        self.jobs = dict(self.server._round.jobs)
        self.updates = {update.client: update for update in self.run.rounds[1].updates}
        self.encoded = {client: encode_update(u) for client, u in self.updates.items()}
        self.before, self.remembered = before, self.server.memory()
        self.expected = self.take({client: self.content(client) for client in HONEST})

    def content(self, client):
        """Return a copy that can be spoilt: records are new, arrays are replaced as a whole."""
        records = self.encoded[client].items()
        return RecordDict({name: type(record)(dict(record)) for name, record in records})

    def take(self, contents):
        """Return (model, memory, histories) after a round with these answers."""
        self.server.state = {n: t.clone() for n, t in self.before.items()}
        self.server.recall({n: t.clone() for n, t in self.remembered.items()})
        histories = defaultdict(InMemory)
        self.server.store = histories.__getitem__
        self.server._round = Round(1, jobs=dict(self.jobs))
        replies = [Message(c, reply_to=self.sent[client]) for client, c in contents.items()]
        self.server.aggregate_train(1, replies)
        saved = {c: m.saved[1] for c, m in sorted(histories.items()) if m.saved}
        return self.server.state, self.server.memory(), *saved.values()


@functools.cache
def answered(method):
    return Answered(method)


@st.composite
def spoilt(draw, method):
    contents = {}
    for client in HOSTILE:
        contents[client] = answered(method).content(client)
        draw(st.sampled_from([*WAYS, *MORE.get(method, [])]))(draw, contents[client])
    return contents


@pytest.mark.parametrize("method", METHODS)
def test_malformed_replies_are_refused_and_leave_no_trace(method):
    """1,080 of them."""
    refused = []

    @fuzz(60)
    @given(spoilt(method))
    def check(contents):
        case = answered(method)
        honest = {client: case.content(client) for client in HONEST}
        found = case.take(contents | honest)
        failures = case.server._round.failures
        assert sorted(failures) == HOSTILE, contents
        assert "no reply" not in "".join(failures.values())
        for ours, theirs in zip(found, case.expected, strict=True):
            assert ours.keys() == theirs.keys()
            # NaN = not measured, in Fisher vectors.
            assert all(torch.equal(ours[k].nan_to_num(), theirs[k].nan_to_num()) for k in ours)
        refused.extend(failures.values())

    check()
    assert len(refused) >= 360
    assert len(set(refused)) > 30


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("way", [*WAYS, *MORE["fedfip"]])
def test_every_way_to_spoil_a_reply_is_noticed(method, way):
    if way in MORE["fedfip"] and method != "fedfip":
        return
    case = answered(method)

    @fuzz(3)
    @given(st.data())
    def check(data):
        content = case.content(HOSTILE[0])
        way(data.draw, content)
        case.take({c: case.content(c) for c in HONEST} | {HOSTILE[0]: content})
        assert HOSTILE[0] in case.server._round.failures

    check()


@fuzz(200)
@given(st.integers(0, 127), st.integers(1, 255))
def test_a_damaged_header_is_refused_or_says_the_same(place, flip):
    old = Array(np.arange(6, dtype=np.float32).reshape(2, 3))
    data = bytearray(old.data)
    data[place] ^= flip
    try:
        (found,) = decode_arrays(
            ArrayRecord({"x": Array(old.dtype, old.shape, old.stype, bytes(data))})
        ).values()
    except ShapeError:
        return
    assert found.dtype == torch.float32
    assert found.shape == (2, 3)


@pytest.mark.parametrize("shape", [(2**31,), (10**6, 10**6)])
def test_a_lying_header_takes_no_memory(shape):
    for said in (shape, (1,)):
        record = ArrayRecord({"x": Array("float32", said, "numpy.ndarray", huge(shape=shape))})
        tracemalloc.start()
        with pytest.raises(ShapeError, match="x: not an array"):
            decode_arrays(record)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 2**20


class Explosive:
    def __reduce__(self):
        return pytest.fail, ("unpickled",)


@pytest.mark.parametrize("stype", ["numpy.ndarray", "pickle", "torch.Tensor"])
def test_a_pickle_is_refused_on_both_sides_and_never_opened(stype):
    payloads = [pickle.dumps(Explosive()), npy(np.array([Explosive()]), allow_pickle=True)]
    case = answered("fedavg")
    for payload in payloads:
        for said in ("object", "float32"):
            bomb = Array(said, (1,), stype, payload)
            reply = case.content(HOSTILE[0])
            reply.array_records["state"]["0.weight"] = bomb
            with pytest.raises(ShapeError, match=r"0\.weight: not an array"):
                decode_update(reply)
            job = encode_job(case.jobs[HOSTILE[0]], case.run.channels, {})
            job.array_records["state"]["0.weight"] = bomb
            with pytest.raises(ShapeError, match=r"0\.weight: not an array"):
                decode_job(job, case.run.channels)


# Introductions ----------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)
COUNTS = st.integers() | st.floats() | st.booleans() | st.none() | WORDS | st.just(10**400)
FIELDS = st.fixed_dictionaries(
    {},
    optional={
        "client": st.sampled_from(["a", "b", "c"]) | WORDS | JSON,
        "domains": st.dictionaries(WORDS, COUNTS | st.integers(1, 99), max_size=3) | JSON,
        "keep": st.sampled_from([0.5, 1, 1.0, None]) | st.floats() | JSON,
        "more": JSON,
    },
)
TEXTS = st.one_of(
    FIELDS.map(json.dumps),
    FIELDS.map(json.dumps),
    WORDS,
    st.just("[" * 50_000),
    st.just('{"client": "a", "domains": {"x": ' + "9" * 5000 + "}}"),
    st.just(json.dumps({"client": "a", "domains": {}, "keep": 0.5}) + " " * LONGEST_HELLO),
)


@fuzz(300)
@given(
    st.lists(TEXTS, max_size=3)
    | WORDS
    | st.binary()
    | st.lists(st.integers(-9, 9), max_size=2)
    | st.integers(-9, 9)
)
def test_introductions_are_refused_or_as_promised(clients):
    content = RecordDict({"hello": ConfigRecord({"clients": clients})})
    try:
        hellos = decode_hellos(content, 2)
    except ShapeError:
        return
    assert len({hello.client for hello in hellos}) == len(hellos) <= 2
    for hello in hellos:
        assert re.fullmatch(r"[\w.-]{1,64}", hello.client)
        assert all(type(n) is int and n > 0 for n in hello.domains.values())
        assert hello.keep is None or 0 < hello.keep <= 1


HELLOS = {
    "true for a count": [{"client": "a", "domains": {"x": True}}],
    "nan for a count": [{"client": "a", "domains": {"x": math.nan}}],
    "more samples than there are": [{"client": "a", "domains": {"x": 10**10}}],
    "keep of zero": [{"client": "a", "domains": {}, "keep": 0}],
    "keep above one": [{"client": "a", "domains": {}, "keep": 1.5}],
    "keep of true": [{"client": "a", "domains": {}, "keep": True}],
    "keep as a text": [{"client": "a", "domains": {}, "keep": "0.5"}],
    "keep nan": [{"client": "a", "domains": {}, "keep": math.nan}],
    "a path": [{"client": "../../etc", "domains": {}}],
    "a long name": [{"client": "a" * 65, "domains": {}}],
    "twice": [{"client": "a", "domains": {"x": 1}}] * 2,
    "thousands": [{"client": f"a{i}", "domains": {"x": 1}} for i in range(5000)],
}


@pytest.mark.parametrize("odd", HELLOS)
def test_a_node_with_an_odd_introduction_is_refused_and_the_others_are_met(odd):
    texts = [json.dumps(hello) for hello in HELLOS[odd]]
    run = Federation(clients=3)
    app = run.grid.client_app

    def introduced(message, context):
        if message.metadata.message_type == "query" and context.node_id == 1014:
            content = RecordDict({"hello": ConfigRecord({"clients": texts})})
            return Message(content, reply_to=message)
        return app(message, context)

    run.grid.client_app = introduced
    with pytest.raises(RuntimeError, match=r"2 of 3 clients.*hello: not an introduction"):
        run.run(1)
    assert sorted(run.server.exchange.clients) == ["client-00", "client-01"]


# Jobs -------------------------------------------------------------------------------------------


def spoil_job(draw, content):
    """Change one thing of a job; what is left can still be one."""
    kind, record = draw(st.integers(0, 6)), draw(st.sampled_from(["job", "channels", "state"]))
    odd = st.one_of(WORDS, st.binary(max_size=4), st.booleans(), st.integers(-9, 9), st.floats())
    if kind == 0:
        del content[record]
    elif kind == 1:
        content[record] = ConfigRecord({draw(WORDS): draw(odd)})
    elif kind == 2:
        head = content.config_records["job"]
        head[draw(st.sampled_from(sorted(head)))] = draw(odd)
    elif kind == 3:
        bits = np.frombuffer(draw(st.binary(max_size=6)), np.uint8)
        content["channels"] = ArrayRecord({"kept": Array(bits.copy())})
    elif kind == 4:
        draw(st.sampled_from([huge_header_of_job, pickled_job]))(draw, content)
    elif kind == 5:
        del content.array_records["channels"]["kept"]
    else:
        del content.config_records["job"][draw(st.sampled_from(["client", "round", "evaluate"]))]


@array(anywhere=("state", "channels"))
def huge_header_of_job(draw, old):
    return {"data": huge()}


@array(anywhere=("state", "channels"))
def pickled_job(draw, old):
    return {"data": pickle.dumps([1])}


def test_malformed_jobs_are_refused_or_fit_the_network():
    case = answered("fedfip")
    channels, refused = case.run.channels, []

    @fuzz(200)
    @given(st.data())
    def check(data):
        content = encode_job(case.jobs[HOSTILE[0]], channels, {})
        spoil_job(data.draw, content)
        try:
            job = decode_job(content, channels)
        except ShapeError as error:
            refused.append(str(error))
            return
        assert isinstance(job, Job)
        channels.check(job.kept)

    check()
    assert len(refused) > 100


@pytest.mark.parametrize("method", METHODS)
def test_a_client_answers_a_malformed_job_with_an_error_and_goes_on(method):
    run = Federation(method)
    send = run.server.exchange.messages

    def spoilt(jobs, kind, round):
        messages = send(jobs, kind, round)
        if round.number == 1:
            state = messages[1].content.array_records["state"]
            messages[1].content["state"] = ArrayRecord({k: state[k] for k in list(state)[1:]})
            messages[2].content["job"] = ConfigRecord({"client": "client-02"})
        return messages

    run.server.exchange.messages = spoilt
    run.run(2)
    failures = run.rounds[1].failures
    assert "0.weight" in failures["client-01"]
    assert "ShapeError: job: missing or not readable: 'evaluate'" in failures["client-02"]
    assert run.rounds[2].failures == {}
