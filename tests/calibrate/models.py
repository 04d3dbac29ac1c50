"""Small modules with known traps, and the layer records that go with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from quantkit.recipes.recipe import Layer


def linears(module: nn.Module, **groups: str) -> list[Layer]:
    """A record per nn.Linear; `groups` maps a layer's last name to its group."""
    return [
        Layer(
            name,
            f"{name}.weight",
            type(part).__name__,
            "linear",
            tuple(part.weight.shape),
            group=groups.get(name.rpartition(".")[2], name),
        )
        for name, part in module.named_modules()
        if type(part) is nn.Linear
    ]


class Block(nn.Module):
    """Norm, q/k/v that share an input, and an output layer, over [B, S, K]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        y = self.norm(x)
        scores = self.q(y) @ self.k(y).transpose(-1, -2) / y.shape[-1] ** 0.5
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask[:, None, :] == 0, -1e9)
        return x + self.out(scores.softmax(-1) @ self.v(y))


class Stack(nn.Module):
    """Embedding, blocks, dropout, batch norm, and a head tied to the embedding."""

    def __init__(self, blocks: int = 2, width: int = 32, vocabulary: int = 40) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.dropout = nn.Dropout(0.5)
        self.bn = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = self.dropout(block(x, attention_mask))
        return self.head(self.bn(x.transpose(1, 2)).transpose(1, 2) * self.scale)


class Router(nn.Module):
    """Four experts of which data ever reaches the first two."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        choice = (x[:, 0] > 0).long()
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            if (choice == index).any():
                y[choice == index] = expert(x[choice == index])
        return y


def seeded(module_class: type[nn.Module], *args: Any, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return module_class(*args).eval()


def token_batches(count: int, seed: int = 1, vocabulary: int = 40) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {"input_ids": torch.randint(vocabulary, (3, 7), generator=generator)} for _ in range(count)
    ]
