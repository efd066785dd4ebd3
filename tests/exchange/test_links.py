"""Between hosts: every wire gives all hosts the same bits, and a host that dies is explained in seconds."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from paceline.exchange.links import open_store

PEER = """
import atexit, sys, zlib
from pathlib import Path

def threads_of_gloo():
    tasks = Path("/proc/self/task").iterdir()
    names = [(task / "comm").read_text() for task in tasks if (task / "comm").exists()]
    return sum("gloo" in name for name in names)

atexit.register(lambda: print("threads at the end", threads_of_gloo()))  # the first is the last to be called
import torch
from paceline.exchange.coded_sums import Round
from paceline.exchange.host_sums import HostSums
from paceline.exchange.links import Links, open_store
from paceline.exchange.low_rank import LowRankSum, Matrix, first_basis

host, hosts, port, what = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
store = open_store(f"127.0.0.1:{port}", serve=host == 0, timeout_s=30)

def link(name):
    return Links(store, name, host, hosts, 20.0, torch.device("cpu"))

def sums_of(name, kind="fp32"):
    return HostSums.by_value(link(name), kind, torch.device("cpu"))

def parts(size, dtype=torch.float32):
    return [torch.randn(size, generator=torch.Generator().manual_seed(h)).to(dtype) for h in range(hosts)]

if what == "sums":
    bounds = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 2e-3, "int8": 3e-2}
    for kind, bound in bounds.items():
        sums = sums_of(kind, kind)
        for size in (1, 2, 1023, 5000):
            values = parts(size)
            own = values[host].clone()
            sums.sum(size, own)
            exact = sum(v.double() for v in values)
            off = ((own.double() - exact).abs().max() / exact.abs().max()).item()
            print(kind, size, f"off={off <= bound}", zlib.crc32(own.numpy().tobytes()))
    sums = sums_of("types", "bf16")
    for dtype in (torch.float64, torch.bfloat16):
        own = parts(700, dtype)[host].clone()
        sums.sum(dtype.itemsize, own)
        exact = sum(v.double() for v in parts(700, dtype))
        print(dtype, ((own.double() - exact).abs().max() / exact.abs().max()).item() < 2e-2,
              zlib.crc32(own.view(torch.uint8).numpy().tobytes()))
    for kind, steps in (("int8", 30), ("topk:0.1", 90)):
        total = torch.zeros(3000)
        carried = sums_of(f"feedback {kind}", kind)
        for _ in range(steps):
            own = torch.full((3000,), 0.001) * (host + 1)
            own[0] = 1.0
            carried.sum(0, own)
            carried.commit()
            total += own
        exact = steps * 0.001 * sum(range(1, hosts + 1))
        print("feedback", abs(total[1:].mean().item() - exact) < 0.3 * exact, zlib.crc32(total.numpy().tobytes()))
    # Two matrices among other values: what hosts owe is to the rounding what the sums lack, and a step that was not
    # accepted is as if it had not been.
    shapes, rank, links = (Matrix(3, 40, 30, 0), Matrix(1210, 24, 50, 1)), 2, link("low rank")
    elements, owed = 2500, (torch.zeros(2500), torch.zeros(2500))
    bases = [(first_basis(shape, rank), torch.zeros(shape.columns, rank)) for shape in shapes]
    low = LowRankSum(elements, shapes, rank, host, hosts, owed, bases)
    delivered, exact = torch.zeros(elements).double(), torch.zeros(elements).double()
    for step in range(12):
        given = [torch.randn(elements, generator=torch.Generator().manual_seed(100 * step + h)) for h in range(hosts)]
        redone = []
        for _ in range(2 if step % 3 == 0 else 1):
            own = given[host].clone()
            for number, one_round in enumerate(low.rounds(own)):
                links.exchange(one_round, number)
            redone.append(own)
        low.commit()
        assert torch.equal(redone[0], redone[-1])
        delivered += own.double()
        exact += sum(g.double() for g in given)
    owing = links.sum(low._owed[0].double())
    print("low rank", ((delivered + owing - exact).abs().max() < 1e-4).item(), (owing.abs().max() > 1).item(),
          torch.equal(owing[:3], torch.zeros(3).double()), zlib.crc32(own.numpy().tobytes()),
          zlib.crc32(low._bases[0][0].numpy().tobytes()))
    print("small", link("small").sum(torch.tensor([host + 1.0])).item())
    end = link("end")
    end.sum(torch.zeros(1))  # host 0 serves the store
    print("threads before the end", threads_of_gloo() > 0)
else:
    links = link("x")
    links.sum(torch.zeros(1))
    print("connected", flush=True)
    if host == 1:
        import time; time.sleep(60)
    links.exchange(Round([torch.zeros(1000)] * 2, [torch.zeros(1000)] * 2), 0)
"""


def start(hosts: int, what: str) -> list["subprocess.Popen[str]"]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return [
        subprocess.Popen(
            [sys.executable, "-c", PEER, str(host), str(hosts), str(port), what],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for host in range(hosts)
    ]


@pytest.fixture(scope="module")
def outputs() -> dict[int, list[str]]:
    """By number of hosts: what each of them said."""
    found = {}
    for hosts in (2, 3):
        ended = [(*peer.communicate(timeout=100), peer.returncode) for peer in start(hosts, "sums")]
        assert [code for *_, code in ended] == [0] * hosts, ended
        (said,) = {out for out, *_ in ended}  # else hosts differ
        found[hosts] = said.splitlines()
    return found


@pytest.mark.parametrize("hosts", [2, 3])
def test_all_hosts_hold_the_same_bits_of_the_right_sum(hosts: int, outputs: dict[int, list[str]]) -> None:
    lines = outputs[hosts]
    assert len(lines) == 4 * 4 + 2 + 2 + 1 + 1 + 2
    assert not [line for line in lines if "False" in line]
    assert lines[-3] == f"small {float(sum(range(1, hosts + 1)))}"


def test_threads_of_gloo_have_ended_before_python_does(outputs: dict[int, list[str]]) -> None:
    """One that lets go of a tensor while Python is ending aborts the process, after its script has ended well."""
    assert outputs[2][-2:] == ["threads before the end True", "threads at the end 0"]


def test_a_host_that_dies_is_explained_in_seconds() -> None:
    peers = start(2, "death")
    for peer in peers:
        assert peer.stdout is not None
        assert peer.stdout.readline() == "connected\n"
    peers[1].send_signal(signal.SIGKILL)
    began = time.monotonic()
    _, err = peers[0].communicate(timeout=30)
    peers[1].communicate()
    assert time.monotonic() - began < 15
    assert peers[0].returncode == 1
    assert re.search(r"LinkLost: host 0 lost its link to another host \(.+\): see that host's output", err), err


def test_a_store_for_this_machine_alone_listens_on_loopback_alone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    stores = [open_store(f"127.0.0.1:{port}", serve=True, timeout_s=5) for _ in range(2)]  # of two trainers
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value"
    tables = [Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table.splitlines()[1:]]
    listening = "0A"
    assert [local for _, local, _, state, *_ in rows if state == listening and local.endswith(f":{port:04X}")] == [
        f"0100007F:{port:04X}"
    ]
