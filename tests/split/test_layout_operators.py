"""Every operator that people write between two layers, cut along every dim there is: what comes out is the same."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from test_layouts import ROWS, compare
from torch import nn

from paceline.split.layout.show import dims_of

# Of h, which is 5 rows of 8, as many again.
OPERATORS = """
(h[:, :, None] * h[:, None]).sum(1)
(h[:, :, None] @ h[:, None]).mean(-1)
(h[:, None] - h[None]).square().sum(-1) @ h
F.avg_pool1d(h[:, None], 3, 1, 1)[:, 0]
F.batch_norm(h, None, None, training=True)
F.conv1d(h[:, :, None], torch.ones(8, 1, 1), groups=8)[:, :, 0]
F.conv1d(h[:, None], torch.ones(1, 1, 3), padding=1)[:, 0]
F.cosine_similarity(h[:, None], h[None], dim=-1) @ h
F.elu(h)
F.gelu(h, approximate='tanh')
F.group_norm(h[:, :, None], 2)[:, :, 0]
F.instance_norm(h[:, None])[:, 0]
F.interpolate(h[:, None], scale_factor=2)[:, 0, ::2]
F.layer_norm(h, (8,))
F.local_response_norm(h[:, :, None], 3)[:, :, 0]
F.max_pool1d(h[:, None], 2).repeat_interleave(2, -1)[:, 0]
F.normalize(h, dim=-1)
F.normalize(h, dim=0)
F.pad(h, (0, 0, 1, 0))[1:]
F.pad(h, (1, 1))[:, 1:-1]
F.pad(h.diff(dim=-1), (0, 1))
F.pixel_shuffle(h.view(5, 4, 1, 2), 2).reshape(5, 8)
F.prelu(h, torch.full((8,), 0.1))
F.rms_norm(h, (8,))
F.scaled_dot_product_attention(h.view(5, 2, 2, 2), h.view(5, 2, 2, 2), h.view(5, 2, 2, 2)).reshape(5, 8)
h * (h > -9).all()
h * (h > 0).any(-1, True)
h * (h > 0).sum(-1, True)
h * (h @ torch.ones(8))[:, None]
h * (h.argmax(-1, True) + 1)
h * (torch.arange(8) > 3)
h * F.binary_cross_entropy_with_logits(h, torch.zeros(5, 8))
h * F.cross_entropy(h, torch.arange(5))
h * F.cross_entropy(h, torch.arange(5), label_smoothing=0.1)
h * F.kl_div(h.log_softmax(-1), h.detach().softmax(-1), reduction='batchmean')
h * F.mse_loss(h, torch.zeros(5, 8))
h * F.nll_loss(h.log_softmax(-1), torch.arange(5))
h * F.smooth_l1_loss(h, torch.zeros(5, 8))
h * h.detach().softmax(-1)
h * h.nansum(-1, True)
h * h.sum(-1, keepdim=True, dtype=torch.float64).float()
h * torch.dot(h[0], h[1])
h * torch.trace(h.t() @ h)
h + F.embedding(torch.arange(5), torch.arange(40.0).view(5, 8))
h + F.embedding_bag(torch.arange(5)[:, None], torch.arange(40.0).view(5, 8))
h + F.one_hot(torch.arange(5) % 8, 8)
h + h.detach()[:, :1]
h + h.prod(-1, True)
h + torch.bucketize(h.detach(), torch.tensor([0.0, 1.0]))
h + torch.diag(torch.arange(8.0)).sum(0)
h + torch.outer(h[0], h[1]).sum(0)
h + torch.tensordot(h, h, dims=([0], [0])).sum(0)
h - h.amax(-1, True)
h - h.kthvalue(3, -1, True).values
h - h.logsumexp(-1, True)
h - h.max()
h - h.max(-1, True).values
h - h.mean((0, 1), keepdim=True)
h - h.mean()
h - h.median(-1, True).values
h - h[2]
h - h[:, 2:3]
h / (h.var(0) + 1)
h / h.std(-1, keepdim=True)
h / torch.linalg.vector_norm(h, dim=-1, keepdim=True)
h @ (h.t() @ h)
h @ h.t() @ h
h.clamp(max=h.mean(-1, True))
h.clone().mul_(2).add_(h)
h.clone()[:, :4].mul_(2).repeat(1, 2)
h.cumprod(-1)
h.cumsum(-1)
h.cumsum(0)
h.flatten().view(5, 8)
h.flip(-1)
h.flip(0)
h.gather(-1, torch.arange(8).flip(0).expand(5, 8))
h.index_select(1, torch.tensor([3, 1, 0, 2, 7, 6, 5, 4]))
h.lerp(h.flip(-1), 0.3)
h.logcumsumexp(-1)
h.masked_fill(torch.arange(8) > 3, 0.0)
h.minimum(h.mean())
h.repeat(1, 2)[:, :8]
h.repeat(2, 1)[:5]
h.reshape(-1).reshape(8, 5).t()
h.roll(1, -1)
h.roll(1, 0)
h.scatter(1, torch.zeros(5, 1, dtype=torch.long), 1.0)
h.softmax(-1)
h.softmax(0)
h.sort(-1).values
h.swapaxes(0, 1).mT
h.t().contiguous().t()
h.take(torch.arange(40).flip(0)).view(5, 8)
h.tile(1, 1)
h.topk(3, -1).values.sum(-1, True) + h
h.tril()
h.unfold(1, 2, 2).flatten(1)
h.view(5, 2, 2, 2).movedim(1, 3).reshape(5, 8)
h.view(5, 2, 4).transpose(1, 2).reshape(5, 8)
h.view(5, 4, 2).sum(-1).repeat_interleave(2, -1)
h[:, None].expand(5, 3, 8).mean(1)
h[:, None].squeeze()
h[:, None].squeeze()[:, :8]
h[:, torch.tensor([3, 1, 0, 2, 7, 6, 5, 4])]
h[torch.tensor([3, 1, 0, 2, 4])]
sum(h.split(4, -1)).repeat(1, 2)
sum(h.view(5, 2, 4).unbind(1)).repeat(1, 2)
torch.addcmul(h, h, h.sum(-1, True))
torch.addmm(h, h, torch.eye(8), beta=2.0)
torch.baddbmm(h[:, None], h[:, None], torch.ones(5, 8, 8))[:, 0]
torch.cat([F.glu(h, -1)] * 2, -1)
torch.cat([c * 2 for c in h.chunk(2, -1)], -1)
torch.cat([h[:, 4:], h[:, :4]], -1)
torch.cat([h[:, ::2], h[:, 1::2]], -1)
torch.cat(h.split([3, 5], -1)[::-1], -1)
torch.cdist(h, h) @ h
torch.einsum('bi,bi->b', h, h)[:, None] * h
torch.einsum('bi,bj->bi', h, h)
torch.einsum('bi,ci->bc', h, h) @ h
torch.fft.rfft(h).abs().sum(-1, True) * h
torch.max(h, h.mean(0))
torch.stack([h, 2 * h], -1).flatten(1)[:, :8]
torch.stack([h, 2 * h], 1).sum(1)
torch.where(h > 0, h, h.mean(-1, True))
torch.zeros_like(h).scatter_add(1, torch.arange(8).flip(0).expand(5, 8), h)
""".strip().splitlines()


class Between(nn.Module):
    """Two layers, and an operator on what the first gives."""

    def __init__(self, operator: str) -> None:
        super().__init__()
        self._operator = operator
        self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.fc1(x))
        return self.fc2(eval(self._operator, {"h": h, "torch": torch, "F": F}))  # type: ignore[no-any-return]


@pytest.mark.soak
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.filterwarnings("ignore:layout")  # what stays whole is told
def test_along_every_dim_it_gives_what_it_gives_whole(operator: str) -> None:
    found = dims_of(lambda model, rows: model(rows).sum(), Between(operator), ROWS, {})["dims"]
    dims = [dim for dim, about in found.items() if dim != "in" and min(about["sizes"]) > 1]
    assert dims
    for dim in dims:
        compare(lambda: Between(operator), ROWS, {"model": 2}, {dim: "model"})
