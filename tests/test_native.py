"""native.c, with a driver that is made up: what it is asked to launch, and what calls are remembered by."""

import ctypes
import struct
import types

import pytest
import torch
from torch.autograd import forward_ad

from rooftile import launching, library, native, runtime, tuning

import triton  # isort: skip

FUNCTION, STREAM = 0x1234, 0x5678


class OnAGPU(torch.Tensor):
    """A tensor that says it is on GPU 0."""

    @staticmethod
    def __new__(cls, x):
        return x.as_subclass(cls)

    index = 0

    def get_device(self):
        return self.index


class OnAnother(OnAGPU):
    index = 1


class Config(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "threads", "block_y", "block_z", "shared")),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("n_attributes", ctypes.c_uint),
    )


class Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_uint * 16))


PDL, COOPERATIVE = 6, 2  # of CUlaunchAttributeID
LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)
DEVICE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
ENCODE = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_void_p,
    *[ctypes.POINTER(ctypes.c_uint64)] * 2,
    *[ctypes.POINTER(ctypes.c_uint)] * 2,
    *[ctypes.c_int] * 4,
)
RETAIN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_int)
CONTEXT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
ERROR = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))


class Driver:
    """Notes what it is asked. `sizes`: the bytes of each parameter of the kernel that is launched."""

    def __init__(self):
        self.launches, self.encoded, self.sizes = [], [], ()
        self.device = self.result = 0
        self.streams = []  # the devices whose current stream was asked for
        self._functions = {
            "cuLaunchKernelEx": LAUNCH(self._launch),
            "cuTensorMapEncodeTiled": ENCODE(self._encode),
            "cuCtxGetDevice": DEVICE(self._get_device),
            "cuDevicePrimaryCtxRetain": RETAIN(self._retain),
            "cuCtxSetCurrent": CONTEXT(self._set_context),
            "cuGetErrorString": ERROR(self._error),
        }

    def addresses(self):
        return {name: ctypes.cast(f, ctypes.c_void_p).value for name, f in self._functions.items()}

    def stream_of(self, device):
        self.streams.append(device)
        return STREAM

    def _launch(self, config, function, params, extra):
        c = config.contents
        attributes = ctypes.cast(c.attributes, ctypes.POINTER(Attribute))
        values = [ctypes.string_at(params[i], size) for i, size in enumerate(self.sizes)]
        self.launches.append(
            {
                "grid": (c.grid_x, c.grid_y, c.grid_z),
                "threads": (c.threads, c.block_y, c.block_z),
                "shared": c.shared,
                "stream": c.stream,
                "attributes": {attributes[i].id for i in range(c.n_attributes)},
                "function": function,
                "values": values,
            }
        )
        return self.result

    def _encode(self, tensor_map, kind, rank, address, dims, strides, box, ones, interleave, swizzle, promotion, fill):
        assert ctypes.addressof(tensor_map.contents) % 64 == 0
        tensor_map[0] = address
        self.encoded.append((kind, address, *(tuple(a[i] for i in range(rank)) for a in (dims, strides, box)), swizzle))
        return self.result

    def _get_device(self, device):
        if self.device is None:  # the thread has no context
            return 201
        device[0] = self.device
        return 0

    def _retain(self, context, device):
        context[0] = 0x9000 + device
        return 0

    def _set_context(self, context):
        self.device = context - 0x9000
        return 0

    def _error(self, code, text):
        text[0] = b"made up"
        return 0


@pytest.fixture(scope="module")
def module():
    return native.build()


