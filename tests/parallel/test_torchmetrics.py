"""torchmetrics under hvdkit: what each rank computes is the metric of all ranks' samples."""

from typing import Any

from ranks import needs, on_ranks

pytestmark = needs("torchmetrics")


def samples(kind: str) -> list[tuple[Any, Any]]:
    """Some samples of a task, as one process sees them."""
    import torch

    generator = torch.Generator().manual_seed(0)
    if kind == "text":
        return [(["the cat sat"] * (k + 1), ["the cat sat on a mat"] * (k + 1)) for k in range(4)]
    target = torch.randint(0, 3, (23,), generator=generator)
    return list(zip(torch.rand(23, 3, generator=generator).split(5), target.split(5), strict=True))


def own_metric() -> Any:
    """A metric of the user's own with a running maximum and a list that nothing reduces."""
    import torch
    import torchmetrics

    class Own(torchmetrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.add_state("most", torch.tensor(-1.0), dist_reduce_fx="max")
            self.add_state("rows", [], dist_reduce_fx=None)

        def update(self, output: Any, target: Any) -> None:
            self.most = torch.maximum(self.most, output.max())
            self.rows.append((output.argmax(1) == target).sum())

        def compute(self) -> Any:
            return self.most + sum(self.rows)

    return Own()


@on_ranks("torch", n=3)
def test_metrics_of_torchmetrics_are_those_of_all_samples(hk, world, everyone):
    """One rank has most batches, the last none; sums, lists, collections and text, each twice."""
    import torch
    import torchmetrics as tm

    kinds = {
        "numbers": (
            lambda: tm.MetricCollection(
                [
                    tm.classification.MulticlassAccuracy(3),
                    tm.classification.MulticlassAUROC(3),
                    tm.classification.MulticlassF1Score(3),
                    tm.classification.MulticlassConfusionMatrix(3),
                ]
            ),
            own_metric,
        ),
        "text": (tm.text.WordErrorRate,),
    }
    for kind, makers in kinds.items():
        batches = samples(kind)
        for make in makers:
            one, ranks = make(), make()
            alone = getattr(one, "values", lambda one=one: [one])
            for metric in alone():
                metric.distributed_available_fn = lambda: False
            for _ in range(2):
                one.reset(), ranks.reset()
                for number, batch in enumerate(batches):
                    one.update(*batch)
                    if number % max(1, world.size - 1) == world.rank:  # the last of three ranks has none
                        ranks.update(*batch)
                with torch.inference_mode():
                    found, expected = ranks.compute(), one.compute()
                torch.testing.assert_close(found, expected)


@on_ranks("torch", fresh=True)
def test_a_metric_with_a_way_of_its_own_and_a_process_group(hk, world, tmp_path):
    """One whose maker says that it is alone computes by itself; in a process group torchmetrics gathers by itself."""
    import torch
    import torchmetrics as tm

    own = tm.MeanMetric(distributed_available_fn=lambda: False)
    mean = tm.MeanMetric()
    for metric in (own, mean):
        metric.update(torch.tensor(float(world.rank)))
    assert (float(own.compute()), float(mean.compute())) == (world.rank, 0.5)
    rendezvous = f"file://{tmp_path / 'store'}"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=world.rank, world_size=world.size)
    again = tm.MeanMetric()
    again.update(torch.tensor(float(world.rank)))
    assert float(again.compute()) == 0.5
    torch.distributed.destroy_process_group()
