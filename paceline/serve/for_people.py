"""What `POST /predict` takes from people: lists of numbers, a .npy file, an image; and what it answers.

A row may be given without the dim for rows around it: it is put there, and taken away from the answer. An image is
brought to the size that the model takes, in grey or colour as it takes, with numbers from 0 to 1.
"""

from __future__ import annotations

import ast
import io
import math
import struct
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from paceline.serve.open_inference import cast, check_inputs, decode_json
from paceline.serve.request_error import BAD, NOT_COMPUTED, RequestError, bad
from paceline.serve.served_model import ServedAnswer
from paceline.serve.served_tensor import ANY, NUMPY_NAMES, ServedTensor

NPY_MAGIC = b"\x93NUMPY"
MOST_PIXELS = 50_000_000
_IMAGES = (b"\x89PNG", b"\xff\xd8\xff", b"GIF8", b"BM", b"RIFF")
_IMAGE_FORMATS = ("PNG", "JPEG", "GIF", "BMP", "WEBP")  # others start programs (EPS), or are rarely used and tested


@dataclass(frozen=True)
class PredictRequest:
    """Tensors by name; `bare`: they were one row, given as such."""

    inputs: dict[str, np.ndarray]
    bare: bool = False


def is_json(content_type: str) -> bool:
    """Returns whether a body is said to be JSON: then it is read as nothing else."""
    return content_type.partition(";")[0].strip().lower() == "application/json"


def is_image(body: bytes, content_type: str) -> bool:
    """Returns whether a body is said to be an image, or begins like one and is said to be nothing else."""
    return content_type.startswith("image/") or (not is_json(content_type) and body.startswith(_IMAGES))


def read_predict(body: bytes, content_type: str, specs: list[ServedTensor] | None) -> PredictRequest:
    """Returns what is in a body of any of these kinds."""
    if not is_json(content_type) and body.startswith(NPY_MAGIC):
        return _with_rows({_only(specs): _read_npy(body)}, specs, may_cast=True)
    if is_image(body, content_type):
        return _with_rows({_only(specs): _read_image(body, specs)}, specs, may_cast=True)
    data = decode_json(body, Any)
    given = data if isinstance(data, dict) else {_only(specs): data}
    if not given or not all(isinstance(value, list | int | float) for value in given.values()):
        raise RequestError(BAD, "the body is no lists of numbers: give [[…]], or such lists by the names of inputs")
    types = {spec.name: spec.datatype for spec in specs or ()}
    arrays = {}
    for name, value in given.items():
        arrays[name] = cast(value, np.dtype(NUMPY_NAMES.get(types.get(name, "FP32"), "float32")), f"input {name[:50]}")
    return _with_rows(arrays, specs, may_cast=False)


def _with_rows(arrays: dict[str, np.ndarray], specs: list[ServedTensor] | None, *, may_cast: bool) -> PredictRequest:
    bare = specs is not None and all(
        spec.name in arrays and spec.shape[:1] == [ANY] and arrays[spec.name].ndim == len(spec.shape) - 1
        for spec in specs
    )
    if bare:
        arrays = {name: array[None] for name, array in arrays.items()}
    if may_cast:
        types = {spec.name: spec.datatype for spec in specs or ()}
        arrays = {
            name: array.astype(NUMPY_NAMES[types[name]], casting="unsafe")
            if name in types and array.dtype.kind in "biuf" and NUMPY_NAMES[types[name]].startswith("float")
            else array
            for name, array in arrays.items()
        }
    return PredictRequest(check_inputs(arrays, specs), bare)


def _only(specs: list[ServedTensor] | None) -> str:
    if specs is None:
        return "input"
    if len(specs) != 1:
        raise bad("inputs", "one", f"the model takes {', '.join(spec.name for spec in specs)}, give them by name")
    return specs[0].name


def _read_npy(body: bytes) -> np.ndarray:
    """Returns the array in a .npy file. It is read here, since NumPy's reader believes what the header says of size."""
    try:
        length = struct.unpack_from("<H" if body[6] == 1 else "<I", body, 8)[0]
        start = (10 if body[6] == 1 else 12) + length
        header = ast.literal_eval(body[(10 if body[6] == 1 else 12) : start].decode("latin1").strip())
        dtype, shape = np.dtype(header["descr"]), tuple(header["shape"])
        if dtype.kind not in "biuf" or not all(isinstance(size, int) and size >= 0 for size in shape):
            raise ValueError
        if len(shape) > 32 or math.prod(shape) * dtype.itemsize != len(body) - start:
            raise ValueError
        flat = np.frombuffer(body, dtype, offset=start)
        array: np.ndarray = flat.reshape(shape[::-1]).T if header["fortran_order"] else flat.reshape(shape)
    except (ValueError, KeyError, IndexError, TypeError, SyntaxError, struct.error, MemoryError, RecursionError):
        raise RequestError(BAD, "the body is no .npy file with numbers: write it with numpy.save") from None
    native: np.ndarray = array.astype(dtype.newbyteorder("="), copy=False)
    if native.dtype.name == "longdouble" or native.dtype.itemsize > 8:
        raise bad("type of the .npy file", str(dtype), "give float32 or another type of up to 8 bytes")
    return native


def _read_image(body: bytes, specs: list[ServedTensor] | None) -> np.ndarray:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise RequestError(BAD, "images cannot be read here: install pillow, or send a .npy file") from None
    spec = specs[0] if specs is not None else None
    channels, height, width, flat = _picture(spec)
    try:
        with Image.open(io.BytesIO(body), formats=_IMAGE_FORMATS) as image:
            if image.width * image.height > MOST_PIXELS:
                raise bad("size of the image", [image.width, image.height], f"give up to {MOST_PIXELS:,} pixels")
            picture = image.convert("L" if channels == 1 else "RGB").resize((width, height))
    except (
        UnidentifiedImageError,
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        struct.error,
        Image.DecompressionBombError,
    ):
        raise RequestError(BAD, "the body is no image that can be read: send PNG, JPEG, GIF, BMP or WebP") from None
    pixels = np.asarray(picture, dtype=np.float32).reshape(height, width, channels) / 255
    return pixels.reshape(1, -1) if flat else np.ascontiguousarray(pixels.transpose(2, 0, 1))[None]


def _picture(spec: ServedTensor | None) -> tuple[int, int, int, bool]:
    """Returns the channels, height and width that the model takes, and whether as one list of numbers."""
    shape = spec.shape if spec is not None else []
    if len(shape) == 4 and shape[1] in (1, 3) and min(shape[1:]) > 0:
        return shape[1], shape[2], shape[3], False
    if len(shape) == 2 and shape[1] > 0:
        for channels in (1, 3):
            side = math.isqrt(shape[1] // channels)
            if side * side * channels == shape[1]:
                return channels, side, side, True
    known = "nobody could tell what it takes" if spec is None else f"it takes {spec.name} {spec.shape}"
    raise RequestError(BAD, f"the model takes no image: {known}, send lists of numbers or a .npy file")


def write_predict(model: str, answer: ServedAnswer, request: PredictRequest) -> bytes:
    """Returns the answer as JSON: outputs by name, as lists, and where it came from."""
    outputs = answer.outputs
    for name, array in outputs.items():
        if array.dtype.kind not in "biuf":
            raise RequestError(NOT_COMPUTED, f"the model gives {name} as {array.dtype}, which JSON has no numbers for")
    one = request.bare and all(array.ndim and len(array) == 1 for array in outputs.values())
    lists = {name: (array[0] if one else array).tolist() for name, array in outputs.items()}
    return msgspec.json.encode({"model": model, "version": answer.version, "outputs": lists, **answer.told})
