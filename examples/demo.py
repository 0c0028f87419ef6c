"""Train the example CNNs in one process and in two, and show the results in one table: what `make demo` runs."""

import importlib.util
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
PROCESSES = 2
EXAMPLES = {"PyTorch": HERE / "pytorch", "TensorFlow": HERE / "tensorflow", "Keras": HERE / "keras"}
PACKAGES = {"PyTorch": "torch", "TensorFlow": "tensorflow", "Keras": "keras"}
RESULTS = {
    "images/s": re.compile(r"Training: ([\d.]+) images/s"),
    "accuracy": re.compile(r"Test accuracy: ([\d.]+) %"),
    "seconds": re.compile(r"Total time: ([\d.]+) second"),
}
NEXT = f"""Next:
  {Path(sys.executable).parent / "hvdkit"} launch -n 4 -- python examples/pytorch/cnn.py --epochs 4
  diff examples/pytorch/single.py examples/pytorch/cnn.py    what distributed training added"""


def train(script: Path, processes: int) -> dict[str, float]:
    """Run one example on so many processes, showing what several of them print as it comes; what its last lines say."""
    python = [sys.executable, str(script), "--log_interval", "1000"]
    launch = [sys.executable, "-m", "hvdkit", "launch", "-n", str(processes), "--", *python]
    command = python if processes == 1 else launch
    said: list[str] = []
    # TensorFlow's start-up lines of a lone process go the way of its other output; the launcher leaves those out.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as process:
        for line in process.stdout or ():
            said.append(line)
            if processes > 1:
                print(f"  {line}", end="", flush=True)
    found = {name: float(match[1]) for name, pattern in RESULTS.items() if (match := pattern.search("".join(said)))}
    if process.returncode != 0 or len(found) < len(RESULTS):
        sys.stdout.writelines(said if processes == 1 else [])
        sys.exit(f"demo: {script.relative_to(HERE.parent)} failed (status {process.returncode}); see its output above.")
    return found


def main() -> None:
    begin = time.perf_counter()
    table = Table(title="CNN on scikit-learn's handwritten digits")
    table.add_column("")
    for processes in ("1 process", f"{PROCESSES} processes"):
        for result in ("accuracy", "time", "images/s"):
            table.add_column(f"{processes}\n{result}", justify="right")
    for framework, folder in EXAMPLES.items():
        found_at = importlib.util.find_spec(PACKAGES[framework])
        if found_at is None or found_at.origin is None:  # at most the folder of that name beside this script
            continue
        row = [framework]
        for processes, script in ((1, folder / "single.py"), (PROCESSES, folder / "cnn.py")):
            launch = "" if processes == 1 else f"hvdkit launch -n {processes} -- "
            print(f"{framework}: {launch}python {script.relative_to(HERE.parent)}", flush=True)
            found = train(script, processes)
            row += [f"{found['accuracy']:.2f} %", f"{found['seconds']:.1f} s", f"{found['images/s']:.0f}"]
        table.add_row(*row)
    print()
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    cores = len(os.sched_getaffinity(0))
    print(f"{PROCESSES} processes shared {cores} cores: the times show that it works, not how it scales.")
    print(f"The demo took {time.perf_counter() - begin:.0f} s. {NEXT}")


if __name__ == "__main__":
    main()
