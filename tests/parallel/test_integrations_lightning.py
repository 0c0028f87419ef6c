"""Lightning's Trainer over HorovodStrategy: n ranks train, test and predict as one process on the global batch."""

from pathlib import Path
from typing import Any

import pytest
from ranks import needs, on_ranks

pytestmark = needs("lightning")

BATCH, SAMPLES = 12, 72


def data() -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 4, generator=generator)
    return torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long())


def loader(ranks: int) -> Any:
    import torch

    return torch.utils.data.DataLoader(data(), batch_size=BATCH // ranks)


def shuffled(ranks: int) -> Any:
    """Lightning shuffles what ranks train on, by the epoch's number; so does one process here."""
    import torch

    sampler = None if ranks > 1 else torch.utils.data.DistributedSampler(data(), 1, 0)
    return torch.utils.data.DataLoader(data(), batch_size=BATCH // ranks, sampler=sampler)


def classifier() -> Any:
    """Automatic optimization with a schedule, logged means and a metric of torchmetrics."""
    import lightning
    import torch
    import torchmetrics

    class Classifier(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
            self.right = torchmetrics.classification.MulticlassAccuracy(2)
            self.rates: list[float] = []

        def loss(self, batch: Any) -> Any:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def training_step(self, batch: Any, index: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, sync_dist=True, on_step=True, on_epoch=True)
            self.rates.append(self.optimizers().param_groups[0]["lr"])
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("held", self.loss(batch), sync_dist=True)
            self.right(self.net(batch[0]), batch[1])
            self.log("right", self.right)

        test_step = validation_step

        def predict_step(self, batch: Any, index: int) -> Any:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.net.parameters(), 0.1)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    return Classifier()


def gan(plain: bool = False) -> Any:
    """Manual optimization of two optimizers; unless plain, two of three gradients of the critic stay on their rank."""
    import lightning
    import torch

    class Gan(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(2)
            self.generator = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
            self.critic = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

        def training_step(self, batch: Any, index: int) -> None:
            (x, _), (first, second) = batch, self.optimizers()
            judge = torch.nn.functional.softplus
            with second.toggle_model(sync_grad=plain or index % 3 == 2):
                loss = judge(-self.critic(x)).mean() + judge(self.critic(self.generator(x.flip(1)).detach())).mean()
                self.manual_backward(loss / 3)
                if index % 3 == 2:
                    self.clip_gradients(second, 0.1, "norm")
                    second.step()
                    second.zero_grad()
            self.toggle_optimizer(first)
            self.manual_backward(judge(-self.critic(self.generator(x.flip(1)))).mean())
            first.step()
            first.zero_grad()
            self.untoggle_optimizer(first)
            self.log("critic", loss, sync_dist=True, on_step=False, on_epoch=True)

        def configure_optimizers(self) -> Any:
            return [torch.optim.Adam(one.parameters(), 0.05) for one in (self.generator, self.critic)]

    return Gan()


def trainer_of(strategy: Any = None, **options: Any) -> Any:
    import lightning

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    if strategy is not None:
        options["strategy"] = strategy
    return lightning.Trainer(
        **{"accelerator": "cpu", "max_epochs": 2, "enable_checkpointing": False, **quiet, **options}
    )


def fitted(what: str, ranks: int, strategy: Any = None) -> dict[str, Any]:
    """Weights, rates and logged values."""
    accumulated = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.2} if what == "classifier" else {}
    module = classifier() if what == "classifier" else gan()
    trainer = trainer_of(strategy, **accumulated)
    trainer.fit(module, shuffled(ranks), loader(ranks) if what == "classifier" else None)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    weights = [parameter.detach().numpy() for parameter in module.parameters()]
    found = {"weights": weights, "logged": logged, "rates": getattr(module, "rates", [])}
    if what == "classifier":
        (tested,) = trainer.test(module, loader(ranks), verbose=False)
        predicted = trainer.predict(module, loader(ranks))
        found |= {"tested": tested, "predicted": [batch.numpy() for batch in predicted]}
    return found


@on_ranks("torch", n=3)
def test_training_testing_and_predicting_are_those_of_one_process(hk, world, everyone, alone):
    """Automatic optimization, accumulated and clipped; a GAN by manual optimization; by name, too."""
    import numpy as np

    from hvdkit.integrations.lightning import HorovodStrategy

    for what, strategy in (("classifier", HorovodStrategy()), ("gan", "horovod")):
        found, expected = fitted(what, world.size, strategy), alone(fitted, what=what, ranks=1)
        for mine, whole in zip(found["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(mine, whole, rtol=0, atol=1e-6)
        assert found["rates"] == expected["rates"]
        mine, whole = (one["logged"] | one.get("tested", {}) for one in (found, expected))
        mine.pop("loss_step", 0), whole.pop("loss_step", 0)  # this rank's last batch
        assert mine == pytest.approx(whole, rel=1e-5)
        if what == "classifier":
            assert len(set(expected["rates"])) > 2 and {"loss_epoch", "held", "right"} <= mine.keys()
            # The sampler deals samples out one by one.
            per_rank = everyone([batch for batch in found["predicted"]])
            for number, batch in enumerate(expected["predicted"]):
                mixed = np.stack([rank[number] for rank in per_rank], 1).reshape(batch.shape)
                np.testing.assert_allclose(mixed, batch, rtol=0, atol=1e-6)


@on_ranks("torch", n=2)
def test_ranks_stop_and_save_together_and_go_on_from_the_roots_checkpoint(hk, world, everyone, tmp_path):
    """What each rank alone would decide differs; a resumed training ends as one that was not interrupted."""
    import torch
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    from hvdkit.integrations.lightning import HorovodStrategy

    class Uneven(type(classifier())):
        """Each rank's loss rises at another epoch."""

        def validation_step(self, batch: Any, index: int) -> None:
            turn = 1 + 2 * self.trainer.global_rank
            self.log("own", float(abs(self.current_epoch - turn)))
            self.log("held", float(abs(self.current_epoch - turn)), sync_dist=True)

    for monitor in ("own", "held"):
        saver = ModelCheckpoint(tmp_path / monitor, "{epoch}", monitor=monitor, save_top_k=2, save_last=True)
        stopper = EarlyStopping(monitor, patience=2)
        trainer = trainer_of(HorovodStrategy(), max_epochs=12, callbacks=[saver, stopper], enable_checkpointing=True)
        trainer.fit(Uneven(), loader(world.size), loader(world.size))
        facts = everyone((trainer.current_epoch, saver.best_model_path, saver.last_model_path, stopper.stopped_epoch))
        assert trainer.current_epoch < 12, "nothing stopped"
        assert len({fact[0] for fact in facts}) == 1, facts
        if monitor == "held":
            assert len(set(facts)) == 1, facts
            assert Path(saver.best_model_path).exists()
    everyone(None)

    whole = classifier()
    saver = ModelCheckpoint(tmp_path / "whole", "{epoch}", save_top_k=-1)
    trainer_of(HorovodStrategy(), max_epochs=4, callbacks=[saver], enable_checkpointing=True).fit(
        whole, loader(world.size)
    )
    if world.is_root:
        assert len(list((tmp_path / "whole").iterdir())) == 4
    resumed = classifier()
    with torch.no_grad():
        for parameter in resumed.parameters():
            parameter.mul_(world.rank)
    last = str(tmp_path / "whole" / "epoch=1.ckpt")
    trainer_of(HorovodStrategy(), max_epochs=4).fit(resumed, loader(world.size), ckpt_path=last)
    for mine, expected in zip(resumed.parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, expected)
    assert resumed.rates == whole.rates[len(whole.rates) // 2 :]


@on_ranks("torch", n=2)
def test_one_module_is_fitted_twice_and_ranks_get_the_roots_weights(hk, world, everyone):
    """With a second Trainer, whose optimizer is another; testing alone gives all ranks the root's weights, too."""
    import torch

    from hvdkit.integrations.lightning import HorovodStrategy

    module = classifier()
    for parameter in module.parameters():
        parameter.data += world.rank
    trainer_of(HorovodStrategy()).fit(module, loader(world.size))
    trainer_of(HorovodStrategy()).fit(module, loader(world.size))
    weights = [parameter.detach().clone() for parameter in module.parameters()]
    hk.check_agreement(module, None, world)

    again = classifier()
    with torch.no_grad():
        for parameter, value in zip(again.parameters(), weights, strict=True):
            parameter.copy_(value if world.is_root else -value)
    (tested,) = trainer_of(HorovodStrategy()).test(again, loader(world.size), verbose=False)
    assert len(set(everyone(tested["right"]))) == 1
    hk.check_agreement(again, None, world)


@on_ranks("torch", n=3)
def test_collectives_of_the_strategy_and_what_it_refuses(hk, world):
    """Over all ranks: means and sums, of integers, too; objects; decisions; gathered tensors with gradients."""
    import torch
    from torch.distributed import ReduceOp

    from hvdkit import errors
    from hvdkit.integrations.lightning import HorovodStrategy

    strategy, n, rank = HorovodStrategy(), world.size, world.rank
    mine = torch.tensor([rank, 2 * rank])
    total = n * (n - 1) // 2
    assert strategy.reduce(mine, reduce_op="sum").tolist() == [total, 2 * total]
    assert strategy.reduce(mine).tolist() == [total / n, 2 * total / n]
    assert strategy.reduce(mine, reduce_op=ReduceOp.MAX).tolist() == [n - 1, 2 * n - 2]
    assert strategy.reduce(0.5) == 0.5
    with torch.inference_mode():
        assert strategy.reduce(torch.ones(()) * rank, reduce_op="mean") == total / n
        assert strategy.all_gather(torch.ones(()) * rank).tolist() == list(range(n))
    assert strategy.broadcast({"from": rank}, src=n - 1) == {"from": n - 1}
    assert (strategy.reduce_boolean_decision(rank == 0), strategy.reduce_boolean_decision(True)) == (False, True)
    assert strategy.reduce_boolean_decision(rank == 0, all=False)
    leaf = torch.full((2, 3), float(rank), requires_grad=True)
    gathered = strategy.all_gather(leaf, sync_grads=True)
    assert gathered.shape == (n, 2, 3) and gathered[:, 0, 0].tolist() == list(range(n))
    (gathered.sum() * (rank + 1)).backward()
    assert leaf.grad.unique().tolist() == [n * (n + 1) / 2]
    assert not strategy.all_gather(leaf).requires_grad
    with pytest.raises(errors.InvalidArgumentError, match=r"reduce_op must be one of mean, .*got 'median'"):
        strategy.reduce(mine, reduce_op="median")
    with pytest.raises(errors.InvalidArgumentError, match="all ranks, got group='mine'; leave it out"):
        strategy.reduce(mine, group="mine")
    with pytest.raises(errors.InvalidArgumentError, match="adasum"):
        HorovodStrategy(op="adasum")
    strategy.barrier("end")
