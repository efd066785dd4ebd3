"""Where the memory goes: of each device, and of a host with all of them."""

from __future__ import annotations

from paceline.plan.cluster import Cluster
from paceline.profile.values import CutTrial, Profile

PROCESS_BYTES = 180 << 20  # that has imported torch, before it has a model


class MemoryUse:
    """The memory of one script's strategies: bytes of a device, and of a host."""

    def __init__(self, profile: Profile, cluster: Cluster) -> None:
        self._profile, self._cluster = profile, cluster

    def mirrored(self, replicas: int, hosts: int) -> tuple[int, int]:
        """Parameters and state lie once a host; gradients and activations are each replica's own."""
        profile, on_host = self._profile, replicas // hosts
        own = PROCESS_BYTES + profile.gradient_bytes + profile.activation_bytes // replicas
        once = profile.parameter_bytes + profile.state_bytes + (profile.gradient_bytes if hosts > 1 else 0)
        return own + once // on_host, on_host * own + once

    def servers(self, replicas: int, servers: int) -> tuple[int, int]:
        """Servers have parameters, state and a gradient of every replica; a replica the gradient it computes."""
        profile = self._profile
        own = PROCESS_BYTES + profile.gradient_bytes + profile.activation_bytes // replicas
        theirs = servers * PROCESS_BYTES + profile.parameter_bytes + profile.state_bytes
        return own, replicas * own + theirs

    def cut(self, trial: CutTrial, replicas: int) -> tuple[int, int]:
        """Parameters lie once a host; gradients of a device are those of its parts."""
        profile, devices = self._profile, trial.split.devices
        activations = profile.activation_bytes // replicas // devices
        own = PROCESS_BYTES + min(profile.gradient_bytes, trial.parameter_bytes) + activations
        once = profile.parameter_bytes + profile.state_bytes
        return own + once // (devices * replicas), devices * replicas * own + once

    def where(self, replicas: int, hosts: int) -> list[tuple[str, int]]:
        """Returns what takes how much of one mirrored replica's memory, the largest first."""
        profile, on_host = self._profile, max(1, replicas // hosts)
        found = [
            ("the process itself", PROCESS_BYTES),
            ("parameters", profile.parameter_bytes // on_host),
            (f"state of {profile.optimizer}", profile.state_bytes // on_host),
            ("gradients", profile.gradient_bytes),
            ("activations", profile.activation_bytes // replicas),
        ]
        return sorted(found, key=lambda entry: -entry[1])
