"""One safetensors file in which every tensor has a checksum.

    ┌────────────┬──────────────────────────────────────┬───────────────────────────┐
    │ 8 bytes: n │ n bytes of JSON: metadata, and each  │ the tensors' bytes, those │
    │            │ tensor's dtype, shape and position   │ of wide dtypes first      │
    └────────────┴──────────────────────────────────────┴───────────────────────────┘

The safetensors library reads these files: it bounds the header's length and checks that the tensors cover the
file exactly. They are written here, because the library's `save_file` wants tied tensors cloned and whatever is
on a GPU in host memory all at once, reports a full disk without an errno, gives the file mode 0600 whatever the
umask is, and before version 0.8 copied the whole model into Python bytes. Here a tensor's bytes are read once, in
pieces that stay in the processor's cache; only a tensor that is not contiguous or not in host memory is copied,
and only one at a time.

The checksums belong into the header, which comes first, but are known last. As their width is fixed, room is
left for the header and it is filled in at the end.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open

from paceline.errors import CheckpointError, InvalidInput

Tensors = Mapping[str, torch.Tensor]
Checksums = dict[str, str]
"""Tensor name → 8 hex digits."""

_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_METADATA_KEY = "__metadata__"
_LONGEST_HEADER = 100_000_000  # bytes; the library refuses to read more
_PIECE = 1 << 20  # bytes


CONTAINER_KEY, CONTAINER_STEP_KEY = "paceline.container", "paceline.step"  # of a file that is a container's, no save


def check_storable(field: str, tensors: Tensors) -> None:
    """Refuse what the format cannot hold, before anything is written."""
    for name, tensor in tensors.items():
        where = f"{field}[{name!r}]"
        if name == _METADATA_KEY:
            raise InvalidInput(field, name, "rename this tensor, safetensors uses its name for the metadata")
        if not isinstance(tensor, torch.Tensor):
            raise InvalidInput(where, type(tensor).__name__, "give a tensor")
        if tensor.layout != torch.strided:
            raise InvalidInput(f"{where}.layout", tensor.layout, "make it dense with to_dense()")
        if tensor.is_meta:
            raise InvalidInput(f"{where}.device", "meta", "give the tensor memory first, with to_empty()")
        if tensor.dtype not in _CODES:
            raise InvalidInput(f"{where}.dtype", tensor.dtype, f"use one of {', '.join(map(str, _CODES))}")


def write_tensors(path: Path, tensors: Tensors, metadata: Callable[[Checksums], Mapping[str, str]]) -> Checksums:
    """Write a new file and bring it to the disk; `metadata` makes the file's metadata from the checksums."""
    with open(path, "xb") as file:
        checksums = put_tensors(file, tensors, metadata)
        os.fsync(file.fileno())
    return checksums


def put_tensors(file: BinaryIO, tensors: Tensors, metadata: Callable[[Checksums], Mapping[str, str]]) -> Checksums:
    """Write the same into a file that is open and empty."""
    room = len(_header(tensors, metadata(dict.fromkeys(tensors, "00000000"))))
    found = {}
    file.seek(room)
    for name in _in_file_order(tensors):
        found[name] = _checksum(tensors[name], copy_to=file)
    checksums = {name: found[name] for name in tensors}
    header = _header(tensors, metadata(checksums))
    assert len(header) == room, "the metadata's length must not depend on the checksums"
    file.seek(0)
    file.write(header)
    file.flush()
    return checksums


def read_metadata(path: Path) -> dict[str, str]:
    """The metadata alone, read without touching the tensors."""
    with _opened(path) as file:
        return dict(file.metadata() or {})


def read_tensors(path: Path, checksums: Checksums | None) -> dict[str, torch.Tensor]:
    """Exactly the tensors that `checksums` names, in its order, each one verified; None: of a file of somebody else's,
    as they are.

    They are mapped from the file, not copied: writing to them changes neither the file nor another reader's.
    """
    tensors = {}
    with _opened(path) as file:
        names = set(file.keys())
        if checksums is None:
            return {name: file.get_tensor(name) for name in sorted(names)}
        if astray := sorted(names ^ checksums.keys()):
            how = "an unexpected" if astray[0] in names else "no"
            raise CheckpointError(f"{path} is damaged: it has {how} tensor {astray[0]!r}")
        for name, expected in checksums.items():
            tensor = tensors[name] = file.get_tensor(name)
            if (checksum := _checksum(tensor)) != expected:
                raise CheckpointError(
                    f"{path} is damaged: tensor {name!r} has checksum {checksum} instead of {expected}"
                )
    return tensors


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if not path.is_file():
        raise CheckpointError(f"{path} is not a file: name a .safetensors file")
    path.open("rb").close()  # for the true reason: safe_open says "no such file" of one it may not read
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise CheckpointError(f"{path} is cut short, damaged or not a safetensors file ({error})") from error
    except RuntimeError as error:  # torch opens the file a second time, to map it
        raise CheckpointError(f"{path} could not be read ({error})") from error


def _header(tensors: Tensors, metadata: Mapping[str, str]) -> bytes:
    header: dict[str, object] = {_METADATA_KEY: dict(metadata)}
    start = 0
    for name in _in_file_order(tensors):
        tensor = tensors[name]
        end = start + tensor.nbytes
        header[name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the tensors start at a multiple of their dtype's size
    if len(text) > _LONGEST_HEADER:
        raise CheckpointError(
            f"the notes and tensor names make a header of {len(text):,} bytes: "
            f"safetensors reads up to {_LONGEST_HEADER:,}, keep large things in tensors"
        )
    return len(text).to_bytes(8, "little") + text


def _in_file_order(tensors: Tensors) -> list[str]:
    """Wide dtypes first: then every tensor is aligned without gaps, which the format does not allow."""
    return sorted(tensors, key=lambda name: -tensors[name].element_size())


def _checksum(tensor: torch.Tensor, copy_to: BinaryIO | None = None) -> str:
    """CRC-32 of dtype, shape and bytes: the same bytes mean something else under another dtype or shape."""
    checksum = zlib.crc32(f"{_CODES[tensor.dtype]}{list(tensor.shape)}".encode())
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = plain.reshape(-1).view(torch.uint8).numpy().data
    for start in range(0, len(flat), _PIECE):
        piece = flat[start : start + _PIECE]
        checksum = zlib.crc32(piece, checksum)
        if copy_to is not None:
            copy_to.write(piece)
    return f"{checksum:08x}"
