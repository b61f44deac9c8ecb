"""Converts small arrays of the wire format, dense or sparse rows, to records and back; numbers as its little-endian
bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from math import prod
from typing import Literal

from palestra.server.core.wire_errors import WireError, shown
from palestra.server.tinker import wire_pb2 as wire
from palestra.server.tinker.schemas_data import TensorBody
from palestra.types import TensorData

MAX_DIMENSIONS = 8

_DTYPES = {"float32": wire.DTYPE_FLOAT32, "int64": wire.DTYPE_INT64}


def tensor_of_message(name: str, tensor: wire.Tensor) -> TensorData:
    sparse = tensor.sparse_csr if tensor.WhichOneof("encoding") == "sparse_csr" else None
    data = tensor.dense if sparse is None else sparse.values
    dtype: Literal["float32", "int64"]
    match tensor.dtype:
        case wire.DTYPE_FLOAT32:
            dtype, width = "float32", 4
        case wire.DTYPE_INT64:
            dtype, width = "int64", 8
        case wire.DTYPE_INT32:
            dtype, width = "int64", 4
        case wire.DTYPE_BFLOAT16:
            dtype, width = "float32", 2
        case other:
            raise WireError(f"{shown(name)}: dtype {other} is unknown; send float32 or int64")
    if len(data) % width:
        raise WireError(f"{shown(name)}: {len(data)} bytes are not a multiple of {width} bytes")
    if tensor.dtype == wire.DTYPE_INT32:
        data = int64_of_int32(data)
    elif tensor.dtype == wire.DTYPE_BFLOAT16:
        data = float32_of_bfloat16(data)
    crow, col = (None, None) if sparse is None else (sparse.crow_indices, sparse.col_indices)
    return _checked(name, data, dtype, list(tensor.shape), crow, col)


def tensor_of_schema(name: str, tensor: TensorBody) -> TensorData:
    try:
        data = (float32_bytes if tensor.dtype == "float32" else int64_bytes)(tensor.data)
    except (struct.error, OverflowError):
        raise WireError(f"{shown(name)}: the data does not fit dtype {tensor.dtype}") from None
    crow, col = (
        None if indices is None else int64_bytes(indices)
        for indices in (tensor.sparse_crow_indices, tensor.sparse_col_indices)
    )
    if (crow is None) != (col is None):
        raise WireError(f"{shown(name)}: sparse tensors need both sparse_crow_indices and sparse_col_indices")
    return _checked(name, data, tensor.dtype, tensor.shape or [], crow, col)


def _checked(
    name: str,
    data: bytes,
    dtype: Literal["float32", "int64"],
    shape: list[int],
    crow: bytes | None,
    col: bytes | None,
) -> TensorData:
    count = len(data) // (4 if dtype == "float32" else 8)
    if len(shape) > MAX_DIMENSIONS or any(size < 0 for size in shape):
        raise WireError(f"{shown(name)}: shape {shown(shape)} is not possible")
    if crow is None or col is None:
        shape = shape or [count]
        if prod(shape) != count:
            raise WireError(f"{shown(name)}: {count} numbers do not fill shape {shape}")
    elif len(shape) != 2 or len(crow) != 8 * (shape[0] + 1) or len(col) != 8 * count:
        raise WireError(f"{shown(name)}: {count} values and their sparse indices do not describe shape {shape}")
    return TensorData(data=data, dtype=dtype, shape=tuple(shape), crow_indices=crow, col_indices=col)


def message_of_tensor(tensor: TensorData) -> wire.Tensor:
    message = wire.Tensor(dtype=_DTYPES[tensor.dtype], shape=tensor.shape)
    if tensor.crow_indices is None or tensor.col_indices is None:
        message.dense = tensor.data
    else:
        message.sparse_csr.values = tensor.data
        message.sparse_csr.crow_indices = tensor.crow_indices
        message.sparse_csr.col_indices = tensor.col_indices
    return message


# Numbers as bytes, without a Python loop over them. struct is faster than array here: for 64 floats 1.5 against 4.6
# microseconds.


def int32_bytes(values: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def int64_bytes(values: Sequence[float]) -> bytes:
    """Raises struct.error for anything but whole numbers of 64 bits."""
    return struct.pack(f"<{len(values)}q", *values)


def float32_bytes(values: Sequence[float]) -> bytes:
    """Raises OverflowError for a finite number beyond float32."""
    return struct.pack(f"<{len(values)}f", *values)


def int32_values(data: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(data) // 4}i", data)


def float32_values(data: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(data) // 4}f", data)


def int64_of_int32(data: bytes) -> bytes:
    return int64_bytes(int32_values(data))


def float32_of_bfloat16(data: bytes) -> bytes:
    """Converts by padding: a bfloat16 is the upper half of a float32."""
    wide = bytearray(2 * len(data))
    wide[2::4], wide[3::4] = data[0::2], data[1::2]
    return bytes(wide)
