"""The table of rules: a script in, lines out."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from hvdkit.prepare.check import find, find_collectives
from hvdkit.prepare.check.source import Script, too_deep
from hvdkit.prepare.check.steps import JudgedCase
from hvdkit.prepare.check.trace import Event

Place = Event | ast.expr | ast.keyword | int
"""Where a rule is broken: a call, an expression, or a line where the rule's words are enough."""


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Attributes:
        name: for people and programs.
        what: what is wrong; ``{}`` is the piece of the script.
        why: what comes of it.
        fix: what to write; of several, by library and framework: see ``_advice``.
        find: the places where that is certain.
    """

    name: str
    what: str
    why: str
    fix: str | dict[str, str]
    find: Callable[[JudgedCase], Iterable[Place]]


@dataclass(frozen=True)
class BrokenRule:
    """A rule that a script breaks.

    Attributes:
        line: where.
        rule: its name.
        what, why, fix: what is wrong, what comes of it, what to write.
    """

    line: int
    rule: str
    what: str
    why: str
    fix: str


def _blamed(number: int) -> Callable[[JudgedCase], Iterable[Place]]:
    """The lines where a step is missing for certain."""
    return lambda case: case.verdicts[number - 1].blamed


def _removed(called: str, fix: str, *words: str, imported: str = "", in_keras_2: bool = False) -> Rule:
    """A row for what worked with Keras 2, as Horovod's examples still have it, unless the script asks for a version.

    Args:
        called: pattern of the full name of what is called, or of its text where it has none.
        fix: what to write.
        words: the arguments that are removed; none where the function is.
        imported: how a name begins that the script has to import.
        in_keras_2: it is removed for scripts that ask for Keras 2, too.
    """

    def find_removed(case: JudgedCase) -> Iterator[Place]:
        is_other = imported and not any(name.startswith(imported) for name in case.imported)
        for event in case.events if not is_other and (in_keras_2 or not case.asks_for_keras_2) else ():
            if re.search(called, case.name(event.node) or ast.unparse(event.node.func)):
                if words:
                    yield from (keyword for keyword in event.node.keywords if keyword.arg in words)
                elif not case.asks_version(event):
                    yield event

    return Rule(
        "removed",
        "`{}` was removed: TensorFlow 2 and Keras 3 do not know it",
        "it raises an error, or is ignored",
        fix,
        find_removed,
    )


RULES = (
    Rule(
        "rank-not-called",
        "`{}` is used as a number, but it is a function that is not called",
        "a function never equals a number: the condition is the same on every rank, or the value is nonsense",
        "write `{}()`",
        find.uncalled,
    ),
    Rule(
        "init-missing",
        "the library is used and never initialised",
        "every call to it fails before init",
        {
            "ddp": "call torch.distributed.init_process_group() before anything else",
            "hvdkit": "call world = hk.init() before anything else",
            "horovod": "call hvd.init() before anything else",
        },
        _blamed(1),
    ),
    Rule(
        "gpu-not-pinned",
        "a GPU is used and none is chosen by the local rank",
        "all processes of a host use the same GPU, or each takes memory on all of them",
        {
            "ddp": 'after init: torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
            "hvdkit": "after init: hk.pin_device(world)",
            "horovod torch": "after init: torch.cuda.set_device(hvd.local_rank())",
            "horovod": "after init: tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU')",
        },
        _blamed(2),
    ),
    Rule(
        "gpu-pinned-by-global-rank",
        "`{}` chooses the GPU by the rank in the whole job",
        "ranks on the second host ask for GPUs that their host does not have",
        "use the rank on this host: hvd.local_rank(), or LOCAL_RANK under torchrun",
        find.pinned_by_global_rank,
    ),
    Rule(
        "learning-rate-unscaled",
        "the learning rate has no factor for the number of processes",
        "n processes average over n times the batch; with the rate of one process, training takes fewer and no larger "
        "steps",
        {
            "hvdkit": "use hk.scale_lr(lr, world), with a warmup",
            "horovod": "multiply it by hvd.size(), with a warmup",
        },
        _blamed(3),
    ),
    Rule(
        "optimizer-not-distributed",
        "nothing averages the gradients over the processes",
        "every process trains a model of its own",
        {
            "ddp": "train the wrapped model: model = DistributedDataParallel(model)",
            "hvdkit torch": "optimizer = hk.distribute(optimizer, model)",
            "hvdkit keras": "compile(optimizer=hk.distribute(optimizer))",
            "hvdkit tensorflow": "tape = hk.distribute(tape)",
            "hvdkit arrays": "take the mean of the gradients: hk.distribute(...)",
            "horovod torch": "optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())",
            "horovod keras": "compile(optimizer=hvd.DistributedOptimizer(optimizer))",
            "horovod": "tape = hvd.DistributedGradientTape(tape)",
        },
        find.not_distributed,
    ),
    Rule(
        "distributed-twice",
        "gradients that are averaged already are averaged once more here",
        "each step pays for communication twice, and with op=Sum the gradients are wrong",
        "distribute the optimizer or the tape, once; after Horovod's optimizer.synchronize(), step inside `with "
        "optimizer.skip_synchronize():`",
        find.distributed_twice,
    ),
    Rule(
        "gradients-not-averaged-yet",
        "`{}` works on gradients that are this rank's own: Horovod's optimizer averages them in step()",
        "every rank clips or scales another part, while it may be on its way: the model is not that of one process",
        "call optimizer.synchronize() before it and step inside `with optimizer.skip_synchronize():`; or use "
        "hvdkit.torch.distribute, with which gradients are the mean when backward() returns",
        find.early_uses,
    ),
    Rule(
        "closure-not-averaged",
        "`{}` is given a closure, and Horovod's optimizer averages before it calls that",
        "every rank steps by its own gradients; an optimizer that calls the closure again (LBFGS) raises an error",
        "call the closure first and then step() without it; or use hvdkit.torch.distribute, which LBFGS needs",
        find.closures,
    ),
    Rule(
        "keras-3-optimizer",
        "`{}` is Horovod's own wrapper for Keras optimizers, which as released does nothing in Keras 3",
        "Keras 3 does not call what Horovod overrides: training runs without an error and no gradient is averaged",
        "use hvdkit.keras.distribute(optimizer); the Horovod that 'hvdkit install' builds averages, too, in Keras 3 "
        "and in Keras 2 (tf_keras with TF_USE_LEGACY_KERAS)",
        find.horovods_keras_optimizers,
    ),
    Rule(
        "removed",
        "`{}` is TensorFlow 1's, whose graphs neither hvdkit nor Keras 3 trains",
        "it raises an error, or is ignored",
        "write it as Keras' fit (hvdkit.keras), or as a loop over tf.GradientTape (hvdkit.tensorflow)",
        lambda case: case.of_tensorflow_1,
    ),
    _removed(r"\.compile$", "leave it out", "experimental_run_tf_function", "sample_weight_mode", "target_tensors"),
    _removed(r"^keras\.optimizers\.", "write learning_rate=", "lr"),
    _removed(
        r"^keras\.optimizers\.",
        "Keras 3 ignores it: learning_rate=keras.optimizers.schedules.InverseTimeDecay(rate, 1, decay)",
        "decay",
    ),
    _removed(
        r"^keras\.callbacks\.ModelCheckpoint$",
        'save_freq="epoch", or save_freq=k * steps_per_epoch for every k-th epoch',
        *("period", "load_weights_on_restart"),
    ),
    _removed(
        r"^keras\.callbacks\.TensorBoard$",
        "leave it out: Keras 3's TensorBoard does not write that",
        *("batch_size", "write_grads", "embeddings_layer_names", "embeddings_data"),
    ),
    _removed(
        r"^keras\.(utils\.(np_utils|multi_gpu_model)|wrappers\.scikit_learn|layers\.CuDNN|backend\.tensorflow_backend)",
        "see keras.io/guides/migrating_to_keras_3 for what replaces it",
    ),
    _removed(
        r"\.(fit|evaluate|predict)(_generator)?$",
        "leave it out; a keras.utils.PyDataset takes workers= itself, and nb_epoch= is epochs=",
        *("workers", "use_multiprocessing", "max_queue_size", "nb_epoch"),
    ),
    _removed(
        r"^(tensorflow\.(ConfigProto|Session)|keras\.backend\.set_session)$",
        "TensorFlow 2 has no sessions: hk.pin_device(world), or "
        "tf.config.set_visible_devices(gpus[hvd.local_rank()], 'GPU')",
        in_keras_2=True,
    ),
    _removed(r"\.(fit|evaluate|predict)_generator$", "call fit, evaluate or predict, which take such data, too"),
    Rule(
        "removed",
        "`{}` is called, and is a list in Keras 3",
        "it raises an error",
        "write optimizer.variables, without the call",
        find.called_lists,
    ),
    _removed(
        r"keras\.preprocessing\.image\.ImageDataGenerator$",
        "put keras.layers.RandomRotation, RandomTranslation and RandomZoom into the model, or import it from "
        "tensorflow.keras.preprocessing.image",
        imported="keras.preprocessing.image",
    ),
    Rule(
        "broadcast-missing",
        "the state of model and optimizer is not sent from one rank to the others, or not all of it",
        "the ranks start from different values and stay different: averaging gradients does not bring them together",
        {
            "ddp": "wrap the model in DistributedDataParallel, which sends it",
            "hvdkit keras": "hk.BroadcastState() in fit's callbacks",
            "hvdkit": "before the first step: hk.broadcast_state(model, optimizer)",
            "horovod torch": "before training: hvd.broadcast_parameters(model.state_dict(), root_rank=0) and "
            "hvd.broadcast_optimizer_state(optimizer, root_rank=0)",
            "horovod keras": "hvd.callbacks.BroadcastGlobalVariablesCallback(0) in fit's callbacks",
            "horovod": "after the first step: hvd.broadcast_variables of the model and of the optimizer, root_rank=0",
        },
        _blamed(5),
    ),
    Rule(
        "broadcast-too-early",
        "the state is sent before it is complete",
        "the optimizer has no state yet, or a file replaces what was sent, and the ranks differ from then on",
        "build the optimizer and load the checkpoint first, then broadcast, then train",
        find.early_broadcasts,
    ),
    Rule(
        "seeded-too-late",
        "`{}` comes after the last broadcast_state, which gives each rank random numbers of its own",
        "every rank draws the same numbers in dropout, augmentation and noise",
        "move it above broadcast_state",
        find.late_seeds,
    ),
    Rule(
        "checkpoint-on-every-rank",
        "every rank writes this file",
        "processes that write one file at the same time leave a damaged one",
        "write it under `if hvd.rank() == 0:`, or use hk.Checkpoints; BackupAndRestore, which every rank must restore: "
        "give each rank a directory of its own, or train with hvdkit.keras, whose fit takes care of such callbacks",
        _blamed(6),
    ),
    Rule(
        "resume-on-some-ranks",
        "`{}` is given to some ranks only",
        "these ranks go on from the backup, in its epoch, and the others begin anew and wait for steps that never come",
        "give it to every rank, each with a directory of its own; or train with hvdkit.keras, whose fit lets the root "
        "back up and restores all ranks",
        find.lone_backups,
    ),
    Rule(
        "dataset-not-sharded",
        "every rank trains on the whole data set",
        "n processes do the same work n times, in an epoch that is as long as that of one process",
        {
            "ddp": "give each rank its part: DataLoader(dataset, sampler=DistributedSampler(dataset))",
            "hvdkit torch": "give each rank its part: hk.shard(dataset, world, batch_size)",
            "hvdkit": "give each rank its part: hk.shard((x, y), world, batch_size)",
            "horovod torch": "give each rank its part: DistributedSampler(dataset, num_replicas=hvd.size(), "
            "rank=hvd.rank())",
            "horovod": "give each rank its part: dataset.shard(hvd.size(), hvd.rank()), or "
            "x[hvd.rank()::hvd.size()] of arrays",
        },
        _blamed(7),
    ),
    Rule(
        "dataset-sharded-wrongly",
        "`{}` does not divide the data by size and rank",
        "some ranks get the same part, or none",
        "give the number of processes and the rank in the whole job: hvd.size() and hvd.rank(), each in its place",
        find.wrong_shards,
    ),
    Rule(
        "no-set-epoch",
        "this sampler shuffles and is never told which epoch it is",
        "every epoch has the same order and the same batches",
        "call sampler.set_epoch(epoch) at the start of each epoch",
        find.stale_samplers,
    ),
    Rule(
        "steps-not-divided",
        "an epoch has as many steps on every rank as it has in one process",
        "each epoch goes over the data n times, or runs out of them",
        "divide: steps_per_epoch=n_samples // batch_size // hvd.size(), or hk.steps_per_epoch(n_samples, batch_size, "
        "world)",
        _blamed(8),
    ),
    Rule(
        "steps-differ",
        "the number of steps depends on the rank",
        "the rank with one step more waits forever for the others",
        "reckon it from the size alone, the same on every rank",
        find.differing_steps,
    ),
    Rule(
        "metrics-not-averaged",
        "this shows or decides on a metric of one rank's part of the data",
        "the number is that of 1/n of the samples, and another on every rank",
        "average it first: hvd.allreduce(value), MetricAverageCallback(), torch.distributed.all_reduce, or "
        "hk.average_metrics({{'accuracy': (correct, count)}}, world)",
        find_collectives.unaveraged,
    ),
    Rule(
        "download-on-every-rank",
        "every rank downloads here",
        "processes write the same files at the same time, and the server sees n downloads",
        "download where the local rank is 0, let the others wait, then load what is there; or download inside a file "
        "lock",
        find.downloads,
    ),
    Rule(
        "collective-on-some-ranks",
        "`{}` is a call that all ranks make together, on a branch that only some take",
        "the ranks on the branch wait forever for the others",
        "call it on every rank and keep under the condition only what belongs to one, such as printing",
        find_collectives.on_some_ranks,
    ),
)
"""The rules, in the order of the steps."""


def examine(case: JudgedCase) -> list[BrokenRule]:
    """The findings of a script, by line; of one that no library distributes, what was removed since it was written."""
    found: dict[tuple[int, str, str], BrokenRule] = {}
    for rule in RULES if case.library != "none" else [one for one in RULES if one.name == "removed"]:
        for place in rule.find(case):
            line, piece = _place(place)
            fix = rule.fix if isinstance(rule.fix, str) else _advice(rule.fix, case)
            finding = BrokenRule(line, rule.name, rule.what.format(piece), rule.why, fix.format(piece))
            found.setdefault((line, rule.name, fix), finding)
    return sorted(found.values(), key=lambda finding: finding.line)


def _advice(fixes: dict[str, str], case: JudgedCase) -> str:
    """What to write in the script's own library and framework: the first that names both, or the one."""
    framework = "keras" if case.fits else next(iter(case.modules), "").rpartition(".")[2]
    known = (one for one in fixes if f"{case.library} {framework}".startswith(one))
    return fixes[next(known, next(reversed(fixes)))]


def _place(place: Place) -> tuple[int, str]:
    """The line, and the piece of the script: of a call that runs, what is called."""
    if isinstance(place, int):
        return place, ""
    node = place.node.func if isinstance(place, Event) else place
    return node.lineno, ast.unparse(node)


class Checked(JudgedCase):
    """One script, what is said of its steps, and its findings by line."""

    def __init__(self, script: Script) -> None:
        super().__init__(script.tree)
        self.path = script.path
        self.findings = examine(self)


def check_script(script: Script) -> Checked:
    """Check one script.

    Raises:
        InvalidArgumentError: its expressions are nested too deeply to be followed.
    """
    try:
        return Checked(script)
    except RecursionError as error:
        raise too_deep(script.path) from error
