"""All that hvdkit does with GPUs, run on this machine's cards in under 8 minutes: one JSON file and one page.

    python benchmarks/gpu.py -o DIR                       every section, into DIR/gpu.json, gpu.md and gpu.log
    python benchmarks/gpu.py -o DIR --only host-mpi,timeline
    python benchmarks/gpu.py -o DIR --device cpu          the same programs on CPU tensors, to try the kit itself

Each section runs in processes of its own and has a time limit of its own. One that fails is recorded with its last
lines, and the others go on; both files are written anew after each. Without a card the sections that need one say so.

Two ranks on one card: over the host (HOROVOD_GPU_OPERATIONS=CPU, `hvdkit install --gpu nccl`), and over NCCL, which
refuses it unless each rank says that it is on a host of its own (NCCL_HOSTID); then the ranks talk over sockets.
Exit status: 0 when no section failed, 1 when one did, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RANK = ROOT / "benchmarks" / "gpu_rank.py"
HVDKIT = [sys.executable, "-m", "hvdkit"]
LIMIT_S = 460.0
"""For all sections together; those that there is no time left for are skipped."""
GRACE_S = 10.0
LINES = 30
"""Last lines of output that are kept of a command that failed."""
THROUGH_HOST = {"HOROVOD_GPU_OPERATIONS": "CPU"}
ALONE_ON_HOST = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "WARN"}
OVERFLOW_STEP = 3
"""In which the last rank's loss is infinite, with float16."""


class SectionError(Exception):
    """A section that failed; ``lines`` are those of its output."""

    def __init__(self, why: str, lines: Sequence[str] = ()) -> None:
        super().__init__(why)
        self.lines = list(lines)


class SkippedError(Exception):
    """A section that does not apply here; the text says why."""


@dataclass(frozen=True)
class Section:
    """One thing to show: ``run`` gives its numbers, with what they say in words under "says"."""

    name: str
    title: str
    limit_s: float
    run: Callable[[Kit], dict[str, Any]]
    cards: int = 1


