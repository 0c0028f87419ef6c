"""How often `hvdkit explain` is right: each cause planted in real jobs at three strengths, and jobs with nothing wrong.

    python benchmarks/explain.py --repeats 1 --only input,healthy
    python benchmarks/explain.py --repeats 5 --out explain.jsonl

A job is two ranks of PyTorch that know nothing of being recorded. A cause is planted by sleeping or computing, so long
that it costs about 5, 20 or 60 % of a step (a shared core: as a neighbour's priority has it); a job with nothing wrong
only trains. A job is right when the first cause that is named is the planted one, with its rank, and a job with nothing
wrong when none is named. What other programs do on this machine is a cause, too, and often the true one: run it on a
quiet machine with four cores or more.
Prints a confusion matrix, planted causes down, named ones across.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
STRENGTHS = (0.05, 0.2, 0.6)
STEP_S, STEPS = 0.03, 150
SLOW = 1
SCRIPT = """
import hashlib, os, random, subprocess, sys, threading, time
import torch
import hvdkit.torch as hk

cause, more, strength = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
world = hk.init()
hk.pin_device(world)
mine = world.rank == 1
draw = random.Random(world.rank)

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return world.size * STEPS
    def __getitem__(self, index):
        self.count = getattr(self, "count", 0) + 1
        if cause == "input" and mine and self.count % 3:
            time.sleep(1.5 * more)
        if cause == "input-everywhere":
            time.sleep(more)
        return torch.ones(64)

def busy(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        torch.ones(1000).sum()

def work(seconds):
    "So much of the processor's time, not of the clock's."
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        torch.ones(1000).sum()

def hash_on():
    while True:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 200_000)

if cause == "host" and mine:
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
    nice = {0.05: 15, 0.2: 6, 0.6: 0}[strength]
    neighbour = subprocess.Popen(["nice", "-n", str(nice), sys.executable, "-c", "while True: pass"])
if cause == "few-cores":
    for _ in range({0.05: 0, 0.2: 1, 0.6: 2}[strength]):
        threading.Thread(target=hash_on, daemon=True).start()

model = torch.nn.Linear(64, 64)
optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.01), model)
hk.broadcast_state(model, optimizer)
for step, x in enumerate(hk.shard(Samples(), world, batch_size=1)):
    optimizer.zero_grad()
    loss = model(x).sum()
    if cause in ("host", "few-cores"):
        work(STEP_S)
    else:
        time.sleep(STEP_S)
    if cause == "compute" and mine:
        busy(more)
    if cause == "random-late" and mine and draw.random() < 0.1:
        time.sleep(10 * more)
    if cause == "first-step" and step == 0:
        time.sleep(more * STEPS)
    loss.backward()
    optimizer.step()
if cause == "host" and mine:
    neighbour.kill()
"""
PLANTED = {
    "healthy": (None, None),
    "input": ("input", (SLOW,)),
    "compute": ("compute", (SLOW,)),
    "random-late": ("random-late", (SLOW,)),
    "input-everywhere": ("input-everywhere", ()),
    "host": ("host", (SLOW,)),
    "few-cores": ("few-cores", ()),
    "first-step": ("first-step", ()),
}
"""By what is planted: the kind that should be named first, and its ranks."""


def run(cause, strength, place):
    """The first cause that is named of one job, (kind, ranks) or (None, None), and the whole answer."""
    script = place / "train.py"
    script.write_text(SCRIPT.replace("STEPS", str(STEPS)).replace("STEP_S", str(STEP_S)))
    more = STEP_S * strength / (1 - strength)
    ours = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM_", "HVDKIT_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    command = [sys.executable, "-m", "hvdkit.cli", "launch", "-n", "2", "--threads", "1", "--explain-job"]
    words = [*command, "--explain-dir", str(place / "job"), "--", str(script), cause, str(more), str(strength)]
    if cause == "few-cores":  # both ranks on one core
        words = ["taskset", "-c", str(min(os.sched_getaffinity(0))), *words]
    subprocess.run(words, cwd=place, env=environment, check=True, capture_output=True, timeout=900)
    said = [sys.executable, "-m", "hvdkit.cli", "explain", "--json", str(place / "job")]
    found = json.loads(subprocess.run(said, env=environment, check=True, capture_output=True, timeout=300).stdout)
    first = next(iter(found["causes"]), None)
    return (first["kind"], tuple(first["ranks"])) if first else (None, None), found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="jobs of each cause at each strength")
    parser.add_argument("--only", default=",".join(PLANTED), help="which causes, of " + ", ".join(PLANTED))
    parser.add_argument("--out", type=Path, help="a line of JSON for every job")
    arguments = parser.parse_args()
    table, right, jobs = Counter(), Counter(), Counter()
    for cause in arguments.only.split(","):
        for strength in STRENGTHS:
            for _ in range(arguments.repeats):
                with tempfile.TemporaryDirectory() as place:
                    named, found = run(cause, strength, Path(place))
                table[cause, named[0] or "none"] += 1
                jobs[cause] += 1
                right[cause] += named == PLANTED[cause]
                line = {"planted": cause, "strength": strength, "named": named[0], "ranks": named[1]}
                line |= {"causes": [[one["kind"], one["share"]] for one in found["causes"]], "step_s": found["step_s"]}
                print(json.dumps(line), flush=True)
                if arguments.out:
                    with arguments.out.open("a") as file:
                        file.write(json.dumps(line) + "\n")
    names = sorted({name for _, name in table})
    print(f"\n| planted | {' | '.join(names)} | right |\n|{'---|' * (len(names) + 2)}")
    for cause in jobs:
        counts = " | ".join(str(table[cause, name]) for name in names)
        print(f"| {cause} | {counts} | {right[cause]} of {jobs[cause]} |")


if __name__ == "__main__":
    main()
