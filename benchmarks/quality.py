"""What fewer bytes cost in quality: the final loss beside that of the same training with whole gradients.

Each model is trained by real ranks of this machine, for several seeds; a seed gives every variant the same first
weights and the same batches. Printed is the test loss, and how much higher it is than with the first variant: the
geometric mean over seeds and its 95 % interval by Student's t on the logarithms of the ratios.

    python benchmarks/quality.py [--models digits,text] [--seeds 5] [--steps 600] [-n 2] [-o FILE]
    python benchmarks/quality.py --outer --steps 1500

With --outer the variants are those of ``every=``, which begin after so many synchronous steps.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from launch import ratio

VARIANTS: tuple[dict[str, Any], ...] = ({}, {"compression": "bf16"}, {"compression": "int8"})
OUTER: tuple[dict[str, Any], ...] = ({}, {"every": 30}, {"every": 30, "outer_overlap": 10, "compression": "int8"})
"""Arguments of ``hvdkit.torch.distribute``; the others are compared with the first."""
RATE, WARM_UP, SYNCHRONOUS, CONTEXT = 2e-3, 30, 300, 48


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="digits,text", help="default %(default)s")
    parser.add_argument("--seeds", type=int, default=5, help="at least 2 (default %(default)s)")
    parser.add_argument("--steps", type=int, default=600, help="of each training (default %(default)s)")
    parser.add_argument("--outer", action="store_true", help=f"outer steps, after {SYNCHRONOUS} synchronous ones")
    parser.add_argument("-n", type=int, default=2, help="ranks (default %(default)s)")
    parser.add_argument("-o", "--output", type=Path, help="also write the losses as JSON")
    options = parser.parse_args()
    if "HVDKIT_QUALITY_RANK" in os.environ:
        measure(options)
        return
    with tempfile.TemporaryDirectory() as directory:
        found = Path(directory) / "losses.json"
        environ = {**os.environ, "HVDKIT_QUALITY_RANK": str(found), "OMP_NUM_THREADS": "1"}
        job = [sys.executable, "-m", "hvdkit", "launch", "-n", str(options.n), "--no-tag", "--", sys.executable]
        subprocess.run([*job, str(Path(__file__).resolve()), *sys.argv[1:]], check=True, env=environ)
        losses = json.loads(found.read_text())
    print(f"{options.n} ranks, {options.steps} steps, {options.seeds} seeds")
    print("| model | gradients | test loss | higher by, % [95 % interval] |\n|---|---|---|---|")
    for model, by_variant in losses.items():
        whole, *_ = by_variant.values()
        for name, own in by_variant.items():
            row = f"| {model} | {name} | {sum(own) / len(own):.4f} |"
            percent = [100 * (value - 1) for value in ratio(own, whole)]
            print(row, "0 |" if own is whole else "{:+.2f} [{:+.2f}, {:+.2f}] |".format(*percent))
    if options.output:
        options.output.write_text(json.dumps({"options": vars(options), "losses": losses}, default=str) + "\n")


# On a rank ------------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> None:
    import torch

    import hvdkit.torch as hk

    world = hk.init()
    losses: dict[str, dict[str, list[float]]] = {}
    for model in options.models.split(","):
        task = {"digits": Digits, "text": Text}[model](torch)
        for seed in range(options.seeds):
            for variant in OUTER if options.outer else VARIANTS:
                name = ", ".join(f'{key}="{value}"' for key, value in variant.items()) or "none"
                start = time.perf_counter()
                begin = SYNCHRONOUS if options.outer else 0
                loss = trained(torch, hk, task, options.steps, seed, world.rank, variant, begin)
                losses.setdefault(model, {}).setdefault(name, []).append(loss)
                if world.is_root:
                    took = f"{time.perf_counter() - start:.0f} s"
                    print(f"{model}, seed {seed}, {name}: {loss:.4f} in {took}", file=sys.stderr, flush=True)
    if world.is_root:
        Path(os.environ["HVDKIT_QUALITY_RANK"]).write_text(json.dumps(losses))


def trained(
    torch: Any, hk: Any, task: Any, steps: int, seed: int, rank: int, variant: dict[str, Any], begin: int
) -> float:
    """The test loss after a training by AdamW, whose rate warms up and falls to a tenth as a cosine.

    Args:
        begin: steps that are synchronous, before the variant.
    """
    torch.manual_seed(seed)
    draw = torch.Generator().manual_seed(1000 * seed + rank)
    model, optimizer = task.model(), None
    for step in range(1, steps + 1):
        if optimizer is None or step == begin + 1:
            before, model = (model, optimizer), task.model()
            model.load_state_dict(before[0].state_dict())
            optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.1)
            if before[1] is not None:
                optimizer.load_state_dict(before[1].state_dict())
            own = {**variant, "process_set": "rank"} if "every" in variant else variant
            hk.distribute(optimizer, model, **(own if step > begin else {}))
        falling = 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = RATE * min(1, step / WARM_UP) * falling
        optimizer.zero_grad()
        task.loss(model, *task.batch(draw)).backward()
        optimizer.step()
    if "every" in variant:
        hk.average_weights()
    with torch.no_grad():
        return float(task.loss(model.eval(), *task.test))


class Digits:
    """A CNN on scikit-learn's digits under noise, which keeps the loss away from 0."""

    def __init__(self, torch: Any) -> None:
        from sklearn.datasets import load_digits

        self.torch, digits, draw = torch, load_digits(), torch.Generator().manual_seed(7)
        images = torch.tensor(digits.data, dtype=torch.float32).reshape(-1, 1, 8, 8) / 8 - 1
        order = torch.randperm(len(images), generator=draw)
        self.images, self.labels = images[order[:1300]], torch.tensor(digits.target)[order[:1300]]
        test = images[order[1300:]].repeat(8, 1, 1, 1)
        self.test = self.noisy(test, draw), torch.tensor(digits.target)[order[1300:]].repeat(8)

    def noisy(self, images: Any, draw: Any) -> Any:
        return images + self.torch.randn(images.shape, generator=draw)

    def model(self) -> Any:
        nn = self.torch.nn
        first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        dense = nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2), *dense)

    def batch(self, draw: Any) -> tuple[Any, Any]:
        drawn = self.torch.randint(0, len(self.images), (16,), generator=draw)
        return self.noisy(self.images[drawn], draw), self.labels[drawn]

    def loss(self, model: Any, images: Any, labels: Any) -> Any:
        return self.torch.nn.functional.cross_entropy(model(images), labels)


