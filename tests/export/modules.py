"""Small modules, each the smallest that shows one way a model multiplies with a weight."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Mlp(nn.Module):
    """Siblings q and k behind a LayerNorm, and o behind a GELU; 3-D inputs."""

    def __init__(self, width: int = 64, hidden: int = 32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q = nn.Linear(width, hidden)
        self.k = nn.Linear(width, hidden, bias=False)
        self.o = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.o(functional.gelu(self.q(h) + self.k(h)))


class Attention(nn.Module):
    """Heads of 32, whose scale and its square root are no binary fractions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)
        self.out = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        heads = self.qkv(x).reshape(batch, tokens, 3, 2, 32).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*heads.unbind(0))
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))


class FusedHeads(nn.Module):
    """q, k and v in one weight, whose product is cut along N and brought into heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            part.view(batch, tokens, 4, 16).transpose(1, 2) for part in self.qkv(x).split(64, -1)
        )
        return q * k + v


class Single(nn.Module):
    """One Linear and nothing else; the rank of the input decides the operator."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 32, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Conv1D(nn.Module):
    """GPT-2's linear layer: the weight is stored [K, N]."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 32) * 0.1)
        self.bias = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        flat = torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight)
        return flat.view(*x.shape[:-1], 32)


class Transposed(nn.Module):
    """`Conv1D` twice in a module, as a transformer has it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = Conv1D()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)


class Shared(nn.Module):
    """One Linear called twice, on different inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.fc(x)))


class Tied(nn.Module):
    """Two Linears with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(64, 64)
        self.b = nn.Linear(64, 64)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)))


class TiedHead(nn.Module):
    """A head that shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.head = nn.Linear(64, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids))


class Flattened(nn.Module):
    """The input's width comes out of a Reshape to -1."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        heads = x.reshape(x.shape[0], x.shape[1], 4, 16).transpose(1, 2)
        return self.fc(heads.transpose(1, 2).reshape(x.shape[0], x.shape[1], -1))


class Mixed(nn.Module):
    """A convolution, a norm in float32 and a residual, around one Linear (C19)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(64, 64, 1)
        self.norm = nn.LayerNorm(64)
        self.fc = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x.transpose(1, 2)).transpose(1, 2)
        h = functional.layer_norm(h.float(), (64,), self.norm.weight.float()).to(x.dtype)
        return x + self.fc(h)


# Shared by the tests, which trace each of them once.
MLP, ATTENTION, SINGLE, TRANSPOSED = Mlp(), Attention(), Single(), Transposed()
SHARED, TIED, TIED_HEAD, FLATTENED, MIXED = Shared(), Tied(), TiedHead(), Flattened(), Mixed()
FUSED_HEADS = FusedHeads()
