"""Train the example CNNs with two Horovod processes each and show the results in one table: what `make demo` runs."""

import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).parent
PROCESSES = 2
EXAMPLES = {
    "PyTorch": HERE / "pytorch" / "cnn.py",
    "TensorFlow": HERE / "tensorflow" / "cnn.py",
    "Keras": HERE / "keras" / "cnn.py",
}
RESULTS = {
    "images/s": re.compile(r"Training: ([\d.]+) images/s"),
    "accuracy": re.compile(r"Test accuracy: ([\d.]+) %"),
    "seconds": re.compile(rf"Hvd Procs {PROCESSES} Total time: ([\d.]+) second"),
}


def train(script: Path) -> dict[str, float]:
    """Run one example, showing its output as it comes; what its last lines say."""
    command = [sys.executable, "-m", "hvdkit.cli", "launch", "-n", str(PROCESSES), "--", sys.executable, str(script)]
    found: dict[str, float] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace") as process:
        for line in process.stdout or ():
            print(line, end="", flush=True)
            for name, pattern in RESULTS.items():
                if match := pattern.search(line):
                    found[name] = float(match[1])
    if process.returncode != 0 or len(found) < len(RESULTS):
        sys.exit(f"demo: {script.relative_to(HERE.parent)} failed (status {process.returncode}); see its output above.")
    return found


def main() -> None:
    table = Table(title="CNN on handwritten digits")
    for heading in ("framework", "processes", "accuracy", "time", "images/s"):
        table.add_column(heading, justify="left" if heading == "framework" else "right")
    for framework, script in EXAMPLES.items():
        print(f"\n{framework}: hvdkit launch -n {PROCESSES} -- python {script.relative_to(HERE.parent)}", flush=True)
        found = train(script)
        row = (f"{found['accuracy']:.2f} %", f"{found['seconds']:.1f} s", f"{found['images/s']:.0f}")
        table.add_row(framework, str(PROCESSES), *row)
    print()
    Console(width=None if sys.stdout.isatty() else 100).print(table)
    cores = len(os.sched_getaffinity(0))
    print(f"{PROCESSES} processes shared {cores} cores: the times show that it works, not how it scales.")


if __name__ == "__main__":
    main()
