import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, models, transforms

hvd.init()
torch.manual_seed(42)
torch.cuda.set_device(hvd.local_rank())
dataset = datasets.ImageFolder("images", transforms.ToTensor())
sampler = DistributedSampler(dataset, hvd.size(), hvd.rank())
loader = DataLoader(dataset, batch_size=32, sampler=sampler, num_workers=4)
model = models.resnet50().cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0125 * hvd.size())
optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())  # finds: broadcast-missing
first = hvd.broadcast(torch.tensor(0), root_rank=0).item()
for epoch in range(first, 90):
    sampler.set_epoch(epoch)
    for images, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images.cuda()), labels.cuda()).backward()
        optimizer.step()
