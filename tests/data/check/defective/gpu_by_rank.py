import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Worker:
    def __init__(self):
        dist.init_process_group("nccl")
        self.rank = dist.get_rank()
        torch.cuda.set_device(self.rank)  # finds: gpu-pinned-by-global-rank
        self.model = DistributedDataParallel(torch.nn.Linear(8, 1).cuda())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def run(self, dataset):
        sampler = DistributedSampler(dataset)
        loader = DataLoader(dataset, batch_size=32, sampler=sampler)
        for epoch in range(5):
            sampler.set_epoch(epoch)
            for x, y in loader:
                self.optimizer.zero_grad()
                torch.nn.functional.mse_loss(self.model(x.cuda()), y.cuda()).backward()
                self.optimizer.step()


if __name__ == "__main__":
    Worker().run(TensorDataset(torch.load("x.pt"), torch.load("y.pt")))
