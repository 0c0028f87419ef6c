"""Where programs that `make test` runs use each public name of an adapter; which public methods are for no user."""

import ast
import re
import textwrap
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
ADAPTERS = ("torch", "tensorflow", "keras", "arrays")
FOR_HVDKIT = {
    "ElasticBase": "reset",
    "ElasticState": "reset",
    "Evaluation": "tf_dataset",
    "GradientOptions": "require_possible",
    "InEpochs": "follow require_state",
    "Monitor": "arrived asked done finished follow given go_to looked norm ready saved stepped taken wants_norm",
    "Position": "after next_epoch of state",
    "Shard": "facts identity",
    "ShardedData": "advance ends_with_filler fills go_to num_batches parts reader steps_done tf_dataset",
    "ShardedFiles": "",
    "ShardedState": "exchange",
    "ShardedStream": "failure first_of_all go_to parts reader",
    "StreamInEpochs": "advance fills goes_on steps_done",
    "StreamPosition": "after next_epoch of state",
    "StreamShare": "facts",
    "Warmup": "after_steps follow go_to",
    "_Rate": "after_steps give multiply steps",
    "LearningRateSchedule": "after_steps",
}
"""By class, the public methods that other files of hvdkit call, and no user: the page leaves them out."""
HELD_AS = {
    "CheckAgreement": "check", "Checkpoints": "checkpoints store", "ElasticState": "state", "Monitor": "monitor",
    "OuterSteps": "steps", "Pending": "pending", "RecordedSteps": "loader", "Reduce": "reduce", "Seeds": "seeds",
    "ShardedArrays": "loader data", "ShardedData": "loader data", "ShardedDataset": "loader dataset data",
    "ShardedLoader": "loader data", "ShardedState": "shards", "ShardedStream": "loader data",
    "TimelineSteps": "recording", "Warmup": "schedule",
}  # fmt: skip
"""What the programs call an object of a class that they hold."""
MADE_BY = {
    "Pending": "reduce.start", "RecordedSteps": "hk.record_steps", "Reduce": "hk.distribute",
    "Saved": "checkpoints.restore", "Seeds": "hk.seed_everything",
    "ShardedArrays": "hk.shard", "ShardedData": "hk.shard", "ShardedDataset": "hk.shard",
    "ShardedFiles": "hk.shard_files", "ShardedLoader": "hk.shard", "ShardedStream": "hk.shard",
    "TimelineSteps": "hk.record_timeline", "Topology": "hk.init",
}  # fmt: skip
"""Where they get an object of a class that a function makes."""
_LINES = 10


def public(adapter: str) -> list[str]:
    """The names in ``__all__`` of an adapter."""
    for node in ast.parse((ROOT / "hvdkit" / adapter / "__init__.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise LookupError(f"hvdkit.{adapter} has no __all__")


@cache
def _programs(adapter: str) -> dict[str, list[str]]:
    """The lines of the adapter's examples, and then of the tests on ranks that name the adapter, by file."""
    examples = [
        path for path in sorted(ROOT.glob("examples/*/*.py")) if f"import hvdkit.{adapter} " in path.read_text()
    ]
    starts = re.compile(rf'import hvdkit\.{adapter} as hk|on_ranks\([^)]*"{adapter}|ON = "{adapter}')
    tests = [
        path
        for path in sorted(ROOT.glob("tests/parallel/*.py"))
        if path.stem != "test_horovods_own" and (adapter in path.stem or starts.search(path.read_text()))
    ]
    return {str(path.relative_to(ROOT)): path.read_text().splitlines() for path in (*examples, *tests)}


def is_for_users(class_name: str, method: str) -> bool:
    """Whether the page shows a public method: not what Keras calls, nor what hvdkit alone does."""
    called_by_keras = method.startswith("on_") or method == "set_model"
    return not called_by_keras and method not in FOR_HVDKIT.get(class_name, "").split()


def example(place: str) -> list[str]:
    """The lines of the statement at ``file:line``, the first ten."""
    file, _, number = place.rpartition(":")
    text = (ROOT / file).read_text()
    around = (
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.stmt) and node.lineno <= int(number) <= (node.end_lineno or node.lineno)
    )
    first, last = max(around)
    if int(number) - first >= _LINES:  # far within a program that a test writes
        first, last = int(number), int(number)
    return textwrap.dedent("\n".join(text.splitlines()[first - 1 : min(last, first + _LINES - 1)])).splitlines()


@cache
def _names(file: str) -> list[tuple[str, int]]:
    """What a program takes of ``hk`` and ``hvdkit.ADAPTER``, with the line, in its own code and not in its strings."""
    nodes = ast.walk(ast.parse((ROOT / file).read_text()))
    return sorted((ast.unparse(node), node.lineno) for node in nodes if isinstance(node, ast.Attribute))


def uses(adapter: str, name: str) -> list[str]:
    """At most two places, ``file:line``, an example before a test.

    Args:
        adapter: whose programs are read.
        name: a public one, ``Class.method``, or a class that a function makes.
    """
    owner, _, method = name.rpartition(".")
    wanted = {f"hk.{name}", f"hvdkit.{adapter}.{name}", f"hvdkit.{name}", MADE_BY.get(name, "")}
    wanted |= {f"{held}.{method}" for held in HELD_AS.get(owner, "").split()}
    programs = _programs(adapter)
    lines = [(file, next((line for used, line in _names(file) if used in wanted), 0)) for file in programs]
    if not any(line for _, line in lines) and not owner:  # in a program that a test writes
        written = re.compile(rf"\b(?:hk|hvdkit\.{adapter})\.{name}\b")
        lines = [
            (file, next((i for i, line in enumerate(text, 1) if written.search(line)), 0))
            for file, text in programs.items()
        ]
    return [f"{file}:{line}" for file, line in lines if line][:2]
