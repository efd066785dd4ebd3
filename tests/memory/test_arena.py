"""Shared memory that vanishes with its last process, and says so when there is not enough."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from paceline.errors import ArenaError
from paceline.memory.arena import Arena

ATTACH = """
import sys, torch
from paceline.memory.arena import Arena
arena = Arena.attach(int(sys.argv[1]), int(sys.argv[2]))
numbers = arena.view(64, torch.float32, [4])
print(numbers.tolist())
numbers += 1
"""


def test_another_process_sees_the_same_bytes_and_leaves_no_file() -> None:
    before = set(os.listdir("/dev/shm"))
    arena = Arena.create(4096, "a test")
    numbers = arena.view(64, torch.float32, [2, 2])
    numbers.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    command = [sys.executable, "-c", ATTACH, str(os.getpid()), str(arena.descriptor)]
    other = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert other.stdout.strip() == "[1.0, 2.0, 3.0, 4.0]"
    assert numbers.tolist() == [[2.0, 3.0], [4.0, 5.0]]
    made = set(os.listdir("/dev/shm")) - before  # by whoever: other tests may run at the same time
    assert not [name for name in made if "paceline" in name or f"_{os.getpid()}_" in name]
    arena.close()


def test_too_large_an_arena_says_how_much_is_needed_and_free() -> None:
    with pytest.raises(ArenaError) as error:
        Arena.create(1 << 50, "8 replicas of a huge model")
    needed, free = re.findall(r"([\d,]+) MiB", str(error.value))
    assert needed == "1,073,741,824"
    assert 0 < int(free.replace(",", "")) < 1 << 30
    assert "8 replicas of a huge model" in str(error.value)


def test_an_arena_of_a_process_that_is_gone_is_explained() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(ArenaError, match=f"process {gone.pid} cannot be opened"):
        Arena.attach(gone.pid, 3)


def test_closing_gives_the_descriptor_back_and_keeps_the_views() -> None:
    arena = Arena.create(4096, "a test")
    numbers = arena.view(0, torch.int64, [1])
    descriptor = arena.descriptor
    arena.close()
    arena.close()
    assert not Path(f"/proc/self/fd/{descriptor}").exists()
    numbers[0] = 7
    assert numbers.item() == 7
