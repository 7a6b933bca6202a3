"""Tuning tables: which file is read, and what is done about one that can't be."""

import json
import warnings

import pytest
import torch

from rooftile import runtime, tuning
from rooftile.bench.tune.space import DTYPE_NAMES, TUNABLES
from rooftile.ops.gemm import choose
from rooftile.ops.gemm.config import GemmConfig
from rooftile.runtime import TARGETS

H100 = TARGETS["sm_90"]
KEY = "m1 n64 k32 bfloat16"


def table(gpu="h100", op="matmul", block_n=64, **meta):
    entry = {"config": {"kernel": "tiled", "block_n": block_n}, "us": 1.0, "m": 1}
    return tuning.Table({"schema": tuning.SCHEMA, "op": op, "gpu": gpu, "multiprocessors": 132, **meta}, {KEY: entry})


@pytest.fixture
def folders(monkeypatch, tmp_path):
    """`write(whose, text or table)`: a file of the user's, or of the package's."""
    found = {"user": tmp_path / "user", "package": tmp_path / "package"}
    monkeypatch.setenv("ROOFTILE_TUNING_DIR", str(found["user"]))
    monkeypatch.setattr(tuning, "PACKAGE", found["package"])
    monkeypatch.setattr(tuning, "_gpu", lambda target: "h100" if target is H100 else None)
    monkeypatch.delenv("ROOFTILE_TUNING_GPU", raising=False)

    def write(whose, content):
        path = found[whose] / "h100" / "matmul.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else tuning.to_json(content))
        tuning.forget()
        return path

    monkeypatch.setattr(tuning._gpu, "cache_clear", lambda: None, raising=False)
    tuning.forget()
    yield write
    monkeypatch.undo()
    tuning.forget()


def looked_up(key=KEY, target=H100):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return tuning.lookup("matmul", key, target)


def test_no_table_is_no_configuration(folders):
    assert looked_up() is None


def test_the_packages_table_is_read_and_gives_the_fields_of_the_configuration(folders):
    folders("package", table())
    assert looked_up() == {"kernel": "tiled", "block_n": 64}
    assert looked_up("another key") is None


def test_the_users_own_entry_comes_first_and_the_packages_serves_the_rest(folders):
    package = table()
    package.entries["other"] = package.entries[KEY]
    folders("package", package)
    folders("user", table(block_n=128))
    assert looked_up() == {"kernel": "tiled", "block_n": 128}
    assert looked_up("other") == {"kernel": "tiled", "block_n": 64}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{not json", "is no JSON"),
        ("[]", 'has no "meta"'),
        ('{"meta": 1}', 'has no "meta"'),
        (table(schema=tuning.SCHEMA + 1), f"its schema is {tuning.SCHEMA + 1}, expected {tuning.SCHEMA}"),
        (table(gpu="rtx4090"), "its gpu is 'rtx4090', expected 'h100'"),
        (table(op="attention"), "its op is 'attention', expected 'matmul'"),
        (table(multiprocessors=114), "its GPU had 114 SMs, this one has 132"),
        (json.dumps({"meta": table().meta}), 'has no "entries"'),
        (json.dumps({"meta": table().meta, "entries": {"k": 1}}), "its entry 'k' has no \"config\""),
        (table(block_n=[16]), f"its entry {KEY!r} has block_n [16], expected text, an integer or a bool"),
        (table(block_n=16.0), f"its entry {KEY!r} has block_n 16.0, expected"),
        (table(block_n=None), f"its entry {KEY!r} has block_n None, expected"),
        (json.dumps({"meta": table().meta, "entries": {}, "failed": []}), 'its "failed" is no object'),
        ("\udcff".encode("utf-8", "surrogateescape").decode("latin-1"), "is no JSON"),
    ],
)
def test_a_corrupt_or_foreign_file_is_reported_once_by_name_and_ignored(folders, content, message):
    folders("package", table())
    path = folders("user", content)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert tuning.lookup("matmul", KEY, H100) == {"kernel": "tiled", "block_n": 64}
        assert tuning.lookup("matmul", "other", H100) is None
    assert len(seen) == 1
    assert str(path) in str(seen[0].message)
    assert message in str(seen[0].message)


