"""What a wire owes is in checkpoints: a run that is resumed makes the same bits as one that was not stopped."""

from __future__ import annotations

import pytest
from conftest import Start

SCRIPT = """
import json, os, tempfile, torch, torch.nn.functional as F, paceline as pl
from safetensors import safe_open
from pathlib import Path
from torch import nn

generator = torch.Generator().manual_seed(1)
x = torch.randn(192, 48, generator=generator)
y = (x @ torch.randn(48, 3, generator=generator)).argmax(1)
loss = lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])
path = Path(os.environ["SAVED"])

def trained(save):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 3))
    # Hosts that step by themselves have optimizer states of their own, of which a checkpoint has one.
    trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=MOMENTUM), loss)
    if not save:
        assert trainer.resume(path)
    for epoch in range(2):
        for batch in trainer.batches((x, y), 16, seed=5):
            trainer.step(batch)
        if save and epoch == 0:
            trainer.save(path)
    return {name: value.clone() for name, value in model.state_dict().items()}

whole = trained(True)
resumed = trained(False)
(training,) = path.parent.glob("*.training.safetensors")
with safe_open(training, "pt") as saved:
    kept = {name: saved.get_tensor(name) for name in saved.keys() if name.startswith("hosts/")}
print(json.dumps({"equal": [torch.equal(whole[name], resumed[name]) for name in whole]}))
print(json.dumps({"bits": [value.double().sum().item() for value in whole.values()]}))
print(json.dumps({"kept": {name: [list(value.shape), bool(value.any())] for name, value in kept.items()}}))
"""


def owed(of: str, hosts: int = 2) -> set[str]:
    names = ("0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias")
    return {f"hosts/{of}/{host}/{name}" for host in range(hosts) for name in names}


@pytest.mark.parametrize(
    ("flags", "kept"),
    [
        ("--wire powersgd:2", owed("gradient") | {"hosts/basis/0.weight"}),
        pytest.param("--wire int8", owed("gradient"), marks=pytest.mark.soak),
        pytest.param("--wire topk:0.05", owed("gradient"), marks=pytest.mark.soak),
        (
            "--every 5 --wire int8 --outer-momentum 0.5",
            owed("change") | {name.replace("change/0", "outer") for name in owed("change", 1)},
        ),
        pytest.param("--every 5 --wire topk:0.1", owed("change"), marks=pytest.mark.soak),
        pytest.param("--gossip", set(), marks=pytest.mark.soak),
        pytest.param("--wire bf16", set(), marks=pytest.mark.soak),
    ],
)
def test_a_run_that_is_resumed_makes_the_same_bits(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: object, flags: str, kept: set[str]
) -> None:
    monkeypatch.setenv("SAVED", f"{tmp_path}/saved.safetensors")
    steps_locally = "every" in flags or "gossip" in flags
    script = SCRIPT.replace("MOMENTUM", "0.0" if steps_locally else "0.9")
    run = start(script, f"--replicas 2 --exchange collective {flags}").fine(110)
    assert run.told("bits", 0) == run.told("bits", 1)
    found = run.told("kept", 0)
    assert found.keys() == kept
    assert not kept or any(owes for _, owes in found.values())
    for replica in range(2):
        assert all(run.told("equal", replica)), replica


BFLOAT16 = """
import json, torch, paceline as pl
torch.manual_seed(0)
model = torch.nn.Linear(6, 3).to(torch.bfloat16)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, x: model(x).square().mean())
for x in trainer.batches(torch.randn(24, 6).to(torch.bfloat16), 8):
    trainer.step(x)
print(json.dumps({"bits": model.weight.view(torch.int16).tolist()}))
"""


def test_parameters_of_bfloat16_are_compared_between_hosts_and_trained(start: Start) -> None:
    run = start(BFLOAT16, "--replicas 2 --exchange collective").fine(110)
    assert run.told("bits", 0) == run.told("bits", 1)
