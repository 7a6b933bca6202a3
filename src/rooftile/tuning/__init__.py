"""Measured launch configurations, looked up by key. `rooftile tune` measures them; nothing here does.

A table is a JSON file `<gpu>/<op>.json`, in the user's own folder or in this package. An entry of the user's table
takes precedence. A file that can't be used is reported once and ignored. Tables are read if kernels run on a GPU.
Without one, `ROOFTILE_TUNING_GPU=h200` selects a GPU's tables; `ROOFTILE_TUNING_GPU=none` turns tables off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rooftile import runtime

SCHEMA = 2
PACKAGE = Path(__file__).parent


def gpu_slug(name: str) -> str:
    """The folder name of a GPU: "NVIDIA H100 80GB HBM3" is "h100", "NVIDIA GeForce RTX 4090" is "rtx4090"."""
    known = re.search(r"\b(?:(RTX|GTX|Arc)\s+(?:PRO\s+)?)?(MI\d+\w*|[ABGHLPTV]+\d{1,4}\w?|\d{4})\b", name)
    if known:
        return "".join(part for part in known.groups() if part).lower()
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def user_folder() -> Path:
    """Where `rooftile tune` writes, and where tables are looked up first."""
    if named := os.environ.get("ROOFTILE_TUNING_DIR"):
        return Path(named).expanduser()
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / "rooftile" / "tuning"
    if sys.platform == "win32" and (named := os.environ.get("LOCALAPPDATA")):
        return Path(named) / "rooftile" / "tuning"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "rooftile" / "tuning"


@dataclasses.dataclass
class Table:
    """The content of a file.

    Attributes:
        meta: the schema's number, the op, the GPU, and under "runs" where and when its entries were measured.
        entries: by key; "config" has the fields of a configuration, the other fields its measurements.
        failed: by configuration, key and version of Triton, why it was not measured.
        dropped: keys of an earlier version's file whose configuration is gone.
    """

    meta: dict[str, Any]
    entries: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    dropped: tuple[str, ...] = dataclasses.field(default=(), compare=False)


def read(path: Path, op: str, gpu: str) -> Table:
    """The table in a file.

    Raises:
        OSError: it can't be read.
        ValueError: it holds no table of that op for that GPU. The message has the reason, without the path.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # not JSON, or not even UTF-8
        raise ValueError(f"it is no JSON ({error})") from None
    if not isinstance(data, dict) or not isinstance(data.get("meta"), dict):
        raise ValueError('it has no "meta", expected what `rooftile tune` writes')
    meta = data["meta"]
    earlier = meta.get("schema") == 1
    if earlier:
        meta = {**meta, "schema": SCHEMA}
    for name, expected in (("schema", SCHEMA), ("op", op), ("gpu", gpu)):
        if meta.get(name) != expected:
            raise ValueError(f"its {name} is {meta.get(name)!r}, expected {expected!r}")
    entries, failed = data.get("entries"), data.get("failed", {})
    if not isinstance(entries, dict):
        raise ValueError('it has no "entries"')
    for key, entry in entries.items():
        if not isinstance(entry, dict) or not isinstance(entry.get("config"), dict):
            raise ValueError(f'its entry {key!r} has no "config"')
        for field, value in entry["config"].items():
            if not isinstance(value, str | int):  # or bool, which is an int
                raise ValueError(f"its entry {key!r} has {field} {value!r}, expected text, an integer or a bool")
    if not isinstance(failed, dict):
        raise ValueError('its "failed" is no object')
    if not earlier:
        return Table(meta, entries, failed)
    configs = {key: migrated(entry["config"]) for key, entry in entries.items()}
    kept = {key: {**entry, "config": configs[key]} for key, entry in entries.items() if configs[key] is not None}
    return Table(meta, kept, failed, tuple(key for key in entries if key not in kept))


# Kernels that had other names in schema 1.
KERNELS = {"row": "gemv", "held": "gemv_persistent", "digits": "gemv_imma", "dense": "dequantize"}


