"""Where a checkpoint is written: on every rank, on some, or where the text does not say."""

from __future__ import annotations

import ast
import re

from hvdkit.prepare.check.calls import argument, arguments, method, receiver
from hvdkit.prepare.check.parts import DataCase
from hvdkit.prepare.check.trace import Event

_OWN_FILES = ("io.BytesIO", "tempfile.mk", "tempfile.Named", "tempfile.Temporary", "tempfile.Spooled")
_SAVES = {"torch.save", "torch.jit.save", "tensorflow.saved_model.save", "keras.models.save_model"}
BACKUP = "keras.callbacks.BackupAndRestore"
KERAS_WRITERS = ("keras.callbacks.ModelCheckpoint", BACKUP)
_PATHS = (
    "f", "filepath", "path", "directory", "backup_dir", "checkpoint_dir", "export_dir", "file_prefix", "save_path",
)  # fmt: skip
STATES = ("every rank", "unknown", "some ranks")


def writes(case: DataCase, call: ast.Call) -> bool:
    """Whether a call writes a checkpoint that every rank would write."""
    name, called = case.name(call), method(call)
    if name in _SAVES:
        target = argument(call, "f", 1) or argument(call, "filepath", 1)
        return not any(case.name(call).startswith(_OWN_FILES) for call in case.calls(target))
    if name in KERAS_WRITERS:
        return not case.guards_fit
    if name or not called or case.role(call):
        return False
    made = [case.name(one) for one in case.calls(receiver(call))]
    if called in ("save", "write") and any(
        re.search(r"\btrain\.(Checkpoint(Manager)?|Saver)$", maker) for maker in made
    ):
        return True
    keras = called == "save_weights" or (called in ("save", "export") and case.holds_keras_model(receiver(call)))
    return keras and not any(maker.startswith("torch.") for maker in made)


def has_own_path(case: DataCase, call: ast.Call) -> bool:
    """Whether a rank is in the arguments that say where to write, those of the checkpoint object included."""
    given = [argument(call, name) for name in _PATHS]
    given.append(argument(call, "", 1 if case.name(call) else 0) or argument(call, "", 0))
    makers = [] if case.name(call) else [maker for maker in case.calls(receiver(call)) if ".train." in case.name(maker)]
    return case.has_rank(*given, *(value for made in makers for value in arguments(made)))


def where_it_writes(case: DataCase, event: Event) -> str:
    """Where a write happens, over all the ways to it: on every rank as soon as one way is open to all."""
    if has_own_path(case, event.node):
        return "some ranks"
    states = {case.where(way) for way in case.events if way.node is event.node}
    statement = case.statement(event.node)
    if case.name(event.node) in KERAS_WRITERS and isinstance(statement, ast.Assign) and statement.value is event.node:
        names = [node for node in case.nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
        uses = [name for name in names if any(binding.node is statement for binding in case.reaching(name))]
        states = {state for name in uses for state in _where_it_is_used(case, name)} or {"unknown"}
    return next(state for state in STATES if state in states)


def _where_it_is_used(case: DataCase, name: ast.Name) -> set[str]:
    """Where a name is used: at the calls around it, or under the conditions around its statement."""
    around = list(case.ancestors(name))
    if case.has_rank(*(node.test for node in around if isinstance(node, (ast.If, ast.IfExp)))):
        return {"some ranks"}
    return {case.where(event) for event in case.events if event.node in around} or {"every rank"}
