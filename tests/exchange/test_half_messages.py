"""A message of which a part has come when its sender is no more: nobody waits for the rest, and the process can end."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from conftest import Start

SCRIPT = """
import os, signal, sys, time
import torch
from paceline.exchange.coded_sums import Round
from paceline.exchange.links import Links, open_store, serve_store
from paceline.mirrored.link_threads import LinkThreads

torch.set_num_threads(1)
at, told = os.pipe()
if not (sender := os.fork()):
    os.close(told)
    store = open_store(os.read(at, 100).decode(), serve=False, timeout_s=60)
    links = Links(store, "test", 1, 2, 60.0, torch.device("cpu"))
    links.exchange(Round([torch.empty(0)] * 2, [torch.zeros(1 << 29, dtype=torch.uint8), torch.empty(0)]), 5)
    os._exit(0)
address = serve_store("127.0.0.1")
os.write(told, address.encode())
store = open_store(address, serve=False, timeout_s=60)
links = Links(store, "test", 0, 2, 60.0, torch.device("cpu"))
threads = LinkThreads(2)
received = torch.zeros(1 << 29, dtype=torch.uint8) + 1
under_way = threads.submit(links.exchange, Round([torch.empty(0), received], [torch.empty(0)] * 2), 5)
while received[:1 << 20].any():
    time.sleep(0.001)
os.kill(sender, getattr(signal, sys.argv[1]))
assert received[-1], "all of it has come"
links.abort()
began = time.monotonic()
threads.let_end([under_way], 0.5)
print(time.monotonic() - began)
threads.submit(print, "goes on").result(10)
if sys.argv[1] == "SIGSTOP":
    os.kill(sender, signal.SIGKILL)
"""


@pytest.mark.timeout(60)
@pytest.mark.parametrize("how", ["SIGKILL", "SIGSTOP"])
def test_nobody_waits_for_the_rest_of_a_message_whose_sender_is_gone(how: str) -> None:
    began = time.monotonic()
    run = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True, timeout=50, check=False)
    assert run.returncode == 0, run.stderr
    seconds, then = run.stdout.splitlines()
    assert float(seconds) < 5
    assert then == "goes on"
    assert time.monotonic() - began < 40, "the end of the process has waited for it"


LEAVES = """
import os, signal, sys, time, torch, paceline as pl

class EndsSlowly:
    def __del__(self, sleep=time.sleep):
        sleep(2.0)

def leave(*_):
    raise SystemExit(0)

def loss(model, x):
    if trainer.steps == 3:
        if pl.place().rank == 0:
            sys.ends_slowly = EndsSlowly()  # Python ends, and meanwhile the other host does
            signal.signal(signal.SIGALRM, leave)
            signal.alarm(1)
        else:
            time.sleep(2.0)
            os._exit(0)
    return model(x).square().mean()

torch.manual_seed(0)
model = torch.nn.Linear(6, 3)
trainer = pl.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss)
for batch in trainer.batches(torch.randn(64, 6), 8):
    trainer.step(batch)
"""


def test_one_that_leaves_in_the_middle_of_a_step_ends_well_although_a_thread_waits_for_another_host(
    start: Start,
) -> None:
    run = start(LEAVES, "--replicas 2 --exchange collective --timeout 60").end()
    assert (run.code, run.err) == (0, "")
