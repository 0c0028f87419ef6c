"""Small programs in the shape of well-known published ones, with the eight steps: n ranks end as one process does.

A program takes ``steps``: ``Alone`` is one process, with batches of all ranks' samples, ``Ranks`` the eight steps. What
cannot be equal by itself (dropout, BatchNorm's statistics) is left out.
"""

import contextlib
import math
from dataclasses import dataclass
from typing import Any

import pytest
from ranks import on_ranks

TOGETHER = 12  # samples of a batch of all ranks


@dataclass(frozen=True)
class Alone:
    """A program without hvdkit."""

    rank = 0

    def share(self, rows: Any) -> Any:
        return rows

    def loader(self, dataset: Any) -> Any:
        import torch

        return torch.utils.data.DataLoader(dataset, TOGETHER)

    def distribute(self, optimizer: Any, model: Any, **options: Any) -> Any:
        return optimizer

    def no_sync(self, model: Any) -> Any:
        return contextlib.nullcontext()

    def mean(self, value: float) -> float:
        return value

    def gather(self, rows: Any) -> Any:
        return rows


@dataclass(frozen=True)
class Ranks:
    """The same with hvdkit; the root's model is sent to the others, which begin with another."""

    hk: Any
    world: Any

    @property
    def rank(self) -> int:
        return self.world.rank

    def share(self, rows: Any) -> Any:
        return rows.chunk(self.world.size)[self.world.rank]

    def loader(self, dataset: Any) -> Any:
        return self.hk.shard(dataset, self.world, TOGETHER // self.world.size, shuffle=False)

    def distribute(self, optimizer: Any, model: Any, **options: Any) -> Any:
        optimizer = self.hk.distribute(optimizer, model, **options)
        self.hk.broadcast_state(model, optimizer)
        return optimizer

    def no_sync(self, model: Any) -> Any:
        return self.hk.no_sync(model)

    def mean(self, value: float) -> float:
        return self.hk.average_metrics({"value": value}, self.world)["value"]

    def gather(self, rows: Any) -> Any:
        return self.hk.gather(rows)


def random(*shape: int, seed: int = 0) -> Any:
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def language_model(width: int = 8, words: int = 11, length: int = 6) -> Any:
    """A causal transformer whose embedding is its last layer, too."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mixed, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.mlp = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))

        def forward(self, x: Any) -> Any:
            q, k, v = (one.unflatten(2, (2, -1)).transpose(1, 2) for one in self.mixed(self.norm(x)).chunk(3, 2))
            mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            return x + self.mlp(x)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
            self.blocks = nn.Sequential(Block(), Block(), nn.LayerNorm(width))
            self.head = nn.Linear(width, words, bias=False)
            self.head.weight = self.words.weight

        def forward(self, x: Any) -> Any:
            return self.head(self.blocks(self.words(x) + self.places(torch.arange(x.shape[1]))))

    return Model().double()


def pretraining(steps, micro=3, iterations=4, announced=False, left_out=False):
    """A language model's: micro steps, a scaler, clipping, decay for matrices alone, a rate written into the groups."""
    import torch

    torch.manual_seed(steps.rank)
    model = language_model()
    parameters = list(model.parameters())
    groups = [
        {"params": [one for one in parameters if one.dim() > 1], "weight_decay": 0.1},
        {"params": [one for one in parameters if one.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.02, betas=(0.9, 0.95), fused=True)
    optimizer = steps.distribute(optimizer, model, **({"backward_passes_per_step": micro} if announced else {}))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    text = (random(600, seed=1) * 10).long() % 11
    draw = torch.Generator().manual_seed(2)
    for iteration in range(iterations):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (1 + math.cos(math.pi * iteration / iterations))
        for number in range(micro):
            starts = steps.share(torch.randint(len(text) - 7, (TOGETHER,), generator=draw))
            x = torch.stack([text[start : start + 6] for start in starts])
            y = torch.stack([text[start + 1 : start + 7] for start in starts])
            last = number == micro - 1
            with contextlib.nullcontext() if last or not left_out else steps.no_sync(model):
                loss = torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten()) / micro
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return [model]


def pretraining_announced(steps):
    return pretraining(steps, announced=True)


def pretraining_with_exchanges_left_out(steps):
    return pretraining(steps, left_out=True)


def convolutional_gan(steps):
    """The critic learns from two backwards, real and made; the noise is drawn for all ranks; BatchNorm is frozen."""
    import torch
    from torch import nn

    torch.manual_seed(steps.rank)
    generator = nn.Sequential(
        nn.ConvTranspose2d(5, 4, 4, bias=False), nn.BatchNorm2d(4), nn.ReLU(True), nn.Conv2d(4, 1, 1), nn.Tanh()
    ).double()
    critic = nn.Sequential(
        nn.Conv2d(1, 4, 2, 2, bias=False), nn.BatchNorm2d(4), nn.LeakyReLU(0.2, inplace=True), nn.Conv2d(4, 1, 2)
    ).double()
    for one in (generator, critic):
        one[1].eval()
    of_critic, of_generator = (
        steps.distribute(torch.optim.Adam(model.parameters(), lr=0.01, betas=(0.5, 0.999)), model)
        for model in (critic, generator)
    )
    judge = nn.BCEWithLogitsLoss()
    pictures = [(one,) for one in random(48, 1, 4, 4, seed=1)]
    for number, (real,) in enumerate(steps.loader(pictures)):
        noise = steps.share(random(TOGETHER, 5, 1, 1, seed=number))
        critic.zero_grad()
        label = torch.ones(len(real), 1, 1, 1, dtype=torch.float64)
        judge(critic(real), label).backward()
        fake = generator(noise)
        judge(critic(fake.detach()), label.fill_(0)).backward()
        of_critic.step()
        generator.zero_grad()
        judge(critic(fake), label.fill_(1)).backward()
        of_generator.step()
    return [generator, critic]


def digits(steps):
    """A CNN in epochs, Adadelta and a StepLR that was made before, then a ReduceLROnPlateau on all ranks' mean loss."""
    import torch
    from torch import nn

    torch.manual_seed(steps.rank)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 10)
    ).double()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    optimizer = steps.distribute(optimizer, model)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
    pictures = random(36, 1, 8, 8)
    loader = steps.loader(list(zip(pictures, (pictures.mean(dim=(1, 2, 3)) * 100).long() % 10, strict=True)))
    for _ in range(3):
        total = 0.0
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.nll_loss(nn.functional.log_softmax(model(x), dim=1), y)
            loss.backward()
            optimizer.step()
            total += loss.item()
        scheduler.step()
        plateau.step(steps.mean(total / len(loader)))
    assert optimizer.param_groups[0]["lr"] < 0.3
    return [model]


