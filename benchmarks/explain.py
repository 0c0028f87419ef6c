"""How often `hvdkit explain` is right: each cause injected in real jobs at three strengths, and healthy jobs.

    python benchmarks/explain.py --out explain.jsonl --minutes 60
    python benchmarks/explain.py --out explain.jsonl --only torch/input,torch/healthy --strengths 0.6

A job is two ranks of a program that does not know of being recorded (`injected/`: PyTorch with Horovod alone,
TensorFlow, Keras). A cause is injected so that it costs about 15, 30 or 60 % of a step. A job is right when the first
cause that is named is the injected one, with its rank, and a job with nothing wrong when none is named. What other
programs do on this machine is a cause, too, and often the true one: run it on a quiet machine with four cores or more.
A long cycle is not injected: Horovod as `hvdkit install` builds it begins one when a tensor is there.
At strength 0 (`--strengths 0.4,0`) the same program runs without the cause: what leaving it out really saves is printed
beside what is said, and these jobs are healthy ones.

Every job is a line of JSON in --out. The same command again goes on after the last one. Strong causes come first, so
that few minutes have most causes once. Prints confusion matrices in Markdown, injected causes down, named ones across.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from hvdkit.common.plot import picture

HERE = Path(__file__).parent
STRENGTHS = (0.6, 0.3, 0.15)
SLOW = (1,)
"""The rank in which a cause sits that is of one rank, as ``injected/injecting.py`` has it."""
INJECTED = {
    "healthy": (("none", ()),),
    "input": (("input", SLOW),),
    "compute": (("compute", SLOW),),
    "logging": (("compute", SLOW),),
    "host": (("host", SLOW),),
    "random-late": (("random-late", SLOW),),
    "random-ranks": (("random-late", ()),),
    "input-everywhere": (("input-everywhere", ()),),
    "few-cores": (("few-cores", ()),),
    "small-tensors": (("small-tensors", ()),),
    "large-tensors": (("large-tensors", ()),),
    "new-names": (("negotiation", ()),),
    "first-step": (("first-step", ()),),
    "growth": (("growth", ()),),
    "stall": (("stall", ()),),
    "pause": (("pause", ()), ("stall", ())),
    "saving": (("pause", ()),),
    "evaluation": (("pause", (0,)),),
    "first-epoch": (("first-steps", ()),),
    "lock": (("blocked", SLOW),),
    "fsync": (("blocked", SLOW),),
    "gc": (("gc", ()),),
    "affinity": (("affinity", ()),),
    "half-of-the-ranks": (("compute", (0, 1)),),
    "slow-host": (("host", (2, 3)),),
    "metrics": (("metrics", ()),),
    "sparse-embedding": (("sparse", ()),),
    "dense-embedding": (("large-tensors", ()),),
}
"""By what is injected: the kinds that may be named first, with their ranks."""
RANKS = {"half-of-the-ranks": 4, "slow-host": 4}
"""How many, where it is not two."""
PROGRAMS = {
    "torch": ("loop_torch.py", tuple(INJECTED)),
    "tensorflow": ("loop_tensorflow.py", ("healthy", "input", "compute", "input-everywhere", "large-tensors")),
    "keras": ("fit_keras.py", ("healthy", "input", "compute", "logging", "input-everywhere", "first-step")),
}
"""By framework: its program, and the causes that are injected in it."""


def environment():
    """That of this process without what a job would take for its own."""
    ours = ("HOROVOD_", "OMPI_", "PMIX_", "PMI_", "SLURM_", "HVDKIT_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def settings(cause, strength):
    """--env of the launch command, by which some causes are injected."""
    show = "import injecting\nfor item in injecting.settings().items(): print('='.join(item))"
    words = [sys.executable, "-c", show, cause, str(strength)]
    said = subprocess.run(words, cwd=HERE / "injected", check=True, capture_output=True, text=True).stdout
    return [word for line in said.splitlines() for word in ("--env", line)]


def run(framework, cause, strength):
    """The line of one job."""
    with tempfile.TemporaryDirectory() as place:
        launch = [
            sys.executable,
            "-m",
            "hvdkit",
            "launch",
            "-n",
            str(RANKS.get(cause, 2)),
            "--threads",
            "1",
            "--explain-job",
        ]
        launch += ["--explain-dir", f"{place}/job", *settings(cause, strength)]
        words = [*launch, "--", str(HERE / "injected" / PROGRAMS[framework][0]), cause, str(strength)]
        if cause == "few-cores" and strength:  # both ranks on one core
            words = ["taskset", "-c", str(min(os.sched_getaffinity(0))), *words]
        begun = time.monotonic()
        done = subprocess.run(words, cwd=place, env=environment(), capture_output=True, text=True, timeout=900)
        if done.returncode:
            raise SystemExit(f"{framework}/{cause} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        explain = [sys.executable, "-m", "hvdkit", "explain", "--json", f"{place}/job"]
        found = json.loads(subprocess.run(explain, env=environment(), check=True, capture_output=True).stdout)
    causes = [[one["kind"], one["ranks"], round(one["share"], 3)] for one in found["causes"]]
    line = {"framework": framework, "injected": cause, "strength": strength, "causes": causes}
    first = found["causes"][0] if found["causes"] else {"lost_s": 0.0, "per_step": False, "what": ""}
    line |= {
        "what": first["what"],
        "saves_s": first["lost_s"] * (found["steps"] if first["per_step"] else 1),
        "whole_s": sum(found["accounts"].values()),
    }
    return line | {"step_s": found["step_s"], "seconds": round(time.monotonic() - begun, 1)}


def named(line):
    """What a job's answer names first, (kind, ranks)."""
    kind, ranks, _ = line["causes"][0] if line["causes"] else ("none", (), 0)
    return kind, tuple(ranks)


