"""Where each member of an ensemble computes: on cores of this machine, or on another device of torch's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from paceline.errors import InvalidInput
from paceline.launch.cores import allowed_cores, share_of_cores


@dataclass(frozen=True)
class MemberDevice:
    """The cores on which a member's thread or process runs, and the device of its model; None: the cores themselves."""

    cores: tuple[int, ...]
    torch_device: torch.device | None = None


def place_members(devices: Sequence[Any] | None, members: int) -> list[MemberDevice]:
    """Returns the place of each member. Without `devices` the cores are shared out. `"cpu:1"` is core 1, `"cpu"` a
    share of them, anything else a device of torch's, such as `"cuda:0"`."""
    cores = allowed_cores()
    shares = [share_of_cores(member, members, cores) for member in range(members)]
    if devices is None:
        return [MemberDevice(share) for share in shares]
    if isinstance(devices, str) or len(devices) != members:
        raise InvalidInput("devices", devices, f"give a list with one for each of the {members} members")
    return [_place(given, share, cores) for given, share in zip(devices, shares, strict=True)]


def _place(given: Any, share: tuple[int, ...], cores: Sequence[int]) -> MemberDevice:
    if core := re.fullmatch(r"cpu:(\d{1,6})", str(given)):  # torch would take the number of a large one for another's
        if int(core[1]) not in cores:
            raise InvalidInput("devices", given, f"the cores of this process are {', '.join(map(str, sorted(cores)))}")
        return MemberDevice((int(core[1]),))
    try:
        device = torch.device(given)
    except (RuntimeError, TypeError) as error:
        raise InvalidInput("devices", given, "give devices such as 'cpu:1' (a core) or 'cuda:0'") from error
    return MemberDevice(share, None if device.type == "cpu" else device)