def classifier(steps):
    """A transformer over dict batches with a mask: AdamW, linear warmup and decay, clipping, zero_grad last."""
    import torch
    from torch import nn

    torch.manual_seed(steps.rank)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(20, 8, padding_idx=0)
            layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, activation="gelu")
            self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.pooler, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
            self.unused = nn.Linear(8, 8)

        def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> dict[str, Any]:
            hidden = self.encoder(self.words(input_ids), src_key_padding_mask=attention_mask == 0)
            logits = self.head(self.pooler(hidden[:, 0]).tanh())
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    model = Model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    warmup, total = 2, 6
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: step / warmup if step < warmup else (total - step) / (total - warmup)
    )
    optimizer = steps.distribute(optimizer, model)
    words = (random(72, 5).abs() * 10).long() % 19 + 1
    mask = torch.ones_like(words)
    mask[::3, 3:] = 0
    rows = [
        {"input_ids": one * seen, "attention_mask": seen, "labels": one.sum() % 3}
        for one, seen in zip(words, mask, strict=True)
    ]
    for batch in steps.loader(rows):
        model(**batch)["loss"].backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
    assert model.unused.weight.grad is None
    return [model]


def recurrent_language_model(steps):
    """The hidden state goes from batch to batch; weights are updated by hand, the optimizer is only for the mean."""
    import torch
    from torch import nn

    torch.manual_seed(steps.rank)
    words, layers, head = nn.Embedding(11, 6), nn.LSTM(6, 6, 2), nn.Linear(6, 11)
    head.weight = words.weight
    model = nn.ModuleList([words, layers, head]).double()
    steps.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model)
    text = (random(TOGETHER, 21) * 10).long() % 11
    columns, hidden = steps.share(text).t().contiguous(), None
    for start in range(0, 20, 5):
        model.zero_grad()
        out, hidden = layers(words(columns[start : start + 5]), hidden)
        hidden = tuple(one.detach() for one in hidden)
        target = columns[start + 1 : start + 6].flatten()
        nn.functional.cross_entropy(head(out).flatten(0, 1), target).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for parameter in model.parameters():
            parameter.data.add_(parameter.grad, alpha=-0.5)
    return [model]


