"""Optimizers as people bring them along, after their papers: what counts is what they look at and keep."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.optim import Optimizer


class Bare(Optimizer):
    """The part that all of them have."""

    options: ClassVar[dict[str, Any]] = {"lr": 0.01}

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, {**self.options, **options})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.prepare()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1  # as timm's and their authors' have it
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.one(parameter, parameter.grad, self.state[parameter], group)

    def prepare(self) -> None:
        """Look at everything first."""

    def one(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class Adan(Bare):
    """Keeps the gradient before; at its first step that is the first one."""

    options: ClassVar[dict[str, Any]] = {"lr": 0.01, "betas": (0.98, 0.92, 0.99)}

    def one(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        b1, b2, b3 = group["betas"]
        if "before" not in state or group["step"] == 1:
            state.update({name: torch.zeros_like(p) for name in ("mean", "change", "square")}, before=g.clone())
        difference = g - state["before"]
        state["mean"].lerp_(g, 1 - b1)
        state["change"].lerp_(difference, 1 - b2)
        state["square"].lerp_((g + b2 * difference).square(), 1 - b3)
        c1, c2, c3 = (1 - beta ** group["step"] for beta in group["betas"])
        update = state["mean"] / c1 + b2 * state["change"] / c2
        p.sub_(update / ((state["square"] / c3).sqrt() + 1e-8), alpha=group["lr"])
        state["before"] = g.clone()


class Lamb(Bare):
    """Divides all gradients by their common length, and steps by the length of each tensor."""

    def prepare(self) -> None:
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        length = torch.stack([g.norm() for g in gradients]).norm() if gradients else torch.ones(())
        self.clip = lambda g: g / length.clamp(min=1.0)

    def one(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        g = self.clip(g)
        mean, square = (state.setdefault(name, torch.zeros_like(p)) for name in ("exp_avg", "exp_avg_sq"))
        mean.lerp_(g, 0.1)
        square.lerp_(g.square(), 0.01)
        step = group["step"]
        update = (mean / (1 - 0.9**step)) / ((square / (1 - 0.99**step)).sqrt() + 1e-6)
        trust = torch.where((p.norm() > 0) & (update.norm() > 0), p.norm() / update.norm(), 1.0)
        p.sub_(update * trust * group["lr"])


class Lars(Bare):
    """Steps by the length of each tensor."""

    def one(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        trust = p.norm() / (g.norm() + 1e-9)
        moved = state.setdefault("momentum_buffer", torch.zeros_like(p))
        moved.mul_(0.9).add_(g * trust)
        p.sub_(moved, alpha=group["lr"])


class Lion(Bare):
    """Steps by signs, and counts nothing."""

    def one(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        mean = state.setdefault("exp_avg", torch.zeros_like(p))
        p.sub_(mean.lerp(g, 0.1).sign(), alpha=group["lr"])
        mean.lerp_(g, 0.01)


class AdaBelief(Bare):
    """Counts its steps for each tensor, as plain numbers."""

    def one(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = step = state.get("step", 0) + 1
        mean, spread = (state.setdefault(name, torch.zeros_like(p)) for name in ("exp_avg", "exp_avg_var"))
        mean.lerp_(g, 0.1)
        spread.lerp_((g - mean).square(), 0.001).add_(1e-12)
        p.sub_((mean / (1 - 0.9**step)) / ((spread / (1 - 0.999**step)).sqrt() + 1e-6), alpha=group["lr"])


class Shampoo(Bare):
    """Keeps a square matrix of each tensor, and from its third step on the root of it."""

    def one(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        rows = g.reshape(len(g) if g.dim() else 1, -1)
        seen = state.setdefault("seen", 1e-3 * torch.eye(len(rows), dtype=g.dtype))
        seen.add_(rows @ rows.t())
        state["count"] = state.get("count", 0) + 1
        if state["count"] >= 3 and (state["count"] % 2 or "root" not in state):
            values, vectors = torch.linalg.eigh(seen)
            state["root"] = vectors @ torch.diag(values.clamp(min=1e-6).pow(-0.25)) @ vectors.t()
        p.sub_((state["root"] @ rows if "root" in state else rows).reshape(g.shape), alpha=group["lr"])


class Prodigy(Bare):
    """Learns one rate for all tensors from how far they have come, and keeps it in its groups."""

    options: ClassVar[dict[str, Any]] = {"lr": 1.0, "d": 1e-3, "numerator": 0.0}

    def prepare(self) -> None:
        first = self.param_groups[0]
        along, lengths = 0.0, 1e-12
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    start = state.setdefault("start", p.clone())
                    total = state.setdefault("sum", torch.zeros_like(p)).add_(p.grad, alpha=first["d"])
                    along += first["d"] * float((p.grad * (start - p)).sum())
                    lengths += float(total.abs().sum())
        numerator = 0.9 * first["numerator"] + along
        d = max(first["d"], numerator / lengths)
        for group in self.param_groups:
            group["numerator"], group["d"] = numerator, d

    def one(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        square = state.setdefault("square", torch.zeros_like(p))
        square.mul_(0.99).addcmul_(g, g, value=0.01)
        p.sub_(g / (square.sqrt() + 1e-8), alpha=group["lr"] * group["d"])


# ── these are refused ────────────────────────────────────────────────────────────────────────────────────────


class Sam(Bare):
    """Wants to compute the loss again, elsewhere."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "it needs a closure"


class Langevin(Bare):
    """Adds noise."""

    def one(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g + torch.randn_like(g), alpha=group["lr"])


class Counting(Bare):
    """Keeps its count in an attribute."""

    count = 0

    def prepare(self) -> None:
        self.count += 1

    def one(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] / self.count)


class Lookahead(Optimizer):
    """Goes back half of the way now and then; another optimizer makes the steps."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.optimizer, self.param_groups = inner, inner.param_groups

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step()


class Listing(Bare):
    """Has its parameters in a list of its own, as LBFGS does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.listed = self.param_groups[0]["params"]


class Late(Bare):
    """Keeps something that its first updates do not show."""

    def one(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["count"] = state.get("count", 0) + 1
        if state["count"] == 10:
            state["surprise"] = g.clone()
        p.sub_(g, alpha=group["lr"])
