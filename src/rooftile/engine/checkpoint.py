"""A checkpoint folder: its tensors, their places in the files, and their bytes.

All headers are read first. Names, shapes, dtypes and file lengths are checked before a byte of a weight is read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rooftile.errors import to_install

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# safetensors' names of the dtypes accepted for weights, and the bits of every dtype.
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "F16": 16, "BF16": 16, "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E5M2FNUZ": 8,
    "F8_E4M3FNUZ": 8, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
_LONGEST_HEADER = 100_000_000  # safetensors' own limit


class CheckpointError(ValueError):
    """A checkpoint that can't be loaded. The message names file and tensor, what was found and what is expected."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A tensor of a checkpoint: its name, file, dtype (safetensors' name), shape, and first byte in the file's data."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _BITS[self.dtype] // 8

    def __str__(self) -> str:
        return f"{self.file}: {self.name}"


@dataclasses.dataclass(frozen=True)
class Share:
    """A rank's part of a dimension: ranges of its indices, one behind the other."""

    whole: int
    ranges: tuple[tuple[int, int], ...]

    @classmethod
    def all(cls, n: int) -> Share:
        return cls(n, ((0, n),))

    @property
    def size(self) -> int:
        return sum(end - first for first, end in self.ranges)

    @property
    def is_all(self) -> bool:
        return self.ranges == ((0, self.whole),)

    def in_units(self, unit: int) -> Share | None:
        """The same of a dimension whose indices stand for so many of this one; None where it would cut one."""
        if any(first % unit or (end % unit and end != self.whole) for first, end in self.ranges):
            return None
        return Share(-(-self.whole // unit), tuple((first // unit, -(-end // unit)) for first, end in self.ranges))

    def __add__(self, other: Share) -> Share:
        """Of two dimensions of one tensor, one behind the other."""
        return Share(
            self.whole + other.whole, (*self.ranges, *((a + self.whole, b + self.whole) for a, b in other.ranges))
        )


@dataclasses.dataclass(frozen=True)
class Place:
    """The destination of a checkpoint's tensor: `fill(first, rows)` writes its rows, starting at row `first`.

    Attributes:
        shape: of the tensor.
        fill: writes rows that are on the model's device. Of a tensor of which `shares` is a part, it counts and gets
            the rows of that part.
        dtypes: safetensors' names of the dtypes accepted.
        others: shapes accepted beside `shape`.
        whole: whether `fill` is called once, with all rows.
        optional: whether the tensor may be absent.
        shares: the part of the tensor that is read, by dimension; () for all of it. A dimension of another size than
            its share has, as a scale for all rows, is read whole.
    """

    shape: tuple[int, ...]
    fill: Callable[[int, Tensor], None]
    dtypes: tuple[str, ...] = tuple(DTYPES)
    others: tuple[tuple[int, ...], ...] = ()
    whole: bool = False
    optional: bool = False
    shares: tuple[Share, ...] = ()

    @classmethod
    def of(
        cls, shares: tuple[Share, ...], fill: Callable[[int, Tensor], None], dtypes: tuple[str, ...] = tuple(DTYPES),
        **more: Any,
    ) -> Place:  # fmt: skip
        """Of a part of a tensor; the other arguments are the class's."""
        return cls(tuple(share.whole for share in shares), fill, dtypes, **more, shares=shares)

    def part(self, shape: Sequence[int]) -> tuple[Share, ...]:
        """What is read of a tensor of that shape."""
        shares = itertools.chain(self.shares, itertools.repeat(None))
        return tuple(s if s and s.whole == n else Share.all(n) for s, n in zip(shares, shape, strict=False))


def _entry(file: Path, name: str, given: Any, room: int) -> Entry:
    """One tensor of a header. `room` is the size of the file's data in bytes."""
    match given:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, end]} if all(
            isinstance(n, int) and not isinstance(n, bool) and n >= 0 for n in (*shape, start, end)
        ):
            pass
        case _:
            raise CheckpointError(f"{file}: {name}: the header has {given!r}, expected dtype, shape and data_offsets")
    if dtype not in _BITS:
        raise CheckpointError(f"{file}: {name} has dtype {dtype}, expected one of {', '.join(DTYPES)}")
    entry = Entry(name, file, dtype, tuple(shape), start)
    if end - start != entry.nbytes:
        raise CheckpointError(
            f"{file}: {name} has {end - start} bytes, expected {entry.nbytes} for {dtype} of shape {entry.shape}"
        )
    if end > room:
        raise CheckpointError(
            f"{file}: {name} ends at byte {end} of the data, but the file has {max(0, room)}: it is truncated"
        )
    return entry