def autoencoder(steps):
    """A variational one, whose loss is a sum over samples: so is the gradient."""
    import torch
    from torch import nn

    torch.manual_seed(steps.rank)
    encoder, decoder = nn.Linear(6, 4).double(), nn.Linear(2, 6).double()
    model = nn.ModuleList([encoder, decoder])
    optimizer = steps.distribute(torch.optim.Adam(model.parameters(), lr=0.02), model, op="sum")
    for number, (x,) in enumerate(steps.loader([(one,) for one in random(48, 6).sigmoid()])):
        optimizer.zero_grad()
        mean, spread = encoder(x).chunk(2, dim=1)
        code = mean + (0.5 * spread).exp() * steps.share(random(TOGETHER, 2, seed=number))
        far = nn.functional.binary_cross_entropy_with_logits(decoder(code), x, reduction="sum")
        (far - 0.5 * (1 + spread - mean.square() - spread.exp()).sum()).backward()
        optimizer.step()
    return [model]


def penalized_critic(steps):
    """A critic with a gradient penalty, two steps for each of the generator, through which it is frozen."""
    import torch
    from torch import nn

    torch.manual_seed(steps.rank)
    generator = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    critic = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    of_generator, of_critic = (
        steps.distribute(torch.optim.RMSprop(model.parameters(), lr=0.01), model) for model in (generator, critic)
    )
    for number in range(4):
        real, noise = steps.share(random(TOGETHER, 6, seed=number)), steps.share(random(TOGETHER, 4, seed=-number))
        critic.requires_grad_(True)
        for _ in range(2):
            of_critic.zero_grad()
            fake = generator(noise).detach()
            critic(fake).mean().backward()
            (-critic(real).mean()).backward()
            between = (0.3 * real + 0.7 * fake).requires_grad_()
            (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
            (10 * (slope.norm(dim=1) - 1).square().mean()).backward()
            of_critic.step()
        critic.requires_grad_(False)
        of_generator.zero_grad()
        (-critic(generator(noise)).mean()).backward()
        of_generator.step()
    return [generator, critic.requires_grad_(True)]


def sharpness_aware(steps):
    """Two backwards for a step, the second at other weights; normalized weights (parametrizations)."""
    import torch
    from torch import nn
    from torch.nn.utils import parametrizations

    torch.manual_seed(steps.rank)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    parametrizations.weight_norm(model[0])
    optimizer = steps.distribute(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model)
    for number in range(4):
        x = steps.share(random(TOGETHER, 6, seed=number))
        y = x.sum(dim=1, keepdim=True).sin()
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        parameters = list(model.parameters())
        length = torch.stack([one.grad.norm() for one in parameters]).norm()
        with torch.no_grad():
            ways = [one.grad * (0.1 / length) for one in parameters]
            torch._foreach_add_(parameters, ways)
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        with torch.no_grad():
            torch._foreach_sub_(parameters, ways)
        optimizer.step()
    return [model]


def deep_checkpoints(steps):
    """Activation checkpointing within activation checkpointing within it."""
    import torch
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(steps.rank)
    layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)).double()
    optimizer = steps.distribute(torch.optim.Adam(layers.parameters(), lr=0.02), layers, bucket_mb=1e-5)

    def passed(x: Any, deep: int = 2) -> Any:
        hidden = layers[deep](x).tanh()
        return layers[deep](checkpoint(passed, hidden, deep - 1, use_reentrant=True)).tanh() if deep else hidden

    for number in range(4):
        x = steps.share(random(TOGETHER, 6, seed=number)).requires_grad_()
        optimizer.zero_grad()
        layers[3](checkpoint(passed, x, use_reentrant=True)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(layers.parameters(), 0.1)
        optimizer.step()
    return [layers]


def pairs_of_images_and_texts(steps):
    """CLIP's loss: each rank compares its own with all, in both directions, and the temperature is trained."""
    import torch
    from torch.nn import functional

    torch.manual_seed(steps.rank)
    towers = torch.nn.ModuleList(torch.nn.Linear(6, 4) for _ in range(2)).double()
    towers.scale = torch.nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    optimizer = steps.distribute(torch.optim.AdamW(towers.parameters(), lr=0.02), towers)
    own = steps.share(torch.arange(TOGETHER))
    for number in range(4):
        a, b = (
            functional.normalize(tower(steps.share(random(TOGETHER, 6, seed=2 * number + side))), dim=1)
            for side, tower in enumerate(towers)
        )
        scores = [towers.scale.exp() * mine @ steps.gather(theirs).T for mine, theirs in ((a, b), (b, a))]
        optimizer.zero_grad()
        sum(functional.cross_entropy(one, own) / 2 for one in scores).backward()
        optimizer.step()
    return [towers]


def two_views_of_each_image(steps):
    """SimCLR's loss: each view of a sample finds the other one among both views of all ranks' samples."""
    import torch
    from torch.nn import functional

    torch.manual_seed(steps.rank)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 4)).double()
    optimizer = steps.distribute(torch.optim.SGD(model.parameters(), lr=0.3), model)
    places = steps.share(torch.arange(TOGETHER))
    for number in range(4):
        views = [
            functional.normalize(model(steps.share(random(TOGETHER, 6, seed=2 * number + v))), dim=1) for v in (0, 1)
        ]
        everyone = torch.cat([steps.gather(view) for view in views])
        scores = torch.cat(views) @ everyone.T / 0.5
        own = torch.cat([places, places + TOGETHER])
        scores = scores.masked_fill(functional.one_hot(own, 2 * TOGETHER).bool(), -torch.inf)
        optimizer.zero_grad()
        functional.cross_entropy(scores, (own + TOGETHER) % (2 * TOGETHER)).backward()
        optimizer.step()
    return [model]


