"""The Open Inference Protocol (KServe v2), without HTTP: requests and answers as bytes, tensors as arrays.

    Inference-Header-Content-Length: n
    ┌────────────────────────────────────────────────┬──────────────────┬──────────────────┬──
    │ n bytes of JSON: inputs with name, datatype,   │ the bytes of the │ the bytes of the │ …
    │ shape, and `data` or `binary_data_size`        │ first binary one │ second           │
    └────────────────────────────────────────────────┴──────────────────┴──────────────────┴──

Without that header everything is JSON. Whatever is wrong with a request is one sentence that says where.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from paceline.serve.request_error import BAD, NOT_COMPUTED, RequestError, bad
from paceline.serve.served_model import ServedAnswer
from paceline.serve.served_tensor import ANY, DATATYPES, NUMPY_NAMES, ServedTensor

MOST_DIMS = 32
MOST_SIZE = 1 << 40  # of a tensor, where sizes of 0 count as 1: NumPy cannot have an empty one with any sizes beside
_KINDS = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}  # which numbers of JSON may become what


_TYPES = {datatype: np.dtype(name) for datatype, name in NUMPY_NAMES.items()}


class _TensorParameters(msgspec.Struct, frozen=True):
    binary_data_size: int | None = None
    binary_data: bool | None = None


class _InputTensor(msgspec.Struct, frozen=True):
    name: str
    shape: list[int]
    datatype: str
    data: Any = None
    parameters: _TensorParameters = _TensorParameters()


class _WantedOutput(msgspec.Struct, frozen=True):
    name: str
    parameters: _TensorParameters = _TensorParameters()


class _RequestParameters(msgspec.Struct, frozen=True):
    binary_data_output: bool = False


class _InferBody(msgspec.Struct, frozen=True):
    inputs: list[_InputTensor]
    id: str | None = None
    outputs: list[_WantedOutput] | None = None
    parameters: _RequestParameters = _RequestParameters()


@dataclass(frozen=True)
class InferRequest:
    """What a client asks: tensors by name, and which outputs it wants in which form (None: all of them)."""

    inputs: dict[str, np.ndarray]
    id: str | None = None
    wanted: dict[str, bool] | None = None  # by output: whether as bytes
    as_bytes: bool = False  # those that are not in `wanted`


def common_rows(arrays: Mapping[str, np.ndarray]) -> int:
    """Returns the size of the first dim that all arrays have; 0 if they do not."""
    sizes = {array.shape[0] if array.ndim else 0 for array in arrays.values()}
    return sizes.pop() if len(sizes) == 1 else 0


def read_infer(body: bytes, header_length: int | None, inputs: list[ServedTensor] | None) -> InferRequest:
    """Returns the request in a body, checked against what the model takes, as far as that is known."""
    if header_length is not None and not 0 <= header_length <= len(body):
        raise bad("Inference-Header-Content-Length", header_length, f"the body has {len(body)} bytes")
    head = body if header_length is None else body[:header_length]
    asked = decode_json(head, _InferBody)
    arrays: dict[str, np.ndarray] = {}
    at = len(head)
    for tensor in asked.inputs:
        if tensor.name in arrays:
            raise bad("inputs", tensor.name, "it is there twice, give it once")
        dtype = _dtype(tensor)
        size = tensor.parameters.binary_data_size
        if size is None:
            array = _from_json(tensor, dtype)
        else:
            array = _from_bytes(tensor, dtype, body[at : at + max(0, size)], size)
            at += size
        arrays[tensor.name] = array
    if at != len(body):
        raise RequestError(BAD, f"the body has {len(body)} bytes and its header tells of {at}: let them agree")
    wanted = None
    if asked.outputs is not None:
        default = asked.parameters.binary_data_output
        wanted = {
            one.name: default if one.parameters.binary_data is None else one.parameters.binary_data
            for one in asked.outputs
        }
    return InferRequest(check_inputs(arrays, inputs), asked.id, wanted, asked.parameters.binary_data_output)


def decode_json(text: bytes, kind: Any) -> Any:
    """Returns what JSON says, as this kind of value."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(BAD, f"the body is not what it should be: {error}") from None


