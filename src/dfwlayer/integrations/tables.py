"""Columns of a table as arrays and back: dicts of NumPy arrays, pyarrow, pandas.

Whoever has a table of pyarrow or pandas has imported that package, so that nothing is imported here
before one is seen.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["column", "made", "names"]

Array = NDArray[Any]


def names(table: Any) -> list[str]:
    """The names of its columns; a ValueError for what is no table."""
    if isinstance(table, Mapping):
        return list(table)
    if _of("pyarrow", table, "Table", "RecordBatch"):
        return list(table.schema.names)
    if _of("pandas", table, "DataFrame"):
        return list(table.columns)
    raise ValueError(
        "batch: expected a dict of NumPy arrays, a Table or RecordBatch of pyarrow or a DataFrame "
        f"of pandas, got {type(table).__name__}"
    )


def column(table: Any, name: str) -> Array:
    """One of its columns: (B, ...), or (B,) objects where rows differ or have nothing."""
    if isinstance(table, Mapping):
        return np.asarray(table[name])
    if _of("pandas", table, "DataFrame"):
        found: Array = table[name].to_numpy()
        return found
    values = table.column(name)
    if _of("pyarrow", values, "ChunkedArray"):
        if values.num_chunks == 1:
            return _array(values.chunk(0))
        values = values.combine_chunks()
        if _of("pyarrow", values, "ChunkedArray"):  # too much for one array of Arrow
            return np.concatenate([_array(chunk) for chunk in values.chunks])
    return _array(values)


def made(table: Any, kept: Sequence[str], found: Mapping[str, Array]) -> Any:
    """A table of the same kind: these columns of the given one, and new ones."""
    if isinstance(table, Mapping):
        return {name: table[name] for name in kept} | dict(found)
    if _of("pandas", table, "DataFrame"):
        columns = {n: list(values) if values.ndim > 1 else values for n, values in found.items()}
        new = sys.modules["pandas"].DataFrame(columns, index=table.index)
        return table[list(kept)].join(new) if kept else new
    parts = [table.column(name) for name in kept]
    parts += [_arrow(values) for values in found.values()]
    return type(table).from_arrays(parts, names=[*kept, *found])


def _of(package: str, value: Any, *kinds: str) -> bool:
    module = sys.modules.get(package)
    return module is not None and isinstance(value, tuple(getattr(module, kind) for kind in kinds))


def _array(values: Any) -> Array:
    """An array of pyarrow as one of NumPy, over the same memory where that can be."""
    pa = sys.modules["pyarrow"]
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType):  # tensors of pyarrow and of Ray
        if hasattr(values, "to_numpy_ndarray"):
            return np.asarray(values.to_numpy_ndarray())
        return np.asarray(values.to_numpy(zero_copy_only=False))
    if pa.types.is_fixed_size_list(kind):
        # `flatten` would leave out rows without a value
        inner = values.values.slice(values.offset * kind.list_size, len(values) * kind.list_size)
        rows = _array(inner)
        rows = rows.reshape(len(values), kind.list_size, *rows.shape[1:])
        if values.null_count:
            rows = np.where(_missing(values, rows.ndim), np.nan, rows)
        return rows
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        lengths = np.diff(values.offsets.to_numpy())
        if values.null_count == 0 and len(lengths) and (lengths == lengths[0]).all():
            rows = _array(values.flatten())
            return rows.reshape(len(values), int(lengths[0]), *rows.shape[1:])
        objects = np.empty(len(values), object)
        for i, row in enumerate(values.to_pylist()):
            objects[i] = row
        return objects
    found: Array = values.to_numpy(zero_copy_only=False)
    return found


def _missing(values: Any, dimensions: int) -> Array:
    """Which rows have no value, (B, 1, …)."""
    flags: Array = values.is_null().to_numpy(zero_copy_only=False)
    return flags.reshape(-1, *[1] * (dimensions - 1))


def _arrow(values: Array) -> Any:
    """An array as one of pyarrow; further dimensions as lists of that length."""
    pa = sys.modules["pyarrow"]
    array = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array