@pytest.fixture
def driver(module, monkeypatch):
    made_up = Driver()
    module.use_driver(made_up.addresses())
    native.configure(module, made_up.stream_of)
    types_ = (torch.Tensor, torch.nn.Parameter, OnAGPU, OnAnother)
    quiet = ((torch._C._len_torch_dispatch_stack, 0), (torch.autograd._profiler_enabled, False))
    module.configure(
        triton.knobs.runtime, made_up.stream_of, types_, torch.dtype, quiet, torch.is_grad_enabled, vars(forward_ad)
    )
    monkeypatch.setattr(native, "module", lambda: module)
    monkeypatch.setattr(runtime, "MODE", runtime.Mode.GPU)
    monkeypatch.setattr(launching, "_current_device", lambda: made_up.device)
    yield made_up
    if torch.cuda.is_available():  # the module of this process's own launches: what it asks is kept in C
        module.use_driver(None)
        native.configure(module, torch._C._cuda_getCurrentRawStream)


class Kernel:
    """A `@triton.jit` function, which returns what it was compiled to."""

    arg_names = ("x_ptr", "weight_ptr", "y_ptr", "stride_x", "stride_one", "n_rows", "n_cols", "N")

    def __init__(self, **metadata):
        signature = ("*fp32", "constexpr", "*fp32", "i32", "constexpr", "i32", "i64", "constexpr")
        some = {"global_scratch_size": 0, "profile_scratch_size": 0, "launch_cooperative_grid": False}
        self.compiled = types.SimpleNamespace(
            metadata=types.SimpleNamespace(**{**some, "launch_pdl": False, **metadata}),
            packed_metadata=(4, 1, 512),
            src=types.SimpleNamespace(signature=dict(zip(self.arg_names, signature, strict=False))),
            function=FUNCTION,
        )
        self.calls = []

    def __getitem__(self, grid):
        return lambda *args, **options: (self.calls.append((grid, args)), self.compiled)[1]


SIZES = (8, 8, 4, 4, 8)  # x, y, stride_x, n_rows, n_cols


def bound(kernel, x, programs=3, numbers=(5, 7), given=()):
    """A launch that is bound, by its first call, to the compiled kernel."""
    launcher = launching.KernelLauncher(kernel, {"N": 8})
    start = launching.bind(launcher, programs, strides=(48, 1), numbers=numbers)
    start(x, None, x, *given)
    assert start.bound
    kernel.calls.clear()
    return start


@pytest.fixture
def x():
    return OnAGPU(torch.zeros(64))


