"""How often `hvdkit check` is wrong: correct scripts that it blames, and injected mistakes that it does not see.

    python benchmarks/check_rates.py
    python benchmarks/check_rates.py --missed
    python benchmarks/check_rates.py --scripts ~/horovod/examples/pytorch/*.py

Correct scripts are those of ``examples/`` and ``tests/data/check/correct/`` that train in several processes. Each
mistake of ``check_mistakes.py`` is injected in each of them, at one place after the other, wherever the script has such
a place. A mistake is missed when the rule that it breaks is reported no more often than for the script as it was.
Printed are, by rule, the correct scripts with a finding (false) and the injected mistakes that were not found (missed),
with the upper end of the exact 95 % interval of each share (Clopper and Pearson 1934, Biometrika 26:404).
Nothing is run: a script is read, changed in memory and read again.
"""

import argparse
import ast
import copy
import re
import sys
from collections import Counter
from pathlib import Path

from check_mistakes import MISTAKES, Text

from hvdkit.prepare.check.rules import RULES, check_script
from hvdkit.prepare.check.source import Script, read_script

SEVERAL = re.compile(
    r"^\s*(import|from) (horovod|hvdkit\.(torch|tensorflow|keras|arrays)|torch\.distributed)", re.MULTILINE
)
ROOT = Path(__file__).parents[1]
CORRECT = ("examples/*/*.py", "tests/data/check/correct/*.py")


def correct_scripts():
    paths = [path for pattern in CORRECT for path in sorted(ROOT.glob(pattern))]
    return [str(path) for path in paths if SEVERAL.search(path.read_text())]


def found(path, tree):
    """How often each rule is broken."""
    return Counter(finding.rule for finding in check_script(Script(path, tree)).findings)


def injected(tree):
    """The rule, the mistake and the changed text, for every mistake at every place of a script."""
    for mistake in MISTAKES:
        for place in range(len(list(mistake.inject(Text(copy.deepcopy(tree)))))):
            changed = Text(copy.deepcopy(tree))
            list(mistake.inject(changed))[place]()
            yield mistake, changed.written()


def measure(paths, missed):
    """By rule: correct scripts with a finding, injected mistakes, and those of them that were not found."""
    false, injected_, lost, clean = Counter(), Counter(), Counter(), 0
    for path in paths:
        tree = read_script(path).tree
        before = found(path, tree)
        false.update(set(before))
        clean += not before
        for mistake, text in injected(tree):
            injected_[mistake.rule] += 1
            if found(path, ast.parse(text))[mistake.rule] <= before[mistake.rule]:
                lost[mistake.rule] += 1
                missed(path, mistake, text)
    return false, injected_, lost, len(paths) - clean


def at_most(hits, trials):
    """The upper end of the exact 95 % interval of a share, in per cent."""
    from scipy.stats import binomtest

    return 100 * binomtest(hits, trials).proportion_ci(method="exact").high


def table(paths, missed=lambda *_: None):
    false, injected_, lost, blamed = measure(paths, missed)
    lines = ["| rule | false | injected | missed |", "|---|---|---|---|"]
    for name in dict.fromkeys(rule.name for rule in RULES):
        lines.append(f"| {name} | {false[name]} | {injected_[name]} | {lost[name]} |")
    total, gone = sum(injected_.values()), sum(lost.values())
    lines.append(f"| all | {blamed} of {len(paths)} scripts | {total} | {gone} |")
    shares = [f"{100 * hits / trials:.1f} % (at most {at_most(hits, trials):.1f} %)" for hits, trials in
              ((blamed, len(paths)), (gone, total)) if trials]  # fmt: skip
    return "\n".join([*lines, "", f"False positives: {shares[0]}. Missed: {shares[-1]}."])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scripts", nargs="+", metavar="SCRIPT.py", help="these instead of the repository's")
    parser.add_argument("--missed", action="store_true", help="print the mistakes that were not found")
    parser.add_argument("--write", type=Path, metavar="DIRECTORY", help="write all changed scripts there")
    args = parser.parse_args()
    paths = args.scripts or correct_scripts()
    if args.write:
        write(paths, args.write)

    def show(path, mistake, _):
        print(f"missed: {path}: {mistake.rule}: {mistake.what}", file=sys.stderr)

    print(table(paths, show if args.missed else lambda *_: None))


def write(paths, directory):
    """Every changed script as a file, for a look at it."""
    for path in paths:
        folder = directory / "-".join(Path(path).parts[-2:]).removesuffix(".py")
        folder.mkdir(parents=True, exist_ok=True)
        for number, (mistake, text) in enumerate(injected(read_script(path).tree)):
            (folder / f"{mistake.rule}-{number}.py").write_text(f"# injected: {mistake.what}\n{text}\n")


if __name__ == "__main__":
    main()
