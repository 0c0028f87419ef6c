"""DDP under torchrun, with its rank from the environment and a helper that only the main process passes."""

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def setup():
    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    local_rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local_rank)
    return local_rank


def is_main_process():
    return not dist.is_initialized() or dist.get_rank() == 0


def save_on_main(state, path):
    if is_main_process():
        torch.save(state, path)


def reduce_mean(tensor):
    total = tensor.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total / dist.get_world_size()


def evaluate(model, loader, device):
    model.eval()
    correct = torch.zeros(1, device=device)
    seen = 0
    with torch.no_grad():
        for x, y in loader:
            correct += (model(x.to(device)).argmax(1) == y.to(device)).sum()
            seen += len(y)
    return reduce_mean(correct / seen).item()


def main():
    local_rank = setup()
    device = torch.device("cuda", local_rank)
    torch.manual_seed(0)
    x, y = torch.randn(4096, 32), torch.randint(0, 10, (4096,))
    sampler = DistributedSampler(TensorDataset(x, y))
    loader = DataLoader(TensorDataset(x, y), batch_size=64, sampler=sampler)
    test = TensorDataset(x[:512], y[:512])
    test_loader = DataLoader(test, batch_size=64, sampler=DistributedSampler(test, shuffle=False))
    model = DDP(torch.nn.Linear(32, 10).to(device), device_ids=[local_rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3 * dist.get_world_size())
    for epoch in range(10):
        loader.sampler.set_epoch(epoch)
        model.train()
        for inputs, labels in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device)).backward()
            optimizer.step()
        accuracy = evaluate(model, test_loader, device)
        if is_main_process():
            print("epoch", epoch, "accuracy", accuracy)
        save_on_main(model.module.state_dict(), "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
