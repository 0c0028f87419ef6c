"""Names as their packages know them: ``hvd.rank`` is ``horovod.torch.rank``, through aliases."""

from __future__ import annotations

import ast
import builtins
import sys

from hvdkit.prepare.check.program import Binding, Program, remembered

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
    "accelerate": "Accelerate", "bagua": "Bagua", "byteps": "BytePS", "colossalai": "Colossal-AI",
    "composer": "Composer", "deepspeed": "DeepSpeed", "fairscale": "FairScale", "lightning": "Lightning",
    "pytorch_lightning": "Lightning", "smdistributed": "SageMaker's data parallel library",
    "transformers": "Transformers",
}  # fmt: skip
"""Packages that distribute a training in their own ways, which are not checked."""

OTHER_WAYS = {
    r"tensorflow\.distribute\..*Strategy": "tf.distribute",
    r"torch\.distributed\.rpc.*": "torch.distributed.rpc",
    r".*FullyShardedDataParallel.*|.*fully_shard": "FSDP",
}
"""What does so in TensorFlow and PyTorch."""

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

    @remembered(None)  # what names itself through a loop of aliases has no name
    def dotted(self, node: ast.AST) -> str | None:
        """The full name of what an expression names, ``keras.`` for every way to Keras; None for the script's own."""
        match node:
            case ast.Name():
                return _canonical(self._resolve(node))
            case ast.Attribute():
                base = self.dotted(node.value)
                return _canonical(f"{base}.{node.attr}") if base else self._alias(self.attributes.get(node.attr, []))
            case ast.Call(args=[ast.Constant(value=str(module)), *_]):
                return _canonical(module) if self.dotted(node.func) == "importlib.import_module" else None
        return None

    def _resolve(self, name: ast.Name) -> str | None:
        scope = self.lookup(name.id, self.scope(name))
        if scope is None:
            return self._from_star(name.id)
        bindings = scope.bindings[name.id]
        handed_on = all(isinstance(one.node, ast.arg) for one in bindings)  # a module, under its own name
        outside = self.scope(self.tree).bindings.get(name.id, [])
        imports = [one.imported for one in (outside if handed_on else bindings) if one.imported]
        return imports[0] if imports else self._alias(bindings)

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
        stars = [module.removesuffix(".*") for module in self.imported if module.endswith(".*")]
        distributed = [module for module in stars if module.split(".")[0] in ("horovod", "hvdkit")]
        strange = [module for module in stars if not self.is_known(module)]
        return next((f"{module}.{name}" for module in distributed or strange or stars), None)

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
    for prefix, short in _SAME if name else ():
        if f"{name}.".startswith(prefix):
            return f"{name}.".replace(prefix, short, 1)[:-1]
    return name