def test_a_shipped_table_of_a_larger_variant_is_passed_over_in_silence(folders):
    folders("package", table(multiprocessors=144))
    assert looked_up() is None


def test_a_folder_in_place_of_the_file_is_reported(folders, tmp_path):
    (tmp_path / "user" / "h100" / "matmul.json").mkdir(parents=True)
    tuning.forget()
    with pytest.warns(RuntimeWarning, match="is ignored"):
        assert tuning.lookup("matmul", KEY, H100) is None


def test_tables_can_be_turned_off(folders):
    folders("package", table())
    with tuning.off():
        assert looked_up() is None
    assert looked_up() is not None


def test_a_file_is_read_once(folders, monkeypatch):
    folders("package", table())
    reads = []
    read = tuning.read
    monkeypatch.setattr(tuning, "read", lambda path, *rest: reads.append(path) or read(path, *rest))
    for key in (KEY, "other", KEY):
        looked_up(key)
    assert len(reads) == 2  # the user's, which is not there, and the package's


def test_outside_a_gpu_a_table_is_read_only_where_it_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr(runtime, "MODE", runtime.Mode.INTERPRETER)
    monkeypatch.setenv("ROOFTILE_TUNING_DIR", str(tmp_path))
    monkeypatch.delenv("ROOFTILE_TUNING_GPU", raising=False)
    (tmp_path / "h100").mkdir()
    (tmp_path / "h100" / "matmul.json").write_text(tuning.to_json(table()))
    try:
        for asked, expected in ((None, None), ("h100", 64), ("none", None)):
            if asked:
                monkeypatch.setenv("ROOFTILE_TUNING_GPU", asked)
            tuning.forget()
            found = looked_up(target=runtime.INTERPRETER)
            assert (found and found["block_n"]) == expected
    finally:
        monkeypatch.undo()
        tuning.forget()


