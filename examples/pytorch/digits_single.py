"""Train an MLP on handwritten digits in one process: the program that the README takes to several."""

import torch
from sklearn.datasets import load_digits

device = "cuda" if torch.cuda.is_available() else "cpu"
x, y = load_digits(return_X_y=True)
data = torch.utils.data.TensorDataset(torch.tensor(x / 16, dtype=torch.float32), torch.tensor(y))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True, drop_last=True)
steps = len(loader)

for epoch in range(10):
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    print(f"epoch {epoch + 1}: loss {loss.item():.3f} after {steps} steps")
