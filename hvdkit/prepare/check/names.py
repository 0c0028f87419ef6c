"""Names as their packages know them: ``hvd.rank`` is ``horovod.torch.rank``, through aliases."""

from __future__ import annotations

import ast
import builtins
import sys

from hvdkit.prepare.check.program import Binding, Program

_PACKAGES = {
    "PIL", "absl", "albumentations", "apex", "click", "cv2", "cloudpickle", "colorama", "einops", "filelock", "flax",
    "gdown", "h5py", "horovod", "hvdkit", "hydra", "imageio", "jax", "joblib", "keras", "keras_cv", "keras_nlp",
    "kornia", "matplotlib", "medmnist", "ml_collections", "mlflow", "mlx", "mpi4py", "mxnet", "natsort", "neptune",
    "netCDF4", "numba", "numpy", "nvidia", "omegaconf", "optax", "packaging", "pandas", "petastorm", "prettytable",
    "psutil", "pyarrow", "pydantic", "pynvml", "ray", "requests", "rich", "scipy", "seaborn", "sentencepiece", "six",
    "skimage", "sklearn", "submitit", "tabulate", "tensorboard", "tensorboardX", "tensorflow", "tensorflow_addons",
    "tensorflow_datasets", "tensorflow_hub", "tensorflow_io", "tensorflow_probability", "termcolor", "tf_keras",
    "tiktoken", "timm", "tokenizers", "toml", "torch", "torch_geometric", "torch_optimizer", "torchaudio",
    "torchinfo", "torchmetrics", "torchsummary", "torchtext", "torchvision", "tqdm", "typer", "wandb", "webdataset",
    "wget", "xarray", "yaml", "zarr",
}  # fmt: skip
_ALSO_NAMES_OF_SCRIPTS = {"code", "profile", "test", "trace"}
KNOWN_PACKAGES = (_PACKAGES | sys.stdlib_module_names) - _ALSO_NAMES_OF_SCRIPTS
"""Packages whose functions do what their names say; whatever comes from another one may do any of the steps."""

OTHER_DISTRIBUTORS = {
    "accelerate": "Accelerate",
    "bagua": "Bagua",
    "byteps": "BytePS",
    "colossalai": "Colossal-AI",
    "composer": "Composer",
    "deepspeed": "DeepSpeed",
    "fairscale": "FairScale",
    "lightning": "Lightning",
    "pytorch_lightning": "Lightning",
    "smdistributed": "SageMaker's data parallel library",
    "transformers": "Transformers",
}
"""Packages that distribute a training in their own ways, which are not checked."""

_SAME = (
    ("tensorflow.compat.v2.", "tensorflow."),
    ("tensorflow.python.keras.", "keras."),
    ("tensorflow.keras.", "keras."),
    ("tf_keras.", "keras."),
    ("tensorflow.optimizers.", "keras.optimizers."),
    ("keras.src.", "keras."),
    ("keras.api.", "keras."),
    ("tensorflow.losses.", "keras.losses."),
    ("tensorflow.metrics.", "keras.metrics."),
)


class Names(Program):
    """What the names of a program stand for."""

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(tree)
        self._known: dict[ast.AST, str | None] = {}
        self.imported = self._imported()
        self.star_modules = [
            node.module
            for node in self.nodes
            if isinstance(node, ast.ImportFrom) and node.module and any(alias.name == "*" for alias in node.names)
        ]

    def _imported(self) -> dict[str, ast.stmt]:
        """Full names of what is imported, with the first statement that does it."""
        found: dict[str, ast.stmt] = {}
        for node in self.nodes:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    found.setdefault(alias.name, node)
            elif isinstance(node, ast.ImportFrom):
                base = "." * node.level + (node.module or "")
                found.setdefault(base, node)
                for alias in node.names:
                    found.setdefault(f"{base}.{alias.name}", node)
        return found

    def dotted(self, node: ast.AST) -> str | None:
        """The full name of what an expression names, ``keras.`` for every way to Keras; None for the script's own."""
        if node not in self._known:
            self._known[node] = None  # what names itself through a loop of aliases has no name
            self._known[node] = _canonical(self._resolve(node))
        return self._known[node]

    def _resolve(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Attribute):
            base = self.dotted(node.value)
            return f"{base}.{node.attr}" if base else self._alias(self.attributes.get(node.attr, []))
        if isinstance(node, ast.Name):
            return self._resolve_name(node)
        if isinstance(node, ast.Call) and self.dotted(node.func) == "importlib.import_module" and node.args:
            first = node.args[0]
            return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None
        return None

    def _resolve_name(self, name: ast.Name) -> str | None:
        scope = self.lookup(name.id, self.scope(name))
        if scope is None:
            return self._from_star(name.id)
        bindings = scope.bindings[name.id]
        for binding in bindings:
            if isinstance(binding.node, ast.alias):
                return self._import_name(binding.node)
        outside = self.scope_of(self.tree).bindings.get(name.id, [])
        if all(isinstance(binding.node, ast.arg) for binding in bindings):  # a module handed on under its own name
            return next((self._import_name(one.node) for one in outside if isinstance(one.node, ast.alias)), None)
        return self._alias(bindings)

    def _alias(self, bindings: list[Binding]) -> str | None:
        """The full name behind ``keras = tf.keras``: of a name that is bound once, to another name."""
        replacing = [binding for binding in bindings if binding.replaces]
        if len(replacing) != 1 or replacing[0].index:
            return None
        value = replacing[0].value
        return self.dotted(value) if isinstance(value, (ast.Attribute, ast.Name, ast.Call)) else None

    def _from_star(self, name: str) -> str | None:
        if hasattr(builtins, name):
            return f"builtins.{name}"
        distributed = [module for module in self.star_modules if module.split(".")[0] in ("horovod", "hvdkit")]
        strange = [module for module in self.star_modules if not self.is_known(module)]
        candidates = distributed or strange or self.star_modules
        return f"{candidates[0]}.{name}" if candidates else None

    def _import_name(self, alias: ast.alias) -> str:
        statement = self.parents[alias]
        if isinstance(statement, ast.ImportFrom):
            return f"{'.' * statement.level}{statement.module or ''}.{alias.name}"
        return alias.name if alias.asname else alias.name.split(".")[0]

    def is_known(self, dotted: str) -> bool:
        """Whether it comes from a package of which nothing unexpected is to be feared."""
        root = dotted.split(".")[0]
        return root in KNOWN_PACKAGES or root == "builtins"

    def is_keras_callback(self, node: ast.ClassDef) -> bool:
        """Whether ``fit`` will call the methods of a class."""
        return any((self.dotted(base) or "").endswith("callbacks.Callback") for base in node.bases)

    def strangers(self) -> list[str]:
        """Imported modules that are neither known packages nor other distributors: the script's own, not read here."""
        roots = {name.split(".")[0] or name for name in self.imported}
        return sorted(root for root in roots if root not in KNOWN_PACKAGES and root not in OTHER_DISTRIBUTORS)


def _canonical(name: str | None) -> str | None:
    if name is None:
        return None
    for prefix, short in _SAME:
        if name.startswith(prefix) or name == prefix[:-1]:
            return short[:-1] + name[len(prefix) - 1 :]
    return name
