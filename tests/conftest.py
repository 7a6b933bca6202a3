"""Where the tests run: on the GPU, or on the CPU in Triton's interpreter; without Triton, the references alone."""

import os

# Before NumPy and PyTorch come in: workers of pytest-xdist share the cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # in this process, not in a pool of others
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded

import gc
import importlib.util
import sys

import hypothesis
import pytest
import torch

HAS_GPU = torch.accelerator.is_available()
HAS_TRITON = importlib.util.find_spec("triton") is not None
# Files whose tests need none.
WITHOUT_TRITON = {"test_reference.py"}

# What an example costs is the machine's business: a slow one must not fail a test. And a commit passes or fails every
# time alike; `pytest --hypothesis-profile default` draws examples that no run had.
hypothesis.settings.register_profile(
    "rooftile", deadline=None, derandomize=True, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("rooftile")

if HAS_TRITON:
    if not HAS_GPU:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    from rooftile import runtime  # before Triton: it fixes the mode of the process


class _NeedsTriton(pytest.Module):
    def collect(self):
        pytest.skip("Triton is not installed", allow_module_level=True)


def pytest_ignore_collect(collection_path, config):
    """Files of nightly tests alone, where those are left out: to import them takes each worker seconds."""
    if config.option.markexpr == "not nightly" and collection_path.suffix == ".py":
        return "\npytestmark = pytest.mark.nightly\n" in collection_path.read_text(encoding="utf-8") or None
    return None


def _worker():
    """This worker's number and how many there are; without pytest-xdist the only one."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]), int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    """Each worker starts a folder at another file. In a fresh clone, to rewrite the assertions takes as long as all
    imports; so it is done once for each file, and the other workers read what is written."""
    report = yield
    if isinstance(collector, pytest.Dir):
        number, workers = _worker()
        first = len(report.result) * number // workers
        report.result = report.result[first:] + report.result[:first]
    return report


def pytest_pycollect_makemodule(module_path, parent):
    if not HAS_TRITON and module_path.name not in WITHOUT_TRITON:
        return _NeedsTriton.from_parent(parent, path=module_path)
    return None


_PARAMETERS = type(pytest.param())


def _is_nightly(value):
    return isinstance(value, _PARAMETERS) and any(mark.name == "nightly" for mark in value.marks)


def _is_left_out(item):
    """Whether a test with the mark `each_once` is left to `make test-all`.

    `make test` runs as many as the longest list of `parametrize` has values: the k-th value of each list together,
    those of a shorter list again and again.
    """
    places, sizes = [], []
    for mark in item.iter_markers("parametrize"):
        names, values = mark.args
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
        values = [value for value in values if not _is_nightly(value)]
        sizes.append(len(values))
        for place, value in enumerate(values):
            each = value.values if isinstance(value, _PARAMETERS) else (value,) if len(names) == 1 else value
            if all(item.callspec.params[name] is v for name, v in zip(names, each, strict=True)):
                places.append(place)
                break
        else:
            return True  # with a value that is nightly
    return all(places != [k % size for size in sizes] for k in range(max(sizes)))


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the marks
def pytest_collection_modifyitems(items):
    if _worker()[1] > 1:  # the order that all workers have
        items.sort(key=lambda item: item.path)
    for item in items:
        if item.get_closest_marker("each_once") and _is_left_out(item):
            item.add_marker(pytest.mark.nightly)
    if HAS_TRITON and runtime.MODE is runtime.Mode.GPU and HAS_GPU:
        return
    reason = "needs a GPU, and there is none" if not HAS_GPU else "needs a GPU, and TRITON_INTERPRET=1 is set"
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    """What there is now stays. To search it for cycles again and again takes a twentieth of the time."""
    if not HAS_GPU:  # where cycles may hold memory that other tests need
        gc.freeze()
        gc.set_threshold(100_000, 20, 100)
    # After each compilation torch.compile flushes the processor's cache and times its guards, for a log.
    if hasattr(guards := sys.modules.get("torch._dynamo.guards"), "profile_guard_manager"):
        guards.profile_guard_manager = lambda *_: 0.0


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    """What a file's tests have left (models' code, compiled graphs) stays, too."""
    yield
    if not HAS_GPU:
        gc.collect()
        gc.freeze()


@pytest.fixture
def device() -> torch.device:
    """Where kernels run in this process."""
    return runtime.default_device()


@pytest.fixture(autouse=True)
def _seed() -> None:
    # Without a GPU torch.manual_seed formats the stack once for each kind of accelerator, for a later seeding.
    (torch.manual_seed if HAS_GPU else torch.default_generator.manual_seed)(0)


@pytest.fixture(autouse=True)
def _memory_given_back():
    """Workers share a GPU's memory: none keeps what its tests have freed."""
    yield
    if HAS_GPU and torch.accelerator.memory_reserved() > 1 << 30:
        gc.collect()
        torch.accelerator.empty_cache()


@pytest.fixture(autouse=True)
def _nothing_prepared():
    """On a GPU ops remember how they ran. A test that replaces a choice is not to find, or leave, another's."""
    if HAS_TRITON and runtime.MODE is runtime.Mode.GPU:
        from rooftile import launching

        launching.forget()
        yield
        launching.forget()
    else:
        yield