def queue_of_negatives(steps):
    """MoCo: a second encoder follows the first, and a queue keeps what it made of all ranks' samples."""
    import torch
    from torch.nn import functional

    torch.manual_seed(steps.rank)
    encoder, follower = (torch.nn.Linear(6, 4).double() for _ in range(2))
    optimizer = steps.distribute(torch.optim.SGD(encoder.parameters(), lr=0.1, momentum=0.9), encoder)
    follower.load_state_dict(encoder.state_dict())
    queue = functional.normalize(random(24, 4, seed=9), dim=1)
    for number in range(4):
        first, second = (steps.share(random(TOGETHER, 6, seed=2 * number + side)) for side in range(2))
        with torch.no_grad():
            for slow, fast in zip(follower.parameters(), encoder.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
            keys = functional.normalize(follower(second), dim=1)
        queries = functional.normalize(encoder(first), dim=1)
        scores = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.T], dim=1) / 0.2
        optimizer.zero_grad()
        functional.cross_entropy(scores, torch.zeros(len(scores), dtype=torch.int64)).backward()
        optimizer.step()
        queue = torch.cat([queue[TOGETHER:], steps.gather(keys)])
    return [encoder, follower]


PROGRAMS = [
    pretraining,
    pretraining_announced,
    pretraining_with_exchanges_left_out,
    convolutional_gan,
    digits,
    classifier,
    recurrent_language_model,
    autoencoder,
    penalized_critic,
    sharpness_aware,
    deep_checkpoints,
    pairs_of_images_and_texts,
    two_views_of_each_image,
    queue_of_negatives,
]


def weights_of(program: Any) -> list[Any]:
    return [one.detach() for model in program(Alone()) for one in model.parameters()]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
@on_ranks("torch", n=2)
def test_it_ends_as_one_process_does(hk, world, program):
    models = program(Ranks(hk, world))
    ours = [one.detach() for model in models for one in model.parameters()]
    for mine, theirs in zip(ours, weights_of(program), strict=True):
        assert (mine - theirs).abs().max() < 1e-9
    for model in models:
        hk.check_agreement(model, None, world)
