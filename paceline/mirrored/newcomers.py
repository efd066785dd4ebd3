"""Hosts that join a run in progress get its state from one that has it.

Beside its own arena, in which the script has just made a model, such a host has nothing. After a step the others leave
their view and enter one with it, and before anything else all make one op in which that arena is filled:

    hosts 0, 1   step n ─┐                ┌ let in: op n + 1 ┐
                         ├ view 4 opens ──┤  state ─────▶    ├ decided ── step n + 1 …
    host 2        ready ─┘                └ joins:  op n + 1 ┘

Parameters, the optimizer's state, buffers, the run's notes and the bases of a wire are copied byte by byte. What a wire
owes is each host's own, and this one owes nothing. Until the op is decided nothing has been changed anywhere: if
somebody dies meanwhile, those who are left do it again in the view after.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from paceline.errors import ModelError, ReplicaDied
from paceline.exchange.coded_sums import Round
from paceline.exchange.links import Links

_TAG = (1 << 30) + 2  # no chunk has that number
_PIECE_BYTES = 64 << 20  # of one message


def bring_state(links: Links, state: Sequence[torch.Tensor], *, needs: bool) -> None:
    """Copies `state`, flat tensors, from the first host that has it to all that need it; all hosts call this."""
    told = torch.zeros(2, links.hosts, dtype=torch.int64)
    told[:, links.host] = torch.tensor([needs, sum(part.nbytes for part in state)])
    needing, sizes = links.sum_in_call(told).tolist()
    if len(set(sizes)) > 1:
        expected = f"another host has {next(size for size in sizes if size != sizes[links.host])}, build the same"
        raise ModelError("model", f"{sizes[links.host]} bytes with its optimizer", expected)
    givers, takers = ([host for host, needed in enumerate(needing) if needed == wanted] for wanted in (0, 1))
    if not givers:
        raise ReplicaDied("no host is left that has the run's state: start it again from a checkpoint")
    nothing = torch.empty(0, dtype=torch.uint8)
    gives = links.host == givers[0]
    for part in state:
        flat = part.view(-1).view(torch.uint8)
        for start in range(0, flat.numel(), _PIECE_BYTES):
            piece = flat[start : start + _PIECE_BYTES]
            sent = [piece if gives and host in takers else nothing for host in range(links.hosts)]
            received = [piece if needs and host == givers[0] else nothing for host in range(links.hosts)]
            links.exchange(Round(received, sent), _TAG)