def test_the_users_folder_is_the_platforms_cache(monkeypatch, tmp_path):
    monkeypatch.delenv("ROOFTILE_TUNING_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tuning.user_folder() == tmp_path / "rooftile" / "tuning"
    monkeypatch.setenv("ROOFTILE_TUNING_DIR", str(tmp_path / "own"))
    assert tuning.user_folder() == tmp_path / "own"


def test_a_table_survives_being_written(tmp_path):
    path = tmp_path / "x.json"
    wrote = table()
    wrote.failed = {"tiled 64, bf16": "3 elements are NaN"}
    path.write_text(tuning.to_json(wrote))
    assert tuning.read(path, "matmul", "h100") == wrote
    assert len([line for line in path.read_text().splitlines() if KEY in line]) == 1  # a line for each entry


# Tables of the first schema

OLD = {
    "m1 a": ({"kernel": "row", "block_m": 1, "split_k": 1, "stream_k": False}, {"kernel": "gemv"}),
    "m16 a": ({"kernel": "skinny", "split_k": 4, "pingpong": False}, {"kernel": "skinny", "split_k": 4}),
    "m64 a": ({"kernel": "hopper", "block_m": 64, "split_k": 1, "stream_k": False}, {"kernel": "hopper"}),
    "m4 a": ({"block_m": 4, "num_warps": 4}, {"kernel": "skinny", "slices": 4}),  # of a quantized weight
    "m1 b": ({"kernel": "held", "block_m": 1}, None),
    "m1 c": ({"kernel": "row", "split_k": 2}, None),
    "m64 b": ({"kernel": "hopper", "split_k": 2}, None),
    "m64 c": ({"kernel": "hopper", "split_k": 1, "stream_k": True}, None),
    "m8 c": ({"kernel": "direct", "block_m": 8}, None),
}


def test_an_old_table_is_migrated_and_what_is_lost_is_said_once(folders):
    old = table(schema=1)
    old.entries = {key: {"config": config, "us": 1.0} for key, (config, _) in OLD.items()}
    folders("user", old)
    with pytest.warns(
        RuntimeWarning, match=r"5 of its entries name a kernel or a schedule that is gone.*\(m1 b, ...\)"
    ):
        found = {key: tuning.lookup("matmul", key, H100) for key in OLD}
    for key, (_, expected) in OLD.items():
        assert (found[key] is None) == (expected is None), key
        if expected is not None:
            assert expected.items() <= found[key].items()
            assert "stream_k" not in found[key]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tuning.lookup("matmul", "m1 b", H100) is None


def test_who_remembers_a_choice_is_told_that_tables_have_changed(folders):
    told = []
    tuning.when_changed(lambda: told.append(1))
    folders("user", table())
    assert told == [1]
    with tuning.off():
        assert told == [1, 1]
    assert told == [1, 1, 1]


# What is shipped

ARCH = {"h100": "sm_90", "h200": "sm_90"}  # of each GPU that has a folder
SHIPPED = sorted(tuning.PACKAGE.glob("*/*.json"))
DTYPES = {"tf32": (torch.float32, "tf32"), **{name: (dtype, "ieee") for dtype, name in DTYPE_NAMES.items()}}


def check_shipped(path):
    """It is read without a warning, each entry stands under the key of its problem, and its kernel takes it."""
    target = TARGETS[ARCH[path.parent.name]]
    tuning.forget()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        entries = tuning._entries(path, path.stem, path.parent.name, target.multiprocessors)
    assert entries, "it is empty, or of a variant with other multiprocessors: nothing would be found in it"
    runs = tuning.read(path, path.stem, path.parent.name).meta["runs"]
    assert all({"gpu", "torch", "triton", "commit", "date", "command"} <= set(run) for run in runs)
    for run in runs:
        assert "/" not in run["command"]
    tunables = {(t.layout, t.gated): t for t in TUNABLES.values() if t.table == path.stem}
    for key, entry in entries.items():
        tunable = tunables[entry["layout"], entry["gated"]]
        problem = tunable.problem(entry["m"], entry["n"], entry["k"], *DTYPES[entry["dtype"]])
        assert tunable.key(problem) == key
        assert choose.can_implement(problem, GemmConfig(**entry["config"]), target) is None, key
        with pytest.MonkeyPatch.context() as patch:  # it is what the op chooses
            patch.setattr(tuning, "lookup", lambda op, key, on: entries[key]["config"])
            choose.choose.cache_clear()
            assert choose.choose(problem, target) == GemmConfig(**entry["config"]), key
    choose.choose.cache_clear()
    for entry in entries.values():
        assert runs[entry["run"]]
        assert entry["us"] > 0


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.stem}")
@pytest.mark.skipif(not SHIPPED, reason="no table is shipped")
def test_a_shipped_table_is_read_and_its_kernels_take_every_entry(path):
    check_shipped(path)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, None),
        ({"m": 128}, "assert 'm128 "),  # it would be looked up under another key
        ({"kernel": "gemv"}, "is None"),  # which takes one row
        ({"block_n": 1 << 12}, "is None"),
        ({"num_warps": [4]}, "is ignored"),
        ({"multiprocessors": 60}, "had 60 SMs"),
        ({"command": "rooftile tune --model /home/me/x"}, "not in"),
    ],
)
def test_what_is_shipped_is_held_to_that(tmp_path, wrong, message):
    tunable = TUNABLES["linear"]
    problem = tunable.problem(16, 4096, 4096, torch.bfloat16, "ieee")
    fields = tunable.fields(tunable.default(problem, H100))
    entry = {**tunable.describe(problem), "config": fields, "us": 9.0, "run": 0}
    run = dict.fromkeys(("gpu", "torch", "triton", "commit", "date", "command"), "rooftile tune")
    shipped = table("h200", runs=[run])
    shipped.entries = {tunable.key(problem): entry}
    for name, value in wrong.items():
        next(d for d in (fields, entry, run, shipped.meta) if name in d)[name] = value
    path = tmp_path / "h200" / "matmul.json"
    path.parent.mkdir()
    path.write_text(tuning.to_json(shipped))
    if message is None:
        check_shipped(path)
    else:
        with pytest.raises((AssertionError, RuntimeWarning), match=message):
            check_shipped(path)
