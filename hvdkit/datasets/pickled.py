"""Read a dictionary of uint8 arrays from a pickle without running anything that the pickle asks for.

A pickle is a program: loading one calls whatever it names. CIFAR-10's "python version" is six of them. Here every
name that such a file may use becomes a `_Recorded` note of what was asked, and nothing is called; the array is then
built from the notes. Any other name is refused.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from hvdkit.datasets.readers import corrupt, reading

# All that NumPy has ever written for an array of numbers: NumPy 1 and 2 spellings, pickle protocols 0 to 5.
ALLOWED_NAMES = frozenset(
    {
        ("numpy.core.multiarray", "_reconstruct"),
        ("numpy._core.multiarray", "_reconstruct"),
        ("numpy.core.numeric", "_frombuffer"),
        ("numpy._core.numeric", "_frombuffer"),
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
        ("_codecs", "encode"),
    }
)
FRAME_BYTES = 9  # the opcode and a 64-bit length
UINT8_NAMES = frozenset({"u1", "|u1", "B", "uint8"})


class _Recorded:
    """What a pickle names, calls or builds, written down instead of done."""

    def __init__(self, name: str, arguments: tuple[Any, ...] = ()) -> None:
        self.name = name
        self.arguments = arguments
        self.state: Any = None

    def __call__(self, *arguments: Any) -> _Recorded:
        return _Recorded(self.name, arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _RecordingUnpickler(pickle.Unpickler):
    def __init__(self, content: bytes, where: str) -> None:
        super().__init__(io.BytesIO(content), fix_imports=False, encoding="bytes")
        self.where = where

    def find_class(self, module_name: str, global_name: str, /) -> _Recorded:
        if (module_name, global_name) not in ALLOWED_NAMES:
            raise corrupt(self.where, f"it asks for {module_name}.{global_name}, which no array needs and was not run")
        return _Recorded(global_name)


def read_dictionary(content: bytes, where: str) -> dict[str, Any]:
    """The dictionary in a pickle, keys as text; arrays in it are still notes for `uint8_array`.

    Args:
        content: the whole pickle.
        where: the file's name for error messages.
    Raises:
        CorruptDataError: damaged, not a dictionary, or asks for anything but an array.
    """
    with reading(where):
        value = _RecordingUnpickler(_plain_instructions(content, where), where).load()
    if not isinstance(value, dict):
        raise corrupt(where, "it holds no dictionary of arrays")
    return {_text(key): entry for key, entry in value.items()}


def _plain_instructions(content: bytes, where: str) -> bytes:
    """The same pickle without frames, proven to ask for no more memory than it fills.

    Walking the instructions proves every length to lie inside the file. Frames are a hint for reading ahead; one
    that ends inside an instruction would make the unpickler see other instructions than were walked here.
    """
    pieces = []
    start = 0
    for count, (opcode, argument, position) in enumerate(pickletools.genops(content), start=1):
        if opcode.name == "FRAME" and position is not None:
            pieces.append(content[start:position])
            start = position + FRAME_BYTES
        # A pickler numbers its memo entries in sequence; the unpickler allocates up to the number it reads, so that
        # one damaged byte could ask for 64 GB.
        if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and argument is not None and argument > count:
            raise corrupt(where, f"memo entry {argument} in the first {count} instructions")
    return b"".join([*pieces, content[start:]])


def uint8_array(value: Any, where: str) -> NDArray[np.uint8]:
    """Build the array that a pickle describes.

    Args:
        value: an entry of `read_dictionary`.
        where: the file's name for error messages.
    Raises:
        CorruptDataError: not an array of uint8, or its data does not fill its shape.
    """
    order: Literal["C", "F"]
    match value:
        case _Recorded(name="_reconstruct", state=(_, shape, dtype, fortran, data)):
            order = "F" if fortran else "C"
        case _Recorded(name="_frombuffer", arguments=(data, dtype, shape, ("C" | "F") as memory_order)):
            order = memory_order
        case _:
            raise corrupt(where, "its data is not an array")
    if not _is_uint8(dtype):
        raise corrupt(where, "its data is not an array of uint8")
    content = _bytes(data, where)
    if not (isinstance(shape, tuple) and all(type(extent) is int and extent >= 0 for extent in shape)):
        raise corrupt(where, "its array has no shape")
    if len(content) != math.prod(shape):
        raise corrupt(where, f"its array of shape {shape} comes with {len(content)} bytes")
    return np.frombuffer(content, dtype=np.uint8).reshape(shape, order=order)


def _is_uint8(dtype: Any) -> bool:
    match dtype:
        case _Recorded(name="dtype", arguments=(code, *_)):
            return _text(code) in UINT8_NAMES
    return False


def _bytes(data: Any, where: str) -> bytes | bytearray:
    match data:
        case bytes() | bytearray():
            return data
        case _Recorded(name="encode", arguments=(str() as text, encoding)) if _text(encoding) == "latin1":
            with reading(where):
                return text.encode("latin1")
    raise corrupt(where, "its array has no data")


def _text(value: Any) -> str:
    """A name as text: pickles hold it as text, as bytes, or as text to be encoded to bytes."""
    match value:
        case bytes():
            return value.decode("latin1")
        case _Recorded(name="encode", arguments=(str() as text, *_)):
            return text
    return str(value)
