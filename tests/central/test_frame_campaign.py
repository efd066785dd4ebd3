"""A hundred thousand mutated frames, of strangers and of friends, change nothing on a server. `make soak` runs this."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from typing import Any

import msgspec
import psutil
import pytest
import torch
from raw_frames import prelude, raw_frame
from servers_here import TOKEN, Running, last_words, running
from test_strangers import FuzzSession, Model, sensible

from paceline import __version__
from paceline.central.client.client import Client, ServerAddresses
from paceline.central.client.reader import Reader
from paceline.central.container import presence as presence_module
from paceline.central.container import runs as runs_module
from paceline.central.container import training as training_module
from paceline.central.messages import requests
from paceline.central.messages.settings import Settings

FRAMES = 52_000  # of each kind


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The same bytes, but some: flipped, cut off, left out, repeated, or of chance."""
    changed = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(changed) + 1)
        match chance.randrange(6):
            case 0 | 1 if changed:
                bit = chance.randrange(8 * len(changed))
                changed[bit // 8] ^= 1 << bit % 8
            case 2:
                del changed[at:]
            case 3:
                del changed[at : at + chance.randint(1, 9)]
            case 4:
                changed[at:at] = changed[at : at + chance.randint(1, 40)]
            case _:
                changed[at : at + chance.randint(0, 8)] = chance.randbytes(chance.randint(0, 8))
    return bytes(changed)


def mutated_frame(header: bytes, body: bytes, chance: random.Random) -> bytes:
    """A frame in which something is wrong; half of them with checksums that are right."""
    match chance.randrange(4):
        case 0:
            return raw_frame(mutated(header, chance), body)
        case 1:
            return raw_frame(header, mutated(body, chance))
        case 2:
            lie = chance.choice([0, 1, 7, 1 << 12, 1 << 26, 1 << 40, (1 << 64) - 1])
            return prelude(len(header), lie, header_sum=chance.getrandbits(64)) + header + body
    return mutated(raw_frame(header, body), chance)


def strangers(server: Running, known: list[tuple[bytes, bytes]], count: int, chance: random.Random) -> None:
    greeting = msgspec.msgpack.encode(requests.Hello(version=__version__))
    for number in range(count):
        begin = raw_frame(greeting) if number % 3 == 0 else b""  # so that it is asked for a proof
        with server.connect() as connection:
            last_words(connection, begin + mutated_frame(*chance.choice([(greeting, b""), *known]), chance))


def friends(server: Running, known: list[tuple[bytes, bytes]], count: int, chance: random.Random) -> None:
    with contextlib.closing(FuzzSession(server)) as session:
        for number in range(count):
            header, body = known[number % len(known)] if number % 4 == 0 else chance.choice(known)
            if number % 4 == 0:
                session.ask(header, body)  # something that makes sense, so that there is something to disturb
            session.end_with(mutated_frame(header, body, chance))


def made_by_friends(server: Running) -> list[str]:
    """Containers that a frame has made in which nothing was wrong but, perhaps, the name."""
    with Reader([server.address], token=TOKEN) as reader:
        return [listed.name for listed in reader.listing() if listed.name != "untouched"]


def said_no_traceback(server: Running) -> None:
    failed = [line for line in server.said if "Traceback" in line or "failed:" in line]
    assert not failed, failed[0]


@pytest.mark.soak
@pytest.mark.timeout(1700)
@pytest.mark.parametrize("who", [strangers, friends])
def test_mutated_frames_change_nothing(monkeypatch: pytest.MonkeyPatch, who: Any) -> None:
    seed = int(os.environ.get("PACELINE_SOAK_SEED", random.randrange(1 << 32)))
    print(f"PACELINE_SOAK_SEED={seed}")
    monkeypatch.setattr(training_module, "ANSWER_WITHIN_S", 0.01)
    monkeypatch.setattr(presence_module, "GRACE_S", 0.01)
    for limit in ("LEAVE_WITHIN_S", "FILL_WITHIN_S", "RETURN_WITHIN_S"):  # friends would wait for runs that never come
        monkeypatch.setattr(runs_module, limit, 0.01)
    process = psutil.Process()
    with running() as server:
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        addresses = ServerAddresses([server.address], "untouched", TOKEN)
        client = Client(model, optimizer, addresses, Settings(replicas=1), replica=0, incarnation=1)
        with Reader([server.address], "untouched", token=TOKEN) as reader:
            before = reader.parameters()
        known = [(msgspec.msgpack.encode(asked), bytes(length)) for asked, length in sensible(server.address)]
        memory, files, threads = process.memory_info().rss, process.num_fds(), threading.active_count()
        beside = [
            threading.Thread(target=who, args=(server, known, FRAMES // 2, random.Random(seed + number)))
            for number in range(2)
        ]
        for thread in beside:
            thread.start()
        for thread in beside:
            thread.join()
        for name in made_by_friends(server):
            with Reader([server.address], name, token=TOKEN) as reader:
                reader.drop(force=True)
        end = time.monotonic() + 60
        while process.num_fds() > files + 40 or threading.active_count() > threads + 5:
            assert time.monotonic() < end, (process.num_fds(), files, threading.active_count(), threads)
            time.sleep(0.1)
        with Reader([server.address], "untouched", token=TOKEN) as reader:
            after = reader.parameters()
        client.close()
        said_no_traceback(server)
    assert before[0] == after[0]
    for key, value in before[1].items():
        assert torch.equal(value, after[1][key]), key
    assert process.memory_info().rss - memory < 600 << 20
