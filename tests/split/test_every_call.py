"""A cut model is right in every call: of another kind than the loss makes, on one device alone, by another method, with
a number that has changed."""

from __future__ import annotations

import pytest
from conftest import Start

SCRIPT = """
import json
import torch, torch.nn as nn, torch.nn.functional as F
import paceline as pl

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.drop, self.fc2 = nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3)
    def forward(self, x, y=None, scale=1.0):
        found = self.decode(torch.tanh(self.fc1(x))) * scale
        return found if y is None else F.cross_entropy(found, y)
    def decode(self, h):
        return self.fc2(self.drop(h))

x, y = torch.randn(24, 6), torch.randint(0, 3, (24,))
model = Net()
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(*batch))
for batch in trainer.batches((x, y), batch_size=8, epochs=2):
    trainer.drop = trainer.step(batch)
ask = trainer.predictor()
told = {"evaluated": [trainer.evaluate((x, y), lambda model, batch: model(*batch)) for _ in range(3)]}
temperature = 1.0
def metric(model, batch):
    return model(*batch) * temperature * model.gain
model.gain = 1.0
told["changed"] = [trainer.evaluate((x, y), metric)]
temperature = 0.5
told["changed"].append(trainer.evaluate((x, y), metric))
model.gain = 0.25
told["changed"].append(trainer.evaluate((x, y), metric))
class Scaled:
    def __init__(self, times):
        self.times = times
    def metric(self, model, batch):
        return model(*batch) * self.times
told["of objects"] = [trainer.evaluate((x, y), Scaled(times).metric) for times in (1.0, 3.0)]
told["predicted"] = ask(x[:2]).tolist()
told["scaled"] = [ask(x[:2], scale=scale).sum().item() for scale in (1.0, 2.0, 3.0)]
model.eval()
with torch.no_grad():
    told["called"] = model(x[:2]).tolist()
    told["decoded"] = model.decode(torch.ones(1, 8)).tolist()
    if trainer.device == 0:
        told["alone"] = model(x[2:4]).tolist()
    if trainer.chief:
        told["whole"] = list(model.fc1.weight.shape)
print(json.dumps(told))
"""


@pytest.mark.parametrize("flags", ["--mesh model=2 --layout hidden=model", "--stages 2"])
def test_calls_of_every_kind_are_those_of_the_whole_model(start: Start, flags: str) -> None:
    script = SCRIPT.replace("nn.Dropout(0.5)", "nn.Dropout(0.0)") if "stages" in flags else SCRIPT
    (alone,) = start(script, None).fine().said(0)
    cut = start(script, flags).fine()
    for device in (0, 1):
        (found,) = cut.said(device)
        for name, value in found.items():
            assert _flat(value) == pytest.approx(_flat(alone[name]), rel=1e-12), name
    assert len(set(alone["evaluated"])) == 1
    assert len(set(alone["changed"])) == 3
    assert alone["of objects"][1] == pytest.approx(3 * alone["of objects"][0])


def _flat(value: object) -> list[float]:
    return [number for entry in value for number in _flat(entry)] if isinstance(value, list) else [float(str(value))]