def entries(file: Path) -> list[Entry]:
    """The tensors of a safetensors file, in file order.

    Raises:
        CheckpointError: it is not a safetensors file, or is truncated.
    """
    if not file.is_file():
        raise CheckpointError(f"{file}: no such file")
    size = file.stat().st_size
    with file.open("rb") as f:
        length = int.from_bytes(f.read(8), "little")
        if size < 8 or length > min(_LONGEST_HEADER, size - 8):
            raise CheckpointError(
                f"{file}: the header has {length} bytes and the file {size}: it is truncated, or no safetensors file"
            )
        head = f.read(length)
    try:
        header = json.loads(head.decode("utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as e:
        raise CheckpointError(f"{file}: the header is no JSON, so this is no safetensors file: {e}") from e
    if not isinstance(header, dict):
        raise CheckpointError(f"{file}: the header holds a {type(header).__name__}, expected an object")
    room = size - 8 - length
    found = [_entry(file, name, given, room) for name, given in header.items() if name != "__metadata__"]
    found.sort(key=lambda e: (e.start, e.nbytes))
    at = 0
    for entry in found:
        if entry.start != at:
            raise CheckpointError(
                f"{entry} begins at byte {entry.start} of the data, expected {at}: the file is corrupt"
            )
        at += entry.nbytes
    if at != room:
        raise CheckpointError(f"{file}: the data has {room} bytes, expected {at}: the file is corrupt")
    with opened(file):  # safetensors' own checks
        return found


@contextlib.contextmanager
def opened(file: Path) -> Iterator[Any]:
    """The file, opened by safetensors on the CPU."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as e:
        raise ImportError(
            f"the engine reads weights with safetensors, which is not installed: {to_install('hf')}"
        ) from e
    try:
        with safe_open(str(file), framework="pt", device="cpu") as f:
            yield f
    except (SafetensorError, OSError) as e:
        raise CheckpointError(f"{file}: can't be read: {e}") from e


def _shards(folder: Path) -> dict[str, str]:
    """The index: the file of each tensor."""
    index = folder / INDEX
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError) as e:
        raise CheckpointError(f"{index}: no index: expected JSON with a weight_map: {e!r}") from e
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: weight_map is {weight_map!r}, expected the file of each tensor")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or shard in ("", ".", ".."):
            raise CheckpointError(f"{index}: {name} is in {shard!r}, expected the name of a file in the same folder")
        if not (folder / shard).is_file():
            raise CheckpointError(f"{index}: {name} is in {shard}, but {folder / shard} does not exist")
    return weight_map


class Checkpoint:
    """The tensors of a folder: `entries` by name. `path` is the file that lists them.

    Args:
        folder: with `model.safetensors`, or `model.safetensors.index.json` and the shards that it names.

    Raises:
        FileNotFoundError: there is no such folder.
        CheckpointError: it has no loadable weights, or a file is truncated or corrupt.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        if not self.folder.is_dir():
            raise FileNotFoundError(f"{self.folder}: no such folder, expected one with {SINGLE} or {INDEX}")
        self.path = self.folder / (INDEX if not (self.folder / SINGLE).is_file() else SINGLE)
        self.entries: dict[str, Entry] = {}
        if not self.path.is_file():
            raise CheckpointError(self._without_weights())
        if self.path.name == SINGLE:
            self.entries = {e.name: e for e in entries(self.path)}
        else:
            self._take_shards(_shards(self.folder))
        if not self.entries:
            raise CheckpointError(f"{self.path}: holds no tensors, expected a model's")

    def _take_shards(self, weight_map: dict[str, str]) -> None:
        for shard in dict.fromkeys(weight_map.values()):
            for entry in entries(self.folder / shard):
                if weight_map.get(entry.name, shard) == shard:
                    self.entries[entry.name] = entry
        for name, shard in weight_map.items():
            if name not in self.entries:
                raise CheckpointError(f"{self.folder / shard}: {name} is absent, expected it there, by {INDEX}")

    def _without_weights(self) -> str:
        others = sorted(f.name for f in self.folder.iterdir() if f.suffix in (".bin", ".pt", ".pth"))
        if others:
            return (
                f"{self.folder}: has {', '.join(others[:3])}, which PyTorch pickled, and neither {SINGLE} nor {INDEX}; "
                "load the model with transformers and save it again with save_pretrained"
            )
        named = sorted(f.name for f in self.folder.glob("*.safetensors"))
        instead = f"has {', '.join(named[:3])} and no index" if named else "has no weights"
        return f"{self.folder}: {instead}, expected {SINGLE}, or {INDEX} and the files that it names"

    def read(
        self, wanted: Sequence[Entry], parts: Mapping[Entry, Sequence[Share]] | None = None
    ) -> Iterator[tuple[Entry, Tensor]]:
        """Those tensors on the CPU, or those parts of them, in file order, so that each part of a file is read once.

        A whole tensor is a view of the file and is valid only until the next iteration.
        """
        files: dict[Path, list[Entry]] = {}
        for entry in wanted:
            files.setdefault(entry.file, []).append(entry)
        for file, inside in files.items():
            with opened(file) as f:
                for entry in sorted(inside, key=lambda e: e.start):
                    with torch.device("cpu"):  # safetensors follows the caller's default device
                        part = () if parts is None else parts[entry]
                        if all(share.is_all for share in part):
                            tensor = f.get_tensor(entry.name)
                        else:
                            tensor = _cut(f.get_slice(entry.name), part)
                    yield entry, tensor


def _cut(tensor: Any, part: Sequence[Share], at: tuple[slice, ...] = ()) -> Tensor:
    """That part of a safetensors slice; `at` are its first dimensions."""
    if len(at) == len(part):
        found: Tensor = tensor[at]
        return found
    pieces = [_cut(tensor, part, (*at, slice(*ends))) for ends in part[len(at)].ranges]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, len(at))