def matrix(lines, framework):
    """Injected causes down, named ones across, in Markdown."""
    lines = [line for line in lines if line["framework"] == framework]
    table = Counter((line["injected"], named(line)[0]) for line in lines)
    names = sorted({name for _, name in table})
    rows = [f"| {framework}: injected | {' | '.join(names)} | right |", f"|{' --- |' * (len(names) + 2)}"]
    for cause in [cause for cause in INJECTED if any(line["injected"] == cause for line in lines)]:
        of_it = [line for line in lines if line["injected"] == cause]
        right = sum(named(line) in INJECTED[cause] for line in of_it)
        rows.append(f"| {cause} | {' | '.join(str(table[cause, name]) for name in names)} | {right} of {len(of_it)} |")
    return "\n".join(rows)


def summary(lines):
    """Both numbers that are aimed at."""
    wrong = [line for line in lines if line["injected"] != "healthy" and line["strength"]]
    healthy = [line for line in lines if line["injected"] == "healthy" or not line["strength"]]
    right = sum(named(line) in INJECTED[line["injected"]] for line in wrong)
    false = sum(bool(line["causes"]) for line in healthy)
    return f"Right: {right} of {len(wrong)} jobs with a cause. False alarms: {false} of {len(healthy)} healthy jobs."


def savings(lines):
    """What the first cause is said to save beside what it saves to leave the cause out, in Markdown."""
    rows = ["| injected | first line | said to save | saves | ratio |", "|---|---|---|---|---|"]
    for line in lines:
        same = [one for one in lines if not one["strength"] and one["injected"] == line["injected"]]
        same = [one["whole_s"] for one in same if one["framework"] == line["framework"]]
        if line["strength"] and same and "whole_s" in line:
            saves = line["whole_s"] - statistics.median(same)
            ratio = f"{line['saves_s'] / saves:.2f}" if saves > 0 else "none: it took no longer with it"
            cells = line["framework"], line["injected"], line["what"], line["saves_s"], saves, ratio
            rows.append("| {}/{} | {} | {:.2f} s | {:.2f} s | {} |".format(*cells))
    return "\n".join(rows)


def recordings(seeds):
    """Print how often made-up recordings are explained rightly, at three strengths, and how right the saving is."""
    sys.path.insert(0, str(HERE.parent / "tests" / "tools"))
    import explain_jobs

    print("| injected | named first | with its ranks | said to save / saves: median, worst |\n|---|---|---|---|")
    right = count = close = 0
    for inject, (kind, ranks, _) in explain_jobs.INJECTED.items():
        ratios, named_right = [], []
        for strength in (0.5, 1.0, 2.0):
            for seed in range(seeds):
                job, took, without = explain_jobs.scaled(inject, strength, seed)
                found = job.told(Path("recordings"))
                first = found.causes[0] if found.causes else None
                named_right.append(first is not None and (first.kind, first.ranks) == (kind, ranks))
                if named_right[-1]:
                    saved = first.lost_s * (found.job.steps if first.per_step else 1)
                    ratios.append(saved / (took - without))
        worst = max(ratios, key=lambda one: abs(one - 1), default=float("nan"))
        middle = statistics.median(ratios) if ratios else float("nan")
        cells = inject.__name__.replace("_", " "), kind, f"{sum(named_right)} of {len(named_right)}", middle, worst
        print("| {} | {} | {} | {:.2f}, {:.2f} |".format(*cells), flush=True)
        right, count = right + sum(named_right), count + len(named_right)
        close += sum(abs(one - 1) <= 0.3 for one in ratios)
    alarms = total = 0
    for seed in range(100 * seeds):
        job = explain_jobs.Job((1, 2, 3, 4, 8, 16, 32)[seed % 7], seed=seed, noise=0.01 * (seed % 4))
        alarms, total = alarms + bool(job.told(Path("recordings")).causes), total + 1
    print(
        f"\nRight: {right} of {count}, {close} with a saving within 30 %. "
        f"False alarms: {alarms} of {total} healthy jobs."
    )