class Kit:
    """What a section works with.

    Args:
        device: "cuda" or "cpu".
        log: file that gets the output of every command.
        patience: what time limits are multiplied by.
    Attributes:
        machine: what the first section found; {} before it.
        deadline: of the section that runs, on ``time.monotonic``.
        work: an empty directory for it.
    """

    def __init__(self, device: str, log: Path, patience: float = 1.0) -> None:
        self.device, self.log, self.patience = device, log, patience
        self.machine: dict[str, Any] = {}
        self.deadline = 0.0
        self.work = Path()

    def run(self, *command: str, env: Mapping[str, str] | None = None, may_fail: bool = False) -> tuple[int, list[str]]:
        """Run a command to its end; returns its status and the lines that it printed.

        Raises:
            SectionError: it failed, unless it may, or did not end before the section's deadline.
        """
        with tempfile.TemporaryFile("w+b") as output:
            process = subprocess.Popen(
                command,
                env={**environment(), **(env or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self.work,
                start_new_session=True,
            )
            try:
                status: int | None = process.wait(max(1.0, self.deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end(process)
            output.seek(0)
            text = output.read().decode(errors="replace")
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n$ {' '.join(command)}\n{text}\nstatus {status}\n")
        lines = [line for line in text.splitlines() if line.strip()]
        if status is None:
            raise SectionError("not done within the section's time limit", lines)
        if status and not may_fail:
            raise SectionError(f"{' '.join(command[1:4])} ... ended with status {status}", lines)
        return status, lines

    def hvdkit(self, *arguments: str, may_fail: bool = False) -> Any:
        """The JSON object that a command of hvdkit prints."""
        _, lines = self.run(*HVDKIT, *arguments, may_fail=may_fail)
        text = "\n".join(lines)
        try:
            return json.loads(text[text.index("{") :])
        except ValueError as error:
            raise SectionError(f"hvdkit {arguments[0]} printed no JSON", lines) from error

    def ranks(
        self, n: int, program: str, *arguments: str, env: Mapping[str, str] | None = None, options: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        """Start ``program`` of gpu_rank.py on n ranks with `hvdkit launch`; returns what each rank answers."""
        settings = [part for name, value in (env or {}).items() for part in ("--env", f"{name}={value}")]
        launch = [*HVDKIT, "launch", "-n", str(n), "--no-tag", *options, *settings, "--", *self.rank(program)]
        self.run(*launch, *arguments)
        return self.answers(n)

    def rank(self, program: str) -> list[str]:
        """The command line of one rank."""
        return [sys.executable, str(RANK), program, "--answers", str(self.work), "--device", self.device]

    def answers(self, n: int) -> list[dict[str, Any]]:
        """What n ranks have written, in their order."""
        files = [self.work / f"rank-{rank}.json" for rank in range(n)]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise SectionError(f"no answer of {', '.join(missing)}")
        return [json.loads(file.read_text()) for file in files]

    def between(self) -> tuple[dict[str, str], list[str]]:
        """The environment and options of two ranks here: NCCL on two cards, else over the host."""
        if self.device == "cuda" and self.machine.get("cards", 0) > 1:
            return {}, []
        return THROUGH_HOST, [] if self.machine.get("mpi") else ["--launcher", "horovodrun"]


def environment() -> dict[str, str]:
    """Of every command: this checkout's hvdkit, the same sums in every run, and no settings of another Horovod."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "HVDKIT_", "NCCL_"))}
    path = os.pathsep.join([str(ROOT), str(RANK.parent), *filter(None, [kept.get("PYTHONPATH")])])
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return {**kept, **as_root, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command: a launcher is asked first, so that it can end its ranks."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# The sections ---------------------------------------------------------------------------------------------------------


def machine(kit: Kit) -> dict[str, Any]:
    kit.run(*kit.rank("machine"))
    (found,) = kit.answers(1)
    kit.machine = found
    built = [name.upper() for name in ("mpi", "gloo", "nccl") if found[name]]
    cards = f"{found['cards']} x {found['names'][0]}" if found["cards"] else f"no CUDA device ({found['why']})"
    says = [
        f"{cards}; {found['cores']} cores; Python {found['python']}.",
        f"PyTorch {found['torch']}, its NCCL {found['nccl_version']}.",
        f"Horovod {found['horovod']} with {', '.join(built)}; hvdkit {found['hvdkit']}.",
    ]
    return {**found, "says": says}


def doctor(kit: Kit) -> dict[str, Any]:
    found = kit.hvdkit("doctor", "--json", may_fail=True)
    findings = [f"{one['level']}: {one['what']}" for one in found["findings"]]
    return {"ok": found["ok"], "findings": findings, "says": findings or ["hvdkit doctor finds nothing wrong."]}


def alone(kit: Kit) -> dict[str, Any]:
    timeline = kit.work / "timeline.json"
    found = exchanged(kit.ranks(1, "exchange", options=["--timeline", str(timeline)]))
    over = activities(timeline)
    found["says"].append(f"Horovod's timeline names {', '.join(over) or 'no activity'}.")
    if kit.device == "cuda" and not any(name.startswith("NCCL_") for name in over):
        raise SectionError(f"nothing went over NCCL: {found['says']}")
    return {**found, "activities": over}


def host_mpi(kit: Kit) -> dict[str, Any]:
    if not kit.machine.get("mpi"):
        raise SkippedError("this Horovod was built without MPI")
    return exchanged(kit.ranks(2, "exchange", env=THROUGH_HOST, options=["--launcher", "mpirun"]))


def host_gloo(kit: Kit) -> dict[str, Any]:
    return exchanged(kit.ranks(2, "exchange", env=THROUGH_HOST, options=["--launcher", "horovodrun"]))


def nccl_shared(kit: Kit) -> dict[str, Any]:
    try:
        found = exchanged(kit.ranks(2, "exchange", env={"NCCL_DEBUG": "WARN"}))
    except SectionError as error:
        said = [line.strip() for line in error.lines if "NCCL WARN" in line or "ncclInvalid" in line]
        if not said:
            raise
        return {"works": False, "nccl_said": said, "says": ["NCCL refuses it: " + said[0]]}
    return {"works": True, **found}


def nccl_apart(kit: Kit) -> dict[str, Any]:
    timeline = kit.work / "timeline.json"
    options = ["--timeline", str(timeline)]
    found = exchanged(kit.ranks(2, "exchange", "--apart", env=ALONE_ON_HOST, options=options))
    return {**found, "activities": activities(timeline)}


def amp(kit: Kit) -> dict[str, Any]:
    found = trained(kit, "fp16")
    (scale,) = {one["fp16"]["scale"] for one in found["ranks"]}
    skipped = {tuple(one["fp16"][name]) for one in found["ranks"] for name in ("skipped", "skipped_alone")}
    if skipped != {(OVERFLOW_STEP,)}:
        raise SectionError(
            f"rank 1 overflowed in step {OVERFLOW_STEP}, and the ranks (or one alone) skipped {sorted(skipped)}"
        )
    found["says"].append(f"Rank 1 alone overflowed in step {OVERFLOW_STEP}: all skipped it, scale {scale:g} on all.")
    return found


def timeline(kit: Kit) -> dict[str, Any]:
    file, job = kit.work / "timeline.json", kit.work / "job"
    env, options = kit.between()
    recording = ["--timeline", str(file), "--explain-job", "--explain-dir", str(job)]
    kit.ranks(2, "train", "--variants", "fp32", "--steps", "60", env=env, options=[*options, *recording])
    summary = kit.hvdkit("timeline", "summary", "--json", str(file))
    _, verdict = kit.run(*HVDKIT, "explain", str(job), str(file))
    names = activities(file)
    steps = summary["steps"]["count"] if summary["steps"] else 0
    says = [f"{steps} steps in the timeline; {', '.join(names)}.", verdict[0]]
    return {"activities": names, "summary": summary, "says": says, "lines": verdict}


def emulate(kit: Kit) -> dict[str, Any]:
    cards = kit.machine.get("cards", 0) if kit.device == "cuda" else 0
    runs = {"horovod": 2, "nccl": min(2, cards)} if cards else {"horovod": 2, "gloo": 2}
    tables = []
    for engine, n in runs.items():
        sizes = ["--sizes", "4000000,803840,131584,2600", "--trials", "10"]
        _, lines = kit.run(*HVDKIT, "emulate", "-n", str(n), "--engine", engine, *sizes)
        tables += [line for line in lines if ": trial " not in line]
    says = ", ".join(f"{engine} on {n} rank(s)" for engine, n in runs.items())
    return {"says": [f"Replayed by {says}; every element right."], "lines": tables}


def memory(kit: Kit) -> dict[str, Any]:
    asked = ["--model", f"{RANK}:wide", "--batch", "512", "--optimizer", "momentum", "-n", "1,2", "--json"]
    if kit.device == "cpu":  # which has no allocator that says what it held at most
        asked.append("--measure")
    found = kit.hvdkit("plan", "memory", *asked)
    predicted, workspaces = found["need"]["peak"], 0
    measured = found["measured_peak"]
    if kit.device == "cuda":
        (rank,) = kit.ranks(1, "memory")
        measured, workspaces = rank["peak"], rank["workspaces"]
    off = (predicted + workspaces) / measured - 1
    says = [
        f"Predicted peak of a step {predicted / 1e6:.1f} MB and {workspaces / 1e6:.1f} MB of cuBLAS' workspaces; the "
        f"allocator held {measured / 1e6:.1f} MB: {off:+.1%}."
    ]
    return {
        "predicted_peak": predicted,
        "workspaces": workspaces,
        "measured_peak": measured,
        "off": off,
        "says": says,
    }


def peers(kit: Kit) -> dict[str, Any]:
    cards = kit.machine.get("cards", 0)
    if kit.device == "cuda" and cards < 2:
        raise SkippedError(f"DistributedDataParallel over NCCL needs a card for each rank, and there is {cards}")
    times = {}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for turn in range(2):
        kit.run(*torchrun, *kit.rank("ddp")[1:])
        times[f"ddp {turn + 1}"] = max(one["step_ms"] for one in kit.answers(2))
        ranks = kit.ranks(2, "hvdkit")
        times[f"hvdkit {turn + 1}"] = max(one["step_ms"] for one in ranks)
    return {"step_ms": times, "says": [", ".join(f"{name}: {value:.2f} ms a step" for name, value in times.items())]}


def exchanged(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the ranks of an exchange found: every result of every collective, and a training against one process."""
    wrong = sorted({text for one in ranks for text in one["wrong"]})
    if wrong:
        raise SectionError(f"{len(wrong)} of {ranks[0]['checked']} collectives are wrong", wrong)
    says = [
        f"{ranks[0]['checked']} collectives on each of {len(ranks)} rank(s), every element right.",
        same(ranks, "fp32"),
    ]
    return {"ranks": ranks, "says": says}


def trained(kit: Kit, *variants: str) -> dict[str, Any]:
    """Two ranks train each variant, and each of them repeats it as one process."""
    env, options = kit.between()
    ranks = kit.ranks(2, "train", "--variants", ",".join(variants), env=env, options=options)
    return {"ranks": ranks, "says": [same(ranks, variant) for variant in variants]}


def same(ranks: list[dict[str, Any]], variant: str) -> str:
    """What a training says beside that of one process.

    Raises:
        SectionError: the weights are others.
    """
    worst = max((one[variant] for one in ranks), key=lambda one: one["difference"])
    text = f"relative difference {worst['difference']:.1e} after {worst['steps']} steps"
    if not worst["difference"] <= worst["allowed"]:
        raise SectionError(f"{variant}: the weights are not those of one process: {text}")
    equal = "bit for bit" if all(one[variant]["bit_equal"] for one in ranks) else text
    return f"{variant}: weights as of one process, {equal}; {worst['step_ms']:.2f} ms a step."


def activities(file: Path) -> list[str]:
    """The names of what Horovod did in a timeline, such as NCCL_ALLREDUCE."""
    begun = re.findall(r'"ph": *"B", *"name": *"(\w+)"', file.read_text(encoding="utf-8", errors="replace"))
    return sorted({name for name in begun if name.isupper() and not name.startswith("NEGOTIATE")})


SECTIONS = [
    Section("machine", "the machine and what is installed", 60, machine, 0),
    Section("alone", "one rank over NCCL", 60, alone),
    Section("host-mpi", "two ranks on one card, through the host, over MPI", 60, host_mpi),
    Section("nccl-apart", "two ranks on one card over NCCL, each as a host of its own", 60, nccl_apart),
    Section("amp", "autocast and GradScaler, an overflow on one rank", 45, amp),
    Section("bf16", "bfloat16: autocast, and a model of it", 45, lambda kit: trained(kit, "autocast-bf16", "bf16")),
    Section("timeline", "a timeline, and what costs the job most time", 60, timeline),
    Section("nccl-shared", "two ranks on one card over NCCL, as they come", 45, nccl_shared),
    Section("memory", "hvdkit plan memory beside the allocator", 60, memory),
    Section("host-gloo", "two ranks on one card, through the host, over Gloo", 60, host_gloo),
    Section("emulate", "hvdkit emulate", 60, emulate, 0),
    Section("compile", "torch.compile", 90, lambda kit: trained(kit, "compile")),
    Section("doctor", "hvdkit doctor", 60, doctor, 0),
    Section("peers", "hvdkit beside DistributedDataParallel", 60, peers),
]


# The results ----------------------------------------------------------------------------------------------------------


def perform(section: Section, kit: Kit, until: float) -> dict[str, Any]:
    """Run one section; whatever becomes of it is its result."""
    begun = time.monotonic()
    result: dict[str, Any] = {"name": section.name, "title": section.title, "state": "passed", "says": []}
    with tempfile.TemporaryDirectory(prefix="hvdkit-gpu-", ignore_cleanup_errors=True) as work:
        kit.work, kit.deadline = Path(work), min(begun + section.limit_s * kit.patience, until)
        try:
            if until - begun < 15:
                raise SkippedError("no time left")
            if kit.device == "cuda" and section.cards > kit.machine.get("cards", 0):
                raise SkippedError(f"no CUDA device ({kit.machine.get('why') or 'the first section did not find one'})")
            result |= section.run(kit)
        except SkippedError as error:
            result |= {"state": "skipped", "says": [f"skipped: {error}"]}
        except SectionError as error:
            result |= {"state": "failed", "says": [f"failed: {error}"], "lines": error.lines[-LINES:]}
        except Exception as error:  # a mistake of the kit's own must not lose what the others found
            result |= {"state": "failed", "says": [f"failed: {type(error).__name__}: {error}"]}
    return {**result, "seconds": round(time.monotonic() - begun, 1)}


def page(found: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    rows = ["# hvdkit on GPUs", "", f"{found['when']}, on {found['device']} tensors, {found['seconds']:.0f} s.", ""]
    rows += ["| section | what | state | seconds |", "|---|---|---|---|"]
    for one in found["sections"]:
        rows.append(f"| {one['name']} | {one['title']} | {one['state']} | {one['seconds']:.0f} |")
    for one in found["sections"]:
        rows += ["", f"## {one['name']}: {one['title']}", "", *(f"- {text}" for text in one["says"])]
        if one.get("lines"):
            rows += ["", "```", *one["lines"], "```"]
    return "\n".join(rows) + "\n"


def write(found: Mapping[str, Any], folder: Path) -> None:
    """Both files, each there whole or as it was before."""
    for name, text in {"gpu.json": json.dumps(found, indent=1), "gpu.md": page(found)}.items():
        (folder / f".{name}").write_text(text, encoding="utf-8")
        (folder / f".{name}").replace(folder / name)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, default=Path(), help="directory of gpu.json, gpu.md and gpu.log")
    parser.add_argument("--only", help=f"sections, with commas: {', '.join(one.name for one in SECTIONS)}")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--patience", type=float, default=1.0, help="multiply all time limits, for a busy machine")
    args = parser.parse_args(arguments)
    names = [one.name for one in SECTIONS]
    wanted = names if args.only is None else ["machine", *args.only.split(",")]
    if unknown := sorted(set(wanted) - set(names)):
        parser.error(f"--only has the unknown section {unknown[0]!r}; expected some of {', '.join(names)}.")
    args.out.mkdir(parents=True, exist_ok=True)
    kit = Kit(args.device, (args.out / "gpu.log").resolve(), args.patience)
    kit.log.write_text("", encoding="utf-8")
    begun = time.monotonic()
    found: dict[str, Any] = {"when": time.strftime("%Y-%m-%d %H:%M"), "device": args.device, "sections": []}
    for section in [one for one in SECTIONS if one.name in wanted]:
        result = perform(section, kit, begun + LIMIT_S * args.patience)
        found["sections"].append(result)
        found["seconds"] = round(time.monotonic() - begun, 1)
        write(found, args.out)
        print(
            f"{result['state']:<8}{result['name']:<13}{result['seconds']:>6.1f} s  {'  '.join(result['says'])}",
            flush=True,
        )
        for line in result.get("lines", [])[-8:]:
            print(f"        {line}", flush=True)
    return int(any(one["state"] == "failed" for one in found["sections"]))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as by Ctrl-C, so that a section's processes end, too
    sys.exit(main())
