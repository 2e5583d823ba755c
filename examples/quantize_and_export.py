"""Quantize a network that was trained elsewhere, without any federation, and write it for ONNX Runtime."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import fedmpq

digits = load_digits()
pixels, labels = (digits.images * 15.9375).astype("uint8"), digits.target
images = torch.from_numpy(pixels).float()[:, None] / 255

torch.manual_seed(0)
network = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(32 * 16, 10),
)
optimizer = torch.optim.Adam(network.parameters(), 0.01)
for _ in range(40):
    optimizer.zero_grad()
    nn.functional.cross_entropy(network(images[:1400]), torch.from_numpy(labels[:1400])).backward()
    optimizer.step()
network.eval()
with torch.no_grad():
    right = (network(images[1400:]).argmax(1).numpy() == labels[1400:]).mean()
print(f"in full precision {right:.1%}")

for budget in (8, 4, 3, 2):
    quantized = fedmpq.quantize(network, budget=budget, calibration=pixels[:1400, ..., None])
    share = quantized.accuracy(pixels[1400:, ..., None], labels[1400:])
    print(f"{quantized.bits_per_weight:.2f} bits per weight {share:.1%}")

exported = fedmpq.export(quantized, "digits.onnx")
print(f"{exported.path}: {exported.card['file_bytes']:,} bytes, equal to the bit in ONNX Runtime")
