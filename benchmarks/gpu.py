"""Does CUDA compute what the CPU does, and how fast: a check for a machine that has a GPU.

    python -m benchmarks.gpu                       # CUDA against the CPU; exit code 2 without CUDA
    python -m benchmarks.gpu --device cpu          # the CPU against itself, to try the script
    python -m benchmarks.gpu --model resnet18 --samples 2048 --batch 128

For every method two rounds of one client are done on both devices from the same messages; the
second has masks, private channels, prototypes and histories. Compared are the uploaded tensors, the
Fisher vectors and the masks that follow from them, FLOPs, and the scores of one network. TF32 is
off for that and on, as torch has it, for the times. Exit code 1 if something differs.
"""

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from strategies import STRATEGIES, FederationOptions
from strategies.local import ClientHalf, Participant
from strategies.memory import InMemory
from strategies.ops.select import jaccard, top_channels
from strategies.records import Hello, Job, Update
from task.cost import flops, parameters
from task.data.dataset import Samples
from task.models import build, example
from task.trace import trace
from task.train import TrainingOptions

SHAPE, CLASSES, DOMAINS, ROUNDS = (3, 32, 32), 10, 4, 2
OPTIONS = {
    "fedavg": {},
    "fedfip": {"keep": 0.5, "fisher_refresh": 1, "dsr_every": 1},
    "subflot": {"rates": "0.5"},
}
LIMITS = {"weights": 1e-3, "fisher": 1e-2, "mask": 0.02, "flops": 0.0, "right": 0.01, "loss": 1e-4}
"""Largest accepted: differences relative to the largest value, 1 - Jaccard, shares of samples.

A few steps of SGD multiply the rounding of float32 sums taken in another order.
"""


def shares(samples: int) -> Samples:
    """Return random images whose class shows as brightness and whose domain as a colour."""
    draw = torch.Generator().manual_seed(1)
    y = torch.randint(CLASSES, (samples,), generator=draw)
    domain = torch.arange(samples) % DOMAINS
    x = torch.randint(0, 120, (samples, *SHAPE), generator=draw)
    x += 12 * y.view(-1, 1, 1, 1)
    x[torch.arange(samples), domain % SHAPE[0]] += 20 + domain.view(-1, 1, 1)
    return Samples(x.to(torch.uint8), y, domain)


class Pair:
    """One client of a method on two devices, and the server that writes its jobs."""

    def __init__(self, method: str, args: argparse.Namespace, device: torch.device) -> None:
        torch.manual_seed(1)
        model = build(args.model, SHAPE, CLASSES).eval()
        self.example = example(args.model, SHAPE)
        self.channels = trace(model, self.example)
        options = STRATEGIES[method].options(**OPTIONS[method])
        self.server = STRATEGIES[method].server(
            self.channels,
            FederationOptions(clients=1, min_replies=1),
            options,
            seed=1,
            score_shape=(DOMAINS, CLASSES),
        )
        self.server.state = {name: t.clone() for name, t in model.state_dict().items()}
        self.hello = Hello("client-00", {str(k): args.samples // DOMAINS for k in range(DOMAINS)})
        self.server.exchange.clients["client-00"] = self.hello
        training = TrainingOptions(epochs=1, batch_size=args.batch, lr=0.01)

        def half(place: torch.device) -> ClientHalf:
            data = shares(args.samples).to(place)
            me = Participant(
                id="client-00",
                model=model,
                channels=self.channels,
                train=data,
                test=data,
                score_shape=(DOMAINS, CLASSES),
                training=training,
                seed=1,
                memory=InMemory(),
                costs=lambda network: {"parameters": float(parameters(network))},
                device=place,
            )
            return STRATEGIES[method].client(me, options)

        self.halves = half(torch.device("cpu")), half(device)

    def rounds(self) -> Iterator[tuple[Job, Update, Update]]:
        """Yield each round's job and the two answers; the CPU's is merged."""
        for number in range(1, ROUNDS + 1):
            (job,) = self.server.jobs([self.hello], number).values()
            one, other = (half.train(job) for half in self.halves)
            yield job, one, other
            self.server.merge(number, [one])


def compare(pair: Pair) -> dict[str, float]:
    """Return the largest differences over the rounds, by the names of `LIMITS`."""
    found = dict.fromkeys(LIMITS, 0.0)

    def note(what: str, value: float) -> None:
        found[what] = max(found[what], value)

    for job, one, other in pair.rounds():
        for name, tensor in one.state.items():
            note("weights", relative(other.state[name], tensor))
        if "fisher" in one.extras:
            first, second = (u.extras["fisher"].nan_to_num() for u in (one, other))
            note("fisher", relative(second, first))
            masks = [top_channels(fisher, pair.channels, 0.5) for fisher in (first, second)]
            note("mask", 1 - jaccard(*masks))
        asked = replace(job, state=one.state) if job.sent is job.kept else job
        right, loss, costs = zip(*(scored(half, asked, pair) for half in pair.halves), strict=True)
        note("right", abs(right[0] - right[1]))
        note("loss", abs(loss[0] - loss[1]) / max(1.0, loss[0]))
        note("flops", abs(costs[0] - costs[1]))
    return found


def scored(half: ClientHalf, job: Job, pair: Pair) -> tuple[float, float, float]:
    """Return share of right answers, mean loss and training FLOPs of the network in ``job``."""
    network = half.me.submodel(job.sent, job.state)
    scores = half.scores(network)
    return scores.accuracy(), scores.mean_loss(), flops(network, pair.example.to(half.me.device))[1]


def relative(found: Tensor, wanted: Tensor) -> float:
    """Return the largest difference in units of the largest value."""
    if not wanted.numel():
        return 0.0
    scale = float(wanted.abs().max()) or 1.0
    return float((found.double() - wanted.double()).abs().max()) / scale


def seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    """Return the shortest of ``repeats`` runs, after one that does not count."""
    taken = []
    for _ in range(1 + repeats):
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])


def times(pair: Pair, args: argparse.Namespace) -> Iterator[tuple[str, float]]:
    """Yield ms of a step of the last round; Fisher passes and evaluation are shared out."""
    job, one, _ = list(pair.rounds())[-1]
    for half in pair.halves:
        cuda = half.me.device.type == "cuda"
        for autocast in ("off", "bf16", "fp16") if cuda else ("off", "bf16"):
            half.me = replace(half.me, autocast=autocast)
            best = seconds(lambda half=half: half.train(job), half.me.device, args.repeats)
            yield f"{half.me.device.type} {autocast}", 1000 * best / one.steps


def tf32(allowed: bool) -> None:
    torch.backends.cudnn.allow_tf32 = allowed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device is visible: nothing was checked (--device cpu tries the script)")
        return 2
    device = torch.device(args.device)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "the CPU itself"
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, against {name}")
    print(f"torch {torch.__version__}, {args.model}, {args.samples} samples, batch {args.batch}\n")
    differs = False
    for method in OPTIONS:
        tf32(False)
        found = compare(Pair(method, args, device))
        tf32(True)
        wrong = [what for what, value in found.items() if not value <= LIMITS[what]]
        differs = differs or bool(wrong)
        shown = ", ".join(f"{what} {value:.1e}" for what, value in found.items())
        print(f"{method}: {'DIFFERS in ' + ', '.join(wrong) if wrong else 'same'} ({shown})")
        for what, ms in times(Pair(method, args, device), args):
            print(f"  {what:10} {ms:8.2f} ms a step")
    return int(differs)


if __name__ == "__main__":
    sys.exit(main())
