"""What a model takes and gives, told without torch: names, types and shapes of tensors, as clients are told them."""

from __future__ import annotations

import msgspec

from paceline.errors import InvalidInput

DATATYPES = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "uint16": "UINT16",
    "uint32": "UINT32",
    "uint64": "UINT64",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "float32": "FP32",
    "float64": "FP64",
}
"""What the Open Inference Protocol calls NumPy's types."""
NUMPY_NAMES = {datatype: name for name, datatype in DATATYPES.items()}
ANY = -1  # a dim of any size


class ServedTensor(msgspec.Struct, frozen=True):
    """A tensor that a model takes or gives. A dim that may be of any size is -1."""

    name: str
    datatype: str
    shape: list[int]

    @property
    def words(self) -> str:
        """Returns it for a sentence."""
        return f"{self.name} {self.datatype} {self.shape}"


class ModelDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What is known of a model before it was asked anything; None: nobody could tell."""

    kind: str  # the name of its class
    inputs: list[ServedTensor] | None = None
    outputs: list[ServedTensor] | None = None
    declared: bool = False  # the inputs, by --input: their sizes hold; else they are those of an example
    in_rows: bool = True  # its answer has a row for each row of its inputs, as far as was seen
    example: dict[str, list] | None = None  # type: ignore[type-arg]  # one row of the script's own data, if it is small

    @property
    def takes(self) -> str:
        """Returns what the model takes, for a sentence."""
        return ", ".join(spec.words for spec in self.inputs or ()) or "not known yet"


def read_input(text: str) -> ServedTensor:
    """Returns what `--input` describes.

    >>> read_input("x:FP32:-1,64")
    ServedTensor(name='x', datatype='FP32', shape=[-1, 64])
    """
    name, _, rest = text.partition(":")
    datatype, _, shape = rest.partition(":")
    try:
        sizes = [int(size) for size in shape.split(",")] if shape else []
        if not name or datatype not in NUMPY_NAMES or any(size < ANY for size in sizes):
            raise ValueError
    except ValueError:
        raise InvalidInput(
            "input", text[:100], f"give NAME:TYPE:SHAPE such as x:FP32:-1,64, with a type of {', '.join(NUMPY_NAMES)}"
        ) from None
    return ServedTensor(name, datatype, sizes)
