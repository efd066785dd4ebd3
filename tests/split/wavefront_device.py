"""One device of several that compute a recurrent module in waves, for tests: `wavefront_device.py RANK BOARD ARENA…`.

Reads cases, a line of JSON each, and says how far each tensor is from what nn.LSTM and its like give in one process.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from paceline.exchange.board import Board
from paceline.exchange.mailboxes import Peers
from paceline.memory.arena import Arena
from paceline.split.cut import call_model
from paceline.split.values import Wavefront
from paceline.split.wavefront import WavefrontCut

TIMEOUT_S = 60.0
Distances = Callable[[dict[str, Any], Peers], dict[str, float | None]]


def make(case: dict[str, Any]) -> tuple[nn.RNNBase, dict[str, Any]]:
    """The module and what it is called with: the same each time."""
    torch.manual_seed(case["seed"])
    kind, batch, length = case["kind"], case["batch"], case["length"]
    options = {name: case[name] for name in ("bias", "batch_first", "dropout")}
    if kind == "LSTM":
        options["proj_size"] = case["proj"]
    if kind == "RNN":
        options["nonlinearity"] = case["nonlinearity"]
    dtype = getattr(torch, case["dtype"])
    module = getattr(nn, kind)(case["input"], case["hidden"], case["layers"], dtype=dtype, **options)
    module.train(case["training"])
    for layer in case["frozen"]:
        for name in module._all_weights[layer]:
            getattr(module, name).requires_grad_(False)
    shape = [length, batch] if batch else [length]
    if batch and case["batch_first"]:
        shape.reverse()
    x = torch.randn(*shape, case["input"], dtype=dtype, requires_grad=case["input_wanted"])
    widths = [case["proj"] or case["hidden"], *([case["hidden"]] if kind == "LSTM" else [])]
    states = [torch.randn(case["layers"], *([batch] if batch else []), width, dtype=dtype) for width in widths]
    for state in states:
        state.requires_grad_(case["states_wanted"])
    return module, {"x": x, "states": states if case["states"] else []}


def compute(module: nn.RNNBase, case: dict[str, Any], given: dict[str, Any]) -> dict[str, torch.Tensor | None]:
    """Forward and backward of something that depends on everything."""
    torch.manual_seed(case["seed"] + 1)
    x, states = given["x"], given["states"]
    if case["lengths"]:
        x = pack_padded_sequence(x, case["lengths"], batch_first=case["batch_first"], enforce_sorted=False)
    hx = None if not states else tuple(states) if case["kind"] == "LSTM" else states[0]
    with torch.set_grad_enabled(case["grad"]):
        output, finals = module(x, hx)
    found: dict[str, torch.Tensor | None] = {}
    if isinstance(output, PackedSequence):
        found |= {f"packed {name}": getattr(output, name) for name in ("batch_sizes", "unsorted_indices")}
        output = output.data
    finals = finals if isinstance(finals, tuple) else (finals,)
    found |= {"output": output} | {f"final {number}": final for number, final in enumerate(finals)}
    found["random"] = torch.rand(3)  # the generator stands where it stands in one process
    if output.requires_grad:
        used = {"output": [output], "finals": [*finals], "both": [output, *finals]}[case["used"]]
        total = sum(
            (tensor * torch.linspace(-1, 1, tensor.numel(), dtype=tensor.dtype).view_as(tensor)).sum()
            for tensor in used
        )
        total.backward()
        found |= {f"of {name}": parameter.grad for name, parameter in module.named_parameters()}
        found |= {"of x": given["x"].grad} | {f"of state {number}": s.grad for number, s in enumerate(states)}
    return {name: tensor.detach() if tensor is not None else None for name, tensor in found.items()}


def distances(case: dict[str, Any], peers: Peers) -> dict[str, float | None]:
    """By tensor: how far it is from one process; None if it is not there, though one process has it."""
    module, given = make(case)
    expected = compute(module, case, given)
    module, given = make(case)
    cut = WavefrontCut(Wavefront(parts=peers.count, time_block=case["time_block"]), peers)
    cut.prepare(call_model, module, ((), {}))
    with cut.at_work():
        got = compute(module, case, given)
    assert got.keys() == expected.keys()
    found: dict[str, float | None] = {}
    for name, value in expected.items():
        mine = got[name]
        if value is None or mine is None:
            if value is not None or mine is not None:
                found[name] = None
            continue
        assert (mine.shape, mine.dtype) == (value.shape, value.dtype), name
        found[name] = (mine.double() - value.double()).abs().max().item() if value.numel() else 0.0
    for name, _ in module.named_parameters():
        if f"of {name}" in expected and not cut.part_of(name).adds and expected[f"of {name}"] is not None:
            assert found.pop(f"of {name}") is None, f"{name} has a gradient on two devices"
    return found


def serve(rank: int, board_descriptor: int, *descriptors: int, distances: Distances) -> None:
    """Answers every case with the distances that are found for it, as one device of as many as the case asks for."""
    torch.set_num_threads(1)
    board, arenas = Board(board_descriptor), [Arena.of(descriptor) for descriptor in descriptors]
    peers = {
        count: Peers(arena, board, rank, rank, count, TIMEOUT_S)
        for count, arena in enumerate(arenas, start=1)
        if rank < count
    }
    for line in sys.stdin:
        case = json.loads(line)
        answer: dict[str, Any] = {}
        if case["devices"] in peers:
            try:
                answer = {"distances": distances(case, peers[case["devices"]])}
            except BaseException:  # it is told
                answer = {"failed": traceback.format_exc()}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve(*map(int, sys.argv[1:]), distances=distances)