def plot(lines, path):
    """Draw injected causes down, named ones across, over all frameworks."""
    injected = [cause for cause in INJECTED if any(line["injected"] == cause for line in lines)]
    names = sorted({named(line)[0] for line in lines})
    table = Counter((line["injected"], named(line)[0]) for line in lines)

    def draw(axes):
        sums = {cause: sum(table[cause, name] for name in names) for cause in injected}
        shares = [[table[cause, name] / sums[cause] for name in names] for cause in injected]
        axes.imshow(shares, cmap="Blues", vmin=0, vmax=1, aspect="auto")
        axes.set_xticks(range(len(names)), names, rotation=35, ha="right", rotation_mode="anchor")
        axes.set_yticks(range(len(injected)), injected)
        for y, cause in enumerate(injected):
            for x, name in enumerate(names):
                if table[cause, name]:
                    color = "white" if shares[y][x] > 0.5 else "black"
                    axes.text(x, y, table[cause, name], ha="center", va="center", color=color)
        axes.set(xlabel="named first", ylabel="injected")
        axes.set_title(summary(lines), fontsize=9)

    path.write_bytes(picture(path.suffix, draw))


def main():
    every = [f"{framework}/{cause}" for framework, (_, causes) in PROGRAMS.items() for cause in causes]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recordings", type=int, metavar="SEEDS", help="of made-up recordings alone, no jobs; seconds")
    parser.add_argument("--out", type=Path, help="a line of JSON a job; what it has is not redone")
    parser.add_argument("--plot", type=Path, help="draw them all as one SVG or PNG; with --minutes 0 nothing else")
    parser.add_argument("--repeats", type=int, default=5, help="jobs of each cause at each strength")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no job after so many")
    parser.add_argument("--only", default=",".join(every), help="which jobs, of " + ", ".join(every))
    parser.add_argument("--strengths", default=",".join(map(str, STRENGTHS)), help="shares of a step, 0 to 1")
    arguments = parser.parse_args()
    if arguments.recordings:
        recordings(arguments.recordings)
        return
    if arguments.out is None:
        parser.error("--out FILE is needed")
    only = arguments.only.split(",")
    if unknown := sorted({*only} - {*every}):
        parser.error(f"--only names {', '.join(unknown)}; expected some of {', '.join(every)}")
    written = arguments.out.read_text().splitlines() if arguments.out.exists() else []
    lines = [json.loads(line) for line in written]
    done = Counter((line["framework"], line["injected"], line["strength"]) for line in lines)
    end = time.monotonic() + 60 * arguments.minutes
    plan = [
        (repeat, one, float(strength))
        for repeat in range(arguments.repeats)
        for strength in arguments.strengths.split(",")
        for one in only
    ]
    for repeat, one, strength in plan:
        framework, cause = one.split("/")
        if done[framework, cause, strength] > repeat:
            continue
        if time.monotonic() > end:
            break
        lines.append(run(framework, cause, strength))
        done[framework, cause, strength] += 1
        print(json.dumps(lines[-1]), flush=True)
        with arguments.out.open("a") as file:
            file.write(json.dumps(lines[-1]) + "\n")
    print(f"\n{savings(lines)}\n\n{summary(lines)}")
    lines = [line for line in lines if line["strength"]]
    for framework in PROGRAMS:
        if any(line["framework"] == framework for line in lines):
            print(f"\n{matrix(lines, framework)}")
    if arguments.plot:
        plot(lines, arguments.plot)


if __name__ == "__main__":
    main()
