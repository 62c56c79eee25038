import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy


class RowReader(nn.Module):
    """A small transformer that reads an image of 8x8 pixels row by row."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Linear(8, 32)
        self.position = nn.Parameter(torch.zeros(8, 32))
        layer = nn.TransformerEncoderLayer(32, 4, dim_feedforward=64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2)
        self.head = nn.Linear(32, 10)

    def forward(self, images):
        rows = self.embedding(images) + self.position
        return self.head(self.encoder(rows).mean(dim=1))


def load_data(partition, partitions, test=False):
    """Images and labels of one partition, every `partitions`-th digit: a fifth of them for tests, or the others."""
    digits = load_digits()
    rows = torch.arange(partition, len(digits.target), partitions)
    rows = rows[(torch.arange(len(rows)) % 5 == 0) == test]
    return torch.tensor(digits.images, dtype=torch.float32)[rows] / 16, torch.tensor(digits.target)[rows]


def fit(model, images, labels, epochs, learning_rate, penalty=lambda: 0.0):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=learning_rate)
    for _ in range(epochs):
        for batch in torch.randperm(len(labels)).split(32):
            optimizer.zero_grad()
            loss = cross_entropy(model(images[batch]), labels[batch]) + penalty()
            loss.backward()
            optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(model, images, labels):
    return float((model(images).argmax(dim=1) == labels).float().mean())