class TestLaunch:
    def test_the_driver_is_asked_for_what_triton_asks_it(self, driver, x):
        kernel = Kernel()
        start = bound(kernel, x)
        driver.sizes = SIZES
        y = OnAGPU(torch.zeros(64))
        start(x, None, y)
        (launch,) = driver.launches
        assert launch["grid"] == (3, 1, 1)
        assert launch["threads"] == (128, 1, 1)
        assert (launch["shared"], launch["stream"], launch["function"]) == (512, STREAM, FUNCTION)
        assert launch["attributes"] == set()
        assert b"".join(launch["values"]) == struct.pack("=QQiiq", x.data_ptr(), y.data_ptr(), 48, 5, 7)
        assert not kernel.calls

    def test_the_stream_is_the_one_of_the_tensors_device(self, driver):
        driver.device = 1
        x = OnAnother(torch.zeros(64))
        bound(Kernel(), x)(x, None, x)
        assert driver.streams == [1]

    def test_another_current_device_takes_the_way_with_a_guard(self, driver, x, monkeypatch):
        kernel, entered = Kernel(), []
        start = bound(kernel, x)
        driver.device = 1

        class Guard:
            def __init__(self, device):
                self.device = device

            def __enter__(self):
                entered.append(self.device)

            def __exit__(self, *_):
                driver.device = 1

        monkeypatch.setattr(launching, "_on_device", Guard)
        monkeypatch.setattr(
            launching, "start_compiled", lambda compiled, programs, device, args: entered.append(programs)
        )
        start(x, None, x)
        assert entered == [0, 3]
        assert not driver.launches

    def test_a_thread_without_a_context_gets_pytorchs(self, driver, x):
        start = bound(Kernel(), x)
        driver.device = None
        start(x, None, x)
        assert driver.device == 0
        assert len(driver.launches) == 1

    def test_numbers_and_programs_may_come_with_the_call(self, driver, x):
        kernel = Kernel()
        start = bound(kernel, x, programs=None, numbers=(None, None), given=(5, 7, 3))
        driver.sizes = SIZES
        start(x, None, x, 6, 2**40, 9)
        (launch,) = driver.launches
        assert launch["grid"] == (9, 1, 1)
        assert struct.unpack("=iq", b"".join(launch["values"][3:])) == (6, 2**40)
        start(x, None, x, 6, 8, 0)
        assert len(driver.launches) == 1, "nothing is launched over an empty grid"
        start(x, None, x, 2**40, 7, 9)
        assert len(kernel.calls) == 1, "a number that the kernel's type does not hold goes through Triton"

    def test_an_early_or_cooperative_launch_says_so(self, driver, x):
        for name, attribute in (("launch_pdl", PDL), ("launch_cooperative_grid", COOPERATIVE)):
            bound(Kernel(**{name: True}), x)(x, None, x)
            assert driver.launches.pop()["attributes"] == {attribute}

    def test_a_pointer_that_is_less_aligned_goes_through_triton(self, driver, x):
        kernel = Kernel()
        start = bound(kernel, x)
        start(x[1:], None, x)
        assert len(kernel.calls) == 1
        assert not driver.launches

    def test_a_tensor_in_the_place_of_none_goes_through_triton(self, driver, x, monkeypatch):
        kernel = Kernel()
        start = bound(kernel, x)
        monkeypatch.setattr(launching, "start_compiled", lambda *args: kernel.calls.append(args))
        start(x, x, x)
        assert len(kernel.calls) == 1
        assert not driver.launches

    @pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
    def test_hooks_are_told_of_launches(self, driver, x, monkeypatch, name):
        start = bound(Kernel(), x)
        started = []
        monkeypatch.setattr(launching, "start_compiled", lambda *args: started.append(args))
        hook = getattr(triton.knobs.runtime, name)
        hook.add(print)
        try:
            start(x, None, x)
        finally:
            hook.remove(print)
        start(x, None, x)
        assert (len(started), len(driver.launches)) == (1, 1)

    def test_observers_see_every_launch(self, driver, x, monkeypatch):
        start = bound(Kernel(), x)
        started = []
        monkeypatch.setattr(launching, "start_compiled", lambda *args: started.append(args))
        with launching.observed():
            start(x, None, x)
        start(x, None, x)
        assert (len(started), len(driver.launches)) == (1, 1)

    def test_what_is_forgotten_goes_through_triton(self, driver, x):
        kernel = Kernel()
        start = bound(kernel, x)
        launching.forget()
        start(x, None, x)
        assert (len(kernel.calls), len(driver.launches)) == (1, 0)
        start(x, None, x)
        assert (len(kernel.calls), len(driver.launches)) == (1, 1)

    def test_an_error_of_the_driver_is_raised_with_its_text(self, driver, x):
        start = bound(Kernel(), x)
        driver.result = 700
        with pytest.raises(RuntimeError, match=r"Triton Error \[CUDA\]: made up"):
            start(x, None, x)

    @pytest.mark.parametrize("metadata", [{"global_scratch_size": 8}, {"profile_scratch_size": 8}])
    def test_a_kernel_with_scratch_memory_stays_with_triton(self, driver, x, metadata):
        start = launching.bind(
            launching.KernelLauncher(Kernel(**metadata), {"N": 8}), 1, strides=(8, 1), numbers=(5, 7)
        )
        start(x, None, x)
        assert not start.bound


class MapKernel(Kernel):
    arg_names = ("x_ptr", "n_rows", "N")

    def __init__(self):
        super().__init__()
        self.compiled.src.signature = {"x_ptr": "tensordesc<fp32[8, 16]>", "n_rows": "i32", "N": "constexpr"}
        meta = {"swizzle": 3, "elem_size": 4, "elem_type": 7, "block_size": [8, 16], "fp4_padded": False}
        self.compiled.metadata.tensordesc_meta = [meta]