def check_inputs(arrays: dict[str, np.ndarray], specs: list[ServedTensor] | None) -> dict[str, np.ndarray]:
    """Returns the arrays in the model's order; each must be there, of its type, with its number of dims, and finite."""
    if not arrays:
        raise bad("inputs", [], "give the tensors that the model takes")
    for name, array in arrays.items():
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            where = np.argwhere(~np.isfinite(array))[0].tolist()
            raise bad(f"input {name} at {where}", float(array[tuple(where)]), "give finite numbers")
    if specs is None:
        return arrays

    def wrong(field: str, value: object, more: str = "") -> RequestError:
        return bad(field, value, f"{more}the model takes {', '.join(spec.words for spec in specs)}")

    ordered = {}
    for spec in specs:
        given = arrays.get(spec.name)
        if given is None:
            unknown = [name for name in arrays if all(other.name != name for other in specs)]
            raise wrong("inputs", unknown[0]) if unknown else wrong("inputs", list(arrays), f"{spec.name} is missing, ")
        if given.dtype != _TYPES.get(spec.datatype):
            raise wrong(f"datatype of {spec.name}", DATATYPES[given.dtype.name])
        if given.ndim != len(spec.shape):
            raise wrong(f"shape of {spec.name}", list(given.shape))
        ordered[spec.name] = given
    if len(ordered) < len(arrays):
        raise wrong("inputs", next(name for name in arrays if name not in ordered))
    return ordered


def check_sizes(arrays: Mapping[str, np.ndarray], specs: Sequence[ServedTensor]) -> None:
    """Raises of an array that has another size than its model takes, where that is said."""
    for spec in specs:
        shape = arrays[spec.name].shape
        for size, given in zip(spec.shape, shape, strict=True):
            if size not in (ANY, given):
                raise bad(f"shape of {spec.name}", list(shape), f"the model takes {spec.words}")


def cast(data: Any, dtype: np.dtype[Any], field: str) -> np.ndarray:
    """Returns what JSON gives as lists of numbers, as an array of this type; nothing is rounded to a whole number."""
    try:
        raw = np.array(data)
    except (ValueError, OverflowError, RecursionError, MemoryError):
        raise RequestError(BAD, f"{field} is not a tensor: give lists of equal lengths in each dim") from None
    if raw.size == 0:
        return raw.astype(dtype)
    if raw.dtype.kind not in _KINDS[dtype.kind]:
        whole = dtype.kind in "iu" and raw.dtype.kind == "f" and np.isfinite(raw).all() and (raw == np.floor(raw)).all()
        if not whole:
            raise bad(field, _first(data), f"give numbers of {dtype.name}")
    with np.errstate(all="ignore"):
        array = raw.astype(dtype)
        if dtype.kind in "iu" and not (array == raw).all():
            raise bad(field, raw.flat[int(np.argmax(array != raw))].item(), f"it is no {dtype.name}")
    return array


def _first(data: Any) -> Any:
    while isinstance(data, list) and data:
        data = data[0]
    return data


def _dtype(tensor: _InputTensor) -> np.dtype[Any]:
    if tensor.datatype not in NUMPY_NAMES:
        raise bad(f"datatype of {tensor.name}", tensor.datatype, f"give one of {', '.join(NUMPY_NAMES)}")
    shape = tensor.shape
    if len(shape) > MOST_DIMS or min(shape, default=0) < 0 or math.prod(max(1, size) for size in shape) > MOST_SIZE:
        raise bad(f"shape of {tensor.name}", shape, f"give up to {MOST_DIMS} sizes from 0 up, not above 2**40 in all")
    return np.dtype(NUMPY_NAMES[tensor.datatype])


def _from_json(tensor: _InputTensor, dtype: np.dtype[Any]) -> np.ndarray:
    if not isinstance(tensor.data, list):
        raise bad(f"data of {tensor.name}", tensor.data, "give a list of numbers, or binary_data_size and bytes")
    array = cast(tensor.data, dtype, f"data of {tensor.name}")
    if array.size != math.prod(tensor.shape):
        raise bad(f"data of {tensor.name}", f"{array.size} numbers", f"its shape {tensor.shape} says otherwise")
    return array.reshape(tensor.shape)