class Text:
    """A transformer of 0.18 million parameters that reads Python's own help pages, character by character."""

    def __init__(self, torch: Any) -> None:
        from pydoc_data import topics

        self.torch, text = torch, "\n".join(topics.topics[name] for name in sorted(topics.topics))
        codes = {character: code for code, character in enumerate(sorted(set(text)))}
        read = torch.tensor([codes[character] for character in text])
        self.vocabulary, self.read = len(codes), read[: len(read) * 9 // 10]
        rest = read[len(self.read) :]
        drawn = torch.randint(0, len(rest) - CONTEXT, (512, 1), generator=torch.Generator().manual_seed(7))
        self.test = (rest[drawn + torch.arange(CONTEXT + 1)],)

    def model(self) -> Any:
        nn, width = self.torch.nn, 80
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        embedded = nn.Embedding(self.vocabulary, width), nn.Embedding(CONTEXT, width)
        return nn.ModuleList([*embedded, layers, nn.Linear(width, self.vocabulary)])

    def batch(self, draw: Any) -> tuple[Any]:
        drawn = self.torch.randint(0, len(self.read) - CONTEXT, (8, 1), generator=draw)
        return (self.read[drawn + self.torch.arange(CONTEXT + 1)],)

    def loss(self, model: Any, text: Any) -> Any:
        nn, (characters, places, layers, out) = self.torch.nn, model
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
        hidden = layers(characters(text[:, :-1]) + places.weight, mask=mask, is_causal=True)
        return nn.functional.cross_entropy(out(hidden).flatten(0, 1), text[:, 1:].flatten())


if __name__ == "__main__":
    main()