class TestTensorMaps:
    @pytest.fixture
    def start(self, driver, x):
        launcher = launching.KernelLauncher(MapKernel(), {"N": 8})
        described = {0: launching.Descriptor((4, 16), (16, 1), (8, 16))}
        start = launching.bind(launcher, 3, numbers=(5,), descriptors=described)
        start(x)
        assert start.bound
        driver.sizes = (8, 4, 4, 8, 8, 4)  # the map's first bytes, its shape and strides, n_rows
        return start

    def test_a_map_is_encoded_as_triton_does(self, driver, start, x):
        start(x)
        assert driver.encoded == [(7, x.data_ptr(), (16, 4), (64, 256), (16, 8), 3)]
        assert struct.unpack("=QiiqqI", b"".join(driver.launches[0]["values"])) == (x.data_ptr(), 4, 16, 16, 1, 5)

    def test_a_map_is_encoded_once_for_each_address(self, driver, start, x):
        other = OnAGPU(torch.zeros(64))
        for given in (x, x, other, other, x):
            start(given)
        assert [address for _, address, *_ in driver.encoded] == [x.data_ptr(), other.data_ptr(), x.data_ptr()]
        seen = [struct.unpack("=Q", launch["values"][0])[0] for launch in driver.launches]
        assert seen == [given.data_ptr() for given in (x, x, other, other, x)]

    def test_an_error_is_raised_and_not_remembered(self, driver, start, x):
        driver.result = 1
        with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled"):
            start(x)
        driver.result = 0
        start(x)
        assert len(driver.encoded) == 2


class TestPrepared:
    @pytest.fixture
    def prepared(self, driver):
        """An op that notes what is prepared."""
        made = []
        prepared = library.Prepared(lambda x, scale: (made.append(scale), lambda x, scale: (x, scale))[1])
        prepared.made = made
        return prepared

    def test_varying_arguments_are_given_to_the_call_and_not_remembered(self, driver, x):
        made = []
        prepared = library.Prepared(lambda x, i: (made.append(i), lambda x, i: i)[1], varying=1)
        assert [prepared(x, i) for i in (5, 6, 2**40)] == [5, 6, 2**40]
        assert made == [5]
        assert prepared.find(x)(x, 7) == 7

    def test_a_kind_of_call_is_prepared_once(self, prepared, x):
        for scale in (1.0, 2.0, 1.0):
            assert prepared(x, scale) == (x, scale)
        assert prepared.made == [1.0, 2.0]
        assert prepared.find(x, 1.0)(x, 1.0) == (x, 1.0)

    def test_a_call_that_fails_is_not_remembered(self, driver, x):
        def prepare(x):
            raise ValueError("wrong")

        prepared = library.Prepared(prepare)
        for _ in range(2):
            with pytest.raises(ValueError, match="wrong"):
                prepared(x)
        assert len(prepared._calls) == 0

    def test_tuning_tables_that_change_are_read_anew(self, prepared, x):
        prepared(x, 1.0)
        with tuning.off():
            prepared(x, 1.0)
        prepared(x, 1.0)
        tuning.forget()
        prepared(x, 1.0)
        launching.forget()
        prepared(x, 1.0)
        assert prepared.made == [1.0] * 5

    def test_calls_whose_arguments_never_repeat_are_forgotten(self, prepared, x, monkeypatch):
        monkeypatch.setattr(library, "_MANY", 4)
        for i in range(9):
            prepared(x, float(i))
        assert len(prepared._calls) <= 4


def in_c(module):
    return module.Calls()


def in_python(module):
    return library._Calls()


@pytest.fixture(params=[in_c, in_python], ids=["c", "python"])
def calls(request, driver, module, monkeypatch):
    monkeypatch.setattr(library, "_PLAIN_TYPES", (torch.Tensor, torch.nn.Parameter, OnAGPU, OnAnother))
    return request.param(module)