def _from_bytes(tensor: _InputTensor, dtype: np.dtype[Any], data: bytes, size: int) -> np.ndarray:
    field = f"binary_data_size of {tensor.name}"
    if tensor.data is not None:
        raise bad(field, size, "give data in JSON or as bytes, not both")
    if len(data) != size or size != math.prod(tensor.shape) * dtype.itemsize:
        raise bad(field, size, f"{len(data)} bytes are there, shape {tensor.shape} of {tensor.datatype} has others")
    array = np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype, copy=False)
    if dtype.kind == "b" and (np.frombuffer(data, np.uint8) > 1).any():
        raise bad(f"data of {tensor.name}", "a byte above 1", "BOOL is one byte each, 0 or 1")
    return array.reshape(tensor.shape)


def datatype_of(name: str, array: np.ndarray) -> str:
    """Returns what the protocol calls an output's type."""
    if array.dtype.name not in DATATYPES:
        raise RequestError(NOT_COMPUTED, f"the model gives {name} as {array.dtype}, for which the protocol has no name")
    return DATATYPES[array.dtype.name]


def write_answer(model: str, answer: ServedAnswer, request: InferRequest) -> tuple[bytes, int | None]:
    """Returns the body of an answer, and the length of its JSON if bytes follow that."""
    outputs = answer.outputs
    wanted = request.wanted if request.wanted is not None else dict.fromkeys(outputs, request.as_bytes)
    tensors: list[dict[str, Any]] = []
    tails: list[bytes] = []
    for name, as_bytes in wanted.items():
        if name not in outputs:
            raise bad("outputs", name, f"the model gives {', '.join(outputs)}")
        array = outputs[name]
        tensor: dict[str, Any] = {"name": name, "datatype": datatype_of(name, array), "shape": list(array.shape)}
        if as_bytes:
            tails.append(np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
            tensor["parameters"] = {"binary_data_size": len(tails[-1])}
        else:
            tensor["data"] = array.ravel().tolist()
        tensors.append(tensor)
    told: dict[str, Any] = {"model_name": model, "model_version": str(answer.version), "outputs": tensors}
    if request.id is not None:
        told["id"] = request.id
    if parameters := _parameters(answer):
        told["parameters"] = parameters
    head = msgspec.json.encode(told)
    return (head + b"".join(tails), len(head)) if tails else (head, None)


def _parameters(answer: ServedAnswer) -> dict[str, Any]:
    """Returns what the protocol has no field for: plain values, as it allows no others."""
    found: dict[str, Any] = {"step": answer.step} if answer.step is not None else {}
    if answer.members:
        found["members"] = ",".join(answer.members)
        found["missing"] = "; ".join(f"{name}: {why}" for name, why in answer.missing.items())
    return found


def metadata(name: str, versions: list[str], inputs: list[ServedTensor], outputs: list[ServedTensor]) -> dict[str, Any]:
    """Returns what `/v2/models/NAME` tells."""
    return {"name": name, "versions": versions, "platform": "paceline_pytorch", "inputs": inputs, "outputs": outputs}


def config(name: str, most_rows: int, inputs: list[ServedTensor], outputs: list[ServedTensor]) -> dict[str, Any]:
    """Returns what clients of Triton ask for at `/v2/models/NAME/config`."""

    def told(spec: ServedTensor) -> dict[str, Any]:
        dims = spec.shape[1:] if most_rows > 1 and spec.shape[:1] == [ANY] else spec.shape
        return {"name": spec.name, "data_type": f"TYPE_{spec.datatype}", "dims": dims}

    return {
        "name": name,
        "platform": "paceline_pytorch",
        "backend": "paceline",
        "max_batch_size": most_rows if most_rows > 1 else 0,
        "input": [told(spec) for spec in inputs],
        "output": [told(spec) for spec in outputs],
    }


def specs_of(arrays: Mapping[str, np.ndarray], *, rows: bool) -> list[ServedTensor]:
    """Returns what is told of tensors that were seen once."""
    return [
        ServedTensor(name, datatype_of(name, array), [ANY, *array.shape[1:]] if rows else list(array.shape))
        for name, array in arrays.items()
    ]
