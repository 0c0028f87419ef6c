import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x):
        return self.layer(x)


def main():
    dist.init_process_group("nccl")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    model = Net().to(local_rank)
    ddp_model = DDP(model, device_ids=[local_rank])
    optimizer = torch.optim.SGD(ddp_model.parameters(), lr=0.1)
    dataset = TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
    sampler = DistributedSampler(dataset)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in DataLoader(dataset, 32, sampler=sampler):
            optimizer.zero_grad()
            output = model(x.to(local_rank))  # finds: optimizer-not-distributed
            nn.functional.mse_loss(output, y.to(local_rank)).backward()
            optimizer.step()
    if dist.get_rank() == 0:
        torch.save(model.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