def plain(*shape, dtype=torch.float32):
    return OnAGPU(torch.zeros(shape, dtype=dtype))


class TestCalls:
    """What a prepared call is remembered by, in C and in Python."""

    def test_what_was_stored_is_found(self, calls):
        args = (plain(4, 8), None, 1e-6, True, "llama", 3, torch.float32, [1, 2])
        assert calls.find(*args) is None
        assert calls.store("run", *args)
        assert calls.find(plain(4, 8), *args[1:]) == "run"
        assert calls.get(plain(4, 8), *args[1:]) == "run"
        assert len(calls) == 1
        calls.clear()
        assert calls.find(*args) is None

    @pytest.mark.parametrize(
        "other",
        [
            (plain(8, 4), 1.0, "llama", 1),
            (plain(4, 8, dtype=torch.int32), 1.0, "llama", 1),
            (plain(8, 4).T, 1.0, "llama", 1),
            (OnAGPU(torch.zeros(33)[1:].view(4, 8)), 1.0, "llama", 1),
            (OnAnother(torch.zeros(4, 8)), 1.0, "llama", 1),
            (None, 1.0, "llama", 1),
            (plain(4, 8), 2.0, "llama", 1),
            (plain(4, 8), 1.0, "gemma", 1),
            (plain(4, 8), 1.0, "llama", 2),
            (plain(4, 8), 1.0, "llama", None),
            (plain(4, 8), 1.0, "llama"),
            (plain(4, 8), 1.0, "llama", 1, 1),
        ],
        ids=["shape", "dtype", "strides", "alignment", "device", "none", "float", "str", "int", "type", "less", "more"],
    )
    def test_everything_that_a_call_may_depend_on_is_in_the_key(self, calls, other):
        calls.store("run", plain(4, 8), 1.0, "llama", 1)
        assert calls.find(*other) is None

    @pytest.mark.parametrize("value", [2**70, object(), {}, 1j], ids=["int", "object", "dict", "complex"])
    def test_arguments_without_a_key_are_not_remembered(self, calls, value):
        if isinstance(calls, library._Calls) and value == 2**70:
            pytest.skip("Python's keys hold integers of any size")
        assert not calls.store("run", plain(4, 8), value)
        assert calls.find(plain(4, 8), value) is None

    def test_tensors_of_other_types_or_on_the_cpu_are_not_remembered(self, calls):
        class Other(OnAGPU):
            pass

        for x in (Other(torch.zeros(4)), torch.zeros(4), torch.zeros(4).to_sparse()):
            assert not calls.store("run", x)
            assert calls.find(x) is None

    def test_a_tensor_that_is_negated_when_it_is_read_is_not_remembered(self, calls):
        assert not calls.store("run", OnAGPU(torch._neg_view(torch.zeros(4))))

    def test_a_tensor_without_memory_is_another(self, calls):
        calls.store("run", plain(4, 8))
        assert calls.find(OnAGPU(torch._efficientzerotensor(4, 8))) is None

    def test_where_a_gradient_is_wanted_it_says_so(self, calls):
        leaf = OnAGPU(torch.zeros(4)).requires_grad_()
        calls.store("run", plain(4))
        assert calls.find(leaf) == ("run",)
        assert calls.get(leaf) == "run"
        with torch.no_grad():
            assert calls.find(leaf) == "run"

    def test_who_wants_to_see_ops_sees_them(self, calls):
        x = plain(4)
        calls.store("run", x)
        with torch.utils._python_dispatch.TorchDispatchMode():
            assert calls.find(x) is None
        with torch.profiler.profile():
            assert calls.find(x) is None
        with forward_ad.dual_level():
            assert calls.find(x) is None
        assert calls.find(x) == "run"

    def test_nothing_is_found_where_another_device_is_the_current_one(self, calls, driver):
        calls.store("run", plain(4))
        driver.device = 1
        assert calls.find(plain(4)) is calls.get(plain(4)) is None
