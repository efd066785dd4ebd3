"""Devices that are not here, by what their makers say of them. Whatever is planned with these is an estimate.

Figures are of dense float32 (with tensor cores where the maker has TF32) and of memory, per device; `reached` is the
share of that which training of large layers usually gets, from published benchmarks, and no more than a rule of
thumb.
"""

from __future__ import annotations

import msgspec


class DescribedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device by its data sheet."""

    flops: float  # a second
    memory_bandwidth: float  # bytes a second
    memory_bytes: int
    reached: float  # share of the flops that training gets
    source: str


_GIB = 2**30
DEVICES: dict[str, DescribedDevice] = {
    "k80": DescribedDevice(
        flops=4.1e12,
        memory_bandwidth=240e9,
        memory_bytes=12 * _GIB,
        reached=0.4,
        source="NVIDIA Tesla K80 data sheet, one of its two GPUs, without boost",
    ),
    "p100": DescribedDevice(
        flops=10.6e12,
        memory_bandwidth=732e9,
        memory_bytes=16 * _GIB,
        reached=0.45,
        source="NVIDIA Tesla P100 data sheet, SXM2",
    ),
    "v100": DescribedDevice(
        flops=15.7e12,
        memory_bandwidth=900e9,
        memory_bytes=16 * _GIB,
        reached=0.5,
        source="NVIDIA V100 data sheet, SXM2, float32 without tensor cores",
    ),
    "t4": DescribedDevice(
        flops=8.1e12,
        memory_bandwidth=320e9,
        memory_bytes=16 * _GIB,
        reached=0.4,
        source="NVIDIA T4 data sheet, float32",
    ),
    "a100": DescribedDevice(
        flops=156e12,
        memory_bandwidth=1555e9,
        memory_bytes=40 * _GIB,
        reached=0.35,
        source="NVIDIA A100 data sheet, 40 GB, TF32 tensor cores, dense",
    ),
    "h100": DescribedDevice(
        flops=494e12,
        memory_bandwidth=3350e9,
        memory_bytes=80 * _GIB,
        reached=0.3,
        source="NVIDIA H100 data sheet, SXM5, TF32 tensor cores, dense (half of the figure with sparsity)",
    ),
}
