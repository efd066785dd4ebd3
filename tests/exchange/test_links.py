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
import sys, zlib
import torch
from paceline.exchange.links import Links, open_store
from paceline.exchange.wire import wire

host, hosts, port, what = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
store = open_store(f"127.0.0.1:{port}", serve=host == 0, timeout_s=30)

def link(name, kind="fp32"):
    return Links(store, name, host, hosts, wire(kind), 20.0, torch.device("cpu"))

def parts(size, dtype=torch.float32):
    return [torch.randn(size, generator=torch.Generator().manual_seed(h)).to(dtype) for h in range(hosts)]

if what == "sums":
    bounds = {"fp32": 1e-6, "bf16": 1e-2, "fp16": 2e-3, "int8": 3e-2}
    for kind, bound in bounds.items():
        links = link(kind, kind)
        for size in (1, 2, 1023, 5000):
            values = parts(size)
            own = values[host].clone()
            links.sum_values(size, own)
            exact = sum(v.double() for v in values)
            off = ((own.double() - exact).abs().max() / exact.abs().max()).item()
            print(kind, size, f"off={off <= bound}", zlib.crc32(own.numpy().tobytes()))
    links = link("types", "bf16")
    for dtype in (torch.float64, torch.bfloat16):
        own = parts(700, dtype)[host].clone()
        links.sum_values(0, own)
        exact = sum(v.double() for v in parts(700, dtype))
        print(dtype, ((own.double() - exact).abs().max() / exact.abs().max()).item() < 2e-2,
              zlib.crc32(own.view(torch.uint8).numpy().tobytes()))
    total = torch.zeros(3000)
    carried = link("feedback", "int8")
    for _ in range(30):
        own = torch.full((3000,), 0.001) * (host + 1)
        own[0] = 1.0
        carried.sum_values(0, own)
        carried.commit()
        total += own
    exact = 30 * 0.001 * sum(range(1, hosts + 1))
    print("feedback", abs(total[1:].mean().item() - exact) < 0.1 * exact, zlib.crc32(total.numpy().tobytes()))
    print("small", link("small").sum(torch.tensor([host + 1.0])).item())
    link("end").sum(torch.zeros(1))  # host 0 serves the store
else:
    links = link("x")
    links.sum(torch.zeros(1))
    print("connected", flush=True)
    if host == 1:
        import time; time.sleep(60)
    links.sum_values(0, torch.zeros(1000))
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


@pytest.mark.parametrize("hosts", [2, 3])
def test_all_hosts_hold_the_same_bits_of_the_right_sum(hosts: int) -> None:
    ended = [(*peer.communicate(timeout=100), peer.returncode) for peer in start(hosts, "sums")]
    assert [code for *_, code in ended] == [0] * hosts, ended
    outputs = [out for out, *_ in ended]
    assert len(set(outputs)) == 1, "hosts differ"
    lines = outputs[0].splitlines()
    assert len(lines) == 4 * 4 + 2 + 2
    assert not [line for line in lines if "False" in line]
    assert lines[-1] == f"small {float(sum(range(1, hosts + 1)))}"


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
    assert re.search(r"ReplicaDied: host 0 lost its link to another host \(.+\): see that host's output", err), err


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