def migrated(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """A schema-1 configuration's fields in this schema; None if its kernel or its schedule is gone."""
    config = dict(config)
    if "kernel" not in config:  # of a quantized weight, with other defaults
        config = {"kernel": "skinny", "slices": 4, **config}
    kernel = config["kernel"] = KERNELS.get(str(config.get("kernel")), config.get("kernel"))
    gone = config.pop("stream_k", False) or kernel in ("direct", "gemv_persistent")
    gone = gone or (kernel in ("gemv", "hopper") and config.get("split_k", 1) != 1)
    return None if gone else config


def other_variant(table: Table, multiprocessors: int) -> str:
    """Why a table does not suit a GPU with that many SMs; "" if it does, or doesn't say.

    A partition of a GPU, or a smaller variant of the same name, needs other tiles.
    """
    measured_on = table.meta.get("multiprocessors")
    if measured_on in (None, multiprocessors):
        return ""
    return f"its GPU had {measured_on} SMs, this one has {multiprocessors}"


def to_json(table: Table) -> str:
    """The file's text: one entry on each line, so that a diff shows which changed."""

    def lines(values: Mapping[str, Any]) -> str:
        body = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v, ensure_ascii=False)}" for k, v in values.items())
        return f"{{\n{body}\n }}" if body else "{}"

    meta = json.dumps(table.meta, indent=1, ensure_ascii=False).replace("\n", "\n ")
    return f'{{\n "meta": {meta},\n "entries": {lines(table.entries)},\n "failed": {lines(table.failed)}\n}}\n'


@functools.cache
def _gpu(target: runtime.Target) -> str | None:
    """The GPU whose tables a target uses, or None."""
    if asked := os.environ.get("ROOFTILE_TUNING_GPU"):
        return None if asked == "none" else asked
    if runtime.MODE is not runtime.Mode.GPU:
        return None
    device = runtime.accelerator()
    if device is None:
        return None
    module = torch.get_device_module(device.type)
    for index in range(module.device_count()):
        if runtime.target(torch.device(device.type, index)) is target:
            return gpu_slug(str(module.get_device_name(index)))
    return None


@functools.cache
def _entries(path: Path, op: str, gpu: str, multiprocessors: int | None) -> dict[str, dict[str, Any]]:
    """A file's entries; empty if it can't be used."""
    try:
        table = read(path, op, gpu)
        if multiprocessors is not None and (reason := other_variant(table, multiprocessors)):
            if PACKAGE in path.parents:
                return {}
            raise ValueError(reason)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        warnings.warn(f"the tuning table {path} is ignored: {error}", RuntimeWarning, stacklevel=3)
        return {}
    if table.dropped:
        warnings.warn(
            f"the tuning table {path} is of an earlier version: {len(table.dropped)} of its entries name a kernel or a "
            f"schedule that is gone, and are ignored ({table.dropped[0]}, ...); `rooftile tune` measures them anew",
            RuntimeWarning,
            stacklevel=3,
        )
    return table.entries


@functools.cache
def _lookup(op: str, key: str, target: runtime.Target) -> dict[str, Any] | None:
    gpu = _gpu(target)
    if gpu is None:
        return None
    multiprocessors = None if os.environ.get("ROOFTILE_TUNING_GPU") else target.multiprocessors
    for folder in (user_folder(), PACKAGE):
        found = _entries(folder / gpu / f"{op}.json", op, gpu, multiprocessors).get(key)
        if found is not None:
            return found["config"]
    return None


_off = 0
_watchers: list[Callable[[], None]] = []


def when_changed(changed: Callable[[], None]) -> None:
    """Register a callback for changes of `lookup`'s answers. Callers that cache a choice need it."""
    _watchers.append(changed)


def _tell() -> None:
    for changed in _watchers:
        changed()


def lookup(op: str, key: str, target: runtime.Target) -> dict[str, Any] | None:
    """The fields of the configuration measured under that key, or None. They are shared; don't change them.

    Args:
        op: the table's name.
        key: the op's key of a problem.
        target: the target of the device.
    """
    return None if _off else _lookup(op, key, target)


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Read no table in this context: an op chooses as if there were none."""
    global _off
    _off += 1
    _tell()
    try:
        yield
    finally:
        _off -= 1
        _tell()


def forget() -> None:
    """Forget tables that were read, after files or the variables that name them have changed."""
    for cached in (_gpu, _entries, _lookup):
        cached.cache_clear()
    _tell()
