"""`AdamW`: torch.optim.AdamW, with one launch for all parameters of a device.

On the host a step only checks what has changed since the last one: the addresses of parameters, gradients and state,
and the hyperparameters. It uploads only that again: the vector of the gradients' addresses, the hyperparameters, or the
table of all tensors. Nothing waits for the device, except with `nonfinite="error"`.
"""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Callable, Iterable
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rooftile import library, runtime
from rooftile.errors import checks_keywords
from rooftile.ops.adamw import DTYPES, Entry, Group, ListUpdate, dense, hyperparameters, laid_as

NONFINITE = ("propagate", "skip", "error")
_MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
_MASTER = "master_param"
_PLAIN = {Tensor, torch.nn.Parameter}
_NONE, _END = type(None), object()
_dtype_of = attrgetter("dtype")
_EMPTY = 16  # stands for the address of a gradient without elements: 0 means that there is none
_OPTIONS = ("max_grad_norm", "nonfinite", "state_dtype", "master_weights", "stochastic_rounding", "seed")


class AdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101), with the arguments and the state_dict of
    torch.optim.AdamW.

        m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g²
        p = (1 - lr weight_decay) p - lr / (1 - beta1^t) · m / (sqrt(v / (1 - beta2^t)) + eps)

    One launch updates all parameters of a device, whatever their shapes, dtypes and groups; with `max_grad_norm`, a
    launch before it computes the norm of all gradients. Arithmetic is float32. The step counts are on the device, and
    nothing waits for it.

    Args:
        params: parameters, named parameters, or groups, as torch.optim takes them: float32, float16 or bfloat16, of any
            strides, on one or more GPUs; DTensor too, of which each rank updates its shard. A gradient may have another
            of these dtypes. A parameter that is not dense, or a gradient of other strides, is copied at each step.
        lr: the learning rate. A float32 tensor on the parameters' device is read there, at each step.
        betas, eps, weight_decay, amsgrad, maximize: as in torch.optim.AdamW, by group.
        capturable: allow the capture of `step` in a CUDA graph, by group. Make `lr` a tensor on the device to change it
            between replays; a number is compiled into the graph.
        foreach, fused: accepted as in torch.optim.AdamW and kept in the groups; they change nothing.
        differentiable: refused.
        max_grad_norm: scale the gradients down so that the norm of all of them, over all groups, is at most this, as
            `torch.nn.utils.clip_grad_norm_` does. The gradients in memory stay as they are. The squares of a DTensor's
            gradient are summed over the ranks that shard it. After a step, `grad_norm` is the norm before clipping.
        nonfinite: what a norm that is not finite does. "propagate": as after `clip_grad_norm_`, NaN gives parameters
            that are NaN, and infinity sets finite gradients to zero and others to NaN. "skip": the step leaves
            parameters and state as they are; the host does not learn of it. "error": a RuntimeError before
            anything is written; this waits for the device at each step. It needs `max_grad_norm`, which may be inf.
        state_dtype: of the moments; by default each parameter's own.
        master_weights: keep a float32 copy of each parameter that is not float32, in the state as `master_param`. It is
            updated, and the parameter is rounded from it. It is made from the parameter at its first step: later writes
            to the parameter by others are lost.
        stochastic_rounding: round parameters in bfloat16 up or down with the probability that makes the expectation
            exact, where they have no master copy. Random bits are a function of `seed`, step, parameter and element:
            ranks with the same seed agree.
        seed: from 0 to 2^31 - 1.

    `torch.amp.GradScaler` hands its scale and its verdict over, as to torch.optim.AdamW(fused=True). It decides: where
    it has found an infinity, the step changes nothing and raises nothing, whatever `nonfinite` is.

    What a captured step reads and writes is kept as long as the optimizer. Keep the optimizer as long as its graphs.

    Raises:
        ValueError: a number is out of its range; an option is not one of those named, or is one of all groups and given
            to one; a parameter is on the CPU without
            the interpreter (at the first step); a gradient is sparse, or a gradient or the state has not its
            parameter's shape (in `step`).
        TypeError: a dtype, a kind of tensor or the type of an option is not one of those named.
        RuntimeError: `step` is captured and a group is not capturable; a norm is not finite, where that is an error.
    """

    @checks_keywords
    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        nonfinite: str = "propagate",
        state_dtype: torch.dtype | None = None,
        master_weights: bool = False,
        stochastic_rounding: bool = False,
        seed: int = 0,
    ) -> None:
        if nonfinite not in NONFINITE:
            raise ValueError(f"AdamW: nonfinite is {nonfinite!r}, expected one of {', '.join(NONFINITE)}")
        if nonfinite != "propagate" and max_grad_norm is None:
            raise ValueError(
                f"AdamW: nonfinite is {nonfinite!r} without max_grad_norm, expected a norm (inf does not clip)"
            )
        if max_grad_norm is not None:
            _check_number("max_grad_norm", max_grad_norm)
            if not max_grad_norm > 0.0:
                raise ValueError(f"AdamW: max_grad_norm is {max_grad_norm}, expected more than 0")
        if state_dtype is not None and state_dtype not in DTYPES:
            raise TypeError(
                f"AdamW: state_dtype is {state_dtype!r}, expected torch.float32, torch.float16 or torch.bfloat16"
            )
        _check_bools(master_weights=master_weights, stochastic_rounding=stochastic_rounding)
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"AdamW: seed is {library.named(seed)}, expected an int")
        if not 0 <= seed < 2**31:
            raise ValueError(f"AdamW: seed is {seed}, expected 0 to 2^31 - 1")
        self.max_grad_norm, self.nonfinite, self.state_dtype = max_grad_norm, nonfinite, state_dtype
        self.master_weights, self.stochastic_rounding, self.seed = master_weights, stochastic_rounding, seed
        self._forget()
        # The keys of torch.optim.AdamW's groups, so that each takes the other's checkpoints.
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad,
            "maximize": maximize, "foreach": foreach, "capturable": capturable, "differentiable": differentiable,
            "fused": fused, "decoupled_weight_decay": True,
        }  # fmt: skip
        _check_group(defaults)
        super().__init__(params, defaults)
        self._step_supports_amp_scaling = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            if (name := next((n for n in _OPTIONS if n in param_group), None)) is not None:
                raise ValueError(f"AdamW: a group has {name}, which is an option of all groups: give it to AdamW")
            _check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if p.dtype not in DTYPES:
                self.param_groups.pop()
                raise TypeError(
                    f"AdamW: a parameter of shape {tuple(p.shape)} has dtype {p.dtype}, expected float32, float16 or "
                    "bfloat16"
                )
        self._forget()

    # State

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), **{name: getattr(self, name) for name in _OPTIONS}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:
            for name, default in (("amsgrad", False), ("maximize", False), ("foreach", None), ("capturable", False)):
                group.setdefault(name, default)
            group.setdefault("differentiable", False)
            group.setdefault("fused", None)
            group["decoupled_weight_decay"] = True
        self._step_supports_amp_scaling = True
        self._forget()

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's: `step` is a number on the CPU, but on the device for a capturable or fused group.

        With `master_weights` the state has `master_param` too.
        """
        found = super().state_dict()
        on_host = [i for g in found["param_groups"] if not (g["capturable"] or g["fused"]) for i in g["params"]]
        states = {i: found["state"][i] for i in on_host if isinstance(found["state"].get(i, {}).get("step"), Tensor)}
        if states:
            first = next(iter(states.values()))["step"].device
            steps = torch.stack([s["step"].to(first) for s in states.values()]).cpu()
            for (i, state), step in zip(states.items(), steps.clone().unbind(), strict=True):
                found["state"][i] = {**state, "step": step.clone()}
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this class or of torch.optim.AdamW. Moments get `state_dtype`, else their parameter's
        dtype; a master copy that the checkpoint lacks is made from the parameter."""
        given: dict[str, Any] = {}
        handle = self.register_load_state_dict_pre_hook(lambda _, found: given.update(found))
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        # torch.optim casts all state to the parameters' dtypes.
        ids = [i for group in given["param_groups"] for i in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        for i, p in zip(ids, params, strict=True):
            for name, value in given["state"].get(i, {}).items():
                if name == "step" and isinstance(value, Tensor):
                    self.state[p][name] = _one_number(self.state[p][name])
                    continue
                wanted = torch.float32 if name == _MASTER else self.state_dtype if name in _MOMENTS else None
                # A copy that torch.optim has loaded and rounded is older than the parameter.
                if name == _MASTER and not (self.master_weights and value.dtype == torch.float32):
                    del self.state[p][name]
                elif wanted is not None and wanted != p.dtype:
                    self.state[p][name] = value.to(device=p.device, dtype=wanted)

    def _forget(self) -> None:
        """Drop all tables; the next step makes them anew."""
        self._seen: Any = None
        self._params: list[Any] = []
        self._addresses: list[int] = []
        self._dtypes: list[torch.dtype | None] = []
        self._values: list[Any] = []
        self._tensors: list[Tensor] = []
        self._places: list[int] = []
        self._uneven = False  # whether gradients are copied at each step
        self._devices: list[_Device] = []
        self._buffers: dict[int, dict[Any, Tensor]] = {}  # dense copies of parameters that are not
        self._sums: Tensor | None = None
        self._scale: Tensor | None = None
        self._captured: dict[int, Tensor] = getattr(self, "_captured", {})  # by id: most are those of the last capture

    @property
    def grad_norm(self) -> Tensor | None:
        """The norm of all gradients at the last step, before clipping: a float32 number on the device. None without
        `max_grad_norm`."""
        if self._sums is None:
            return None
        norm = self._sums.sum().sqrt()
        return (norm if self._scale is None else norm / self._scale).to(torch.float32)

    # A step

    @torch.compiler.disable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient. Return what `closure` returned, which is called before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            with torch.no_grad():
                self._step()
        except BaseException:
            # GradScaler removes them after a step that returns. Left here, they would decide over later steps.
            for name in ("grad_scale", "found_inf"):
                self.__dict__.pop(name, None)
            raise
        return loss

    def _step(self) -> None:
        capturing = _is_capturing()
        if capturing and not all(group["capturable"] for group in self.param_groups):
            raise RuntimeError("AdamW: step() is captured in a CUDA graph, but a group has capturable=False")

        params = [p for group in self.param_groups for p in group["params"]]
        grads: list[Any] = [p.grad for p in params]
        own, given = params, grads
        if not _PLAIN.issuperset(map(type, params)):
            grads = list(map(_placed, params, grads))  # new ones have to live until the launch
            own, given = list(map(_local, params)), list(map(_local, grads))
        absent = _NONE in set(map(type, grads))
        self._find(params, grads, own, given, absent)
        if not self._devices:
            return

        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        for device in self._devices:
            device.refresh(self.param_groups, self.max_grad_norm)
        sums = self._sum_squares(found_inf)
        for device in self._devices:
            more = (None if t is None else t.to(device.device, non_blocking=True) for t in (sums, scale, found_inf))
            device.start(*more)
        if capturing:
            self._captured.update((id(t), t) for device in self._devices for t in device.memory())
        if absent:
            params = [p for p, g in zip(params, grads, strict=True) if g is not None]
        torch.autograd.graph.increment_version(params)
        self._sums, self._scale = sums, scale

    def _find(self, params: list[Any], grads: list[Any], own: list[Any], given: list[Any], absent: bool) -> None:
        """Have tables for these parameters and gradients: those of the last step, as far as nothing has moved.

        `own` and `given` are what is on this rank. `absent`: some gradients are None.
        """
        try:
            if absent:
                addresses = [0 if g is None else g.data_ptr() or _EMPTY for g in given]
            else:
                addresses = list(map(Tensor.data_ptr, given))
                if 0 in addresses:
                    addresses = [address or _EMPTY for address in addresses]
        except RuntimeError:  # a tensor without memory
            for serial, (p, grad) in enumerate(zip(params, grads, strict=True)):
                if grad is not None:
                    _check_gradient(p, grad, serial)
            raise
        dtypes = [None if g is None else g.dtype for g in given] if absent else list(map(_dtype_of, given))
        if absent:  # one that is absent is taken for any
            given = [p if g is None else g for p, g in zip(own, given, strict=True)]
        seen = (
            list(map(Tensor.data_ptr, own)),
            # With the strides they tell whether `p.data` is another part of the same memory. Autograd sees to it that
            # a gradient has the shape of its parameter.
            list(map(Tensor.numel, own)),
            _strides(own),
            _strides(given),
            [(len(group["params"]), group["amsgrad"]) for group in self.param_groups],
            self._constants(),
        )
        same = len(params) == len(self._params) and all(map(is_, params, self._params)) and seen == self._seen
        if self._uneven or not same or not self._knows(dtypes) or not self._same_state():
            self._prepare(params, grads)
            before = self._dtypes if len(self._dtypes) == len(dtypes) else dtypes
            self._params, self._seen = params, seen
            self._dtypes = [d or known for d, known in zip(dtypes, before, strict=True)]
        elif addresses != self._addresses:
            for device in self._devices:
                device.addresses = device.update.addresses([addresses[t.entry.serial] for t in device.tensors])
        self._addresses = addresses

    def _constants(self) -> Any:
        """What the tables and the kernel depend on of the options, which may change between steps."""
        seed = self.seed if self.stochastic_rounding else None
        return self.max_grad_norm is not None, self.nonfinite == "skip", seed

    def _knows(self, dtypes: list[torch.dtype | None]) -> bool:
        """Whether the tables are of gradients of these dtypes. One that is None is skipped, whatever it was."""
        if dtypes == self._dtypes:
            return True
        return all(dtype is None or dtype == known for dtype, known in zip(dtypes, self._dtypes, strict=True))

    def _same_state(self) -> bool:
        """Whether the state is where it was: somebody may have replaced or moved it."""
        values = itertools.chain.from_iterable(map(dict.values, self.state.values()))
        return (
            all(map(is_, itertools.chain(values, (_END,)), self._values))  # `_END` shows a difference in length
            and list(map(Tensor.data_ptr, self._tensors)) == self._places
        )

    def _prepare(self, params: list[Any], grads: list[Any]) -> None:
        """The tables for these parameters and gradients."""
        groups = [(i, group) for i, group in enumerate(self.param_groups) for _ in group["params"]]
        new = [p for p, grad in zip(params, grads, strict=True) if grad is not None and "step" not in self.state[p]]
        for device in dict.fromkeys(p.device for p in new):
            some = [p for p in new if p.device == device]
            for p, step in zip(some, torch.zeros(len(some), device=device).unbind(), strict=True):
                self.state[p]["step"] = step
        classes: dict[Any, int] = {None: 0}
        found: dict[torch.device, list[_Tensors]] = {}
        for serial, (p, grad, (i, group)) in enumerate(zip(params, grads, groups, strict=True)):
            if grad is not None:
                _check_gradient(p, grad, serial)
            if grad is not None or self.state.get(p):
                self._complete(p, group)
                tensors = _Tensors(p, grad, self._entry(p, i, group, serial, classes))
                found.setdefault(p.device, []).append(tensors)
        known = {device.device: device for device in self._devices}
        self._devices = [
            _Device(device, tensors, known.get(device), list(classes), self) for device, tensors in found.items()
        ]
        self._values = [*(v for state in self.state.values() for v in state.values()), _END]
        self._tensors = [t for device in self._devices for t in device.state_tensors()]
        self._places = [t.data_ptr() for t in self._tensors]
        self._uneven = any(device.copies for device in self._devices)

    def _complete(self, p: Tensor, group: dict[str, Any]) -> None:
        """Make what the parameter's state lacks, or holds in another place or layout."""
        state = self.state[p]
        if not isinstance(step := state.get("step", 0.0), Tensor):
            state["step"] = torch.tensor(float(step))
        state["step"] = _one_number(state["step"]).to(device=p.device, dtype=torch.float32)
        for name in _MOMENTS[: 3 if group["amsgrad"] else 2]:
            if name not in state:
                dtype = self.state_dtype or p.dtype
                state[name] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        if self.master_weights and p.dtype != torch.float32 and _MASTER not in state:
            state[_MASTER] = p.detach().to(torch.float32, memory_format=torch.preserve_format, copy=True)

    def _entry(self, p: Tensor, i: int, group: dict[str, Any], serial: int, classes: dict[Any, int]) -> Entry:
        state = self.state[p]
        param = _local(p)
        if not dense(param):
            strides = library.contiguous_strides(param.shape)
            like = (param.shape, param.dtype, param.device)
            if like not in (buffers := self._buffers.setdefault(serial, {})):
                buffers.clear()
                buffers[like] = torch.empty_strided(param.shape, strides, dtype=param.dtype, device=param.device)
            param = buffers[like]
        names = [*_MOMENTS[: 3 if group["amsgrad"] else 2], *([_MASTER] if _MASTER in state else [])]
        local = {}
        for name in names:
            t = _local(state[name])
            if t.device != param.device:
                raise ValueError(f"AdamW: {name} of parameter {serial} is on {t.device}, expected {param.device}")
            if t.dtype not in DTYPES or (name != _MASTER and t.dtype != state["exp_avg"].dtype):
                raise TypeError(
                    f"AdamW: {name} of parameter {serial} has dtype {t.dtype}, expected float32, float16 or bfloat16 "
                    "for all moments alike"
                )
            if t.shape != param.shape:
                raise ValueError(
                    f"AdamW: {name} of parameter {serial} has shape {tuple(t.shape)}, expected {tuple(param.shape)}"
                )
            local[name] = laid_as(t, param)
            if local[name] is not t:
                state[name] = _as(state[name], local[name])
        return Entry(
            param,
            local["exp_avg"],
            local["exp_avg_sq"],
            _local(state["step"]),
            local.get("max_exp_avg_sq"),
            local.get(_MASTER),
            i,
            serial,
            classes.setdefault(_sharding(p), len(classes)),
        )

    def _sum_squares(self, found_inf: Tensor | None) -> Tensor | None:
        """The sums of squares of all gradients, by class, over all devices and ranks."""
        if self.max_grad_norm is None:
            return None
        sums = [device.update.norm(device.addresses) for device in self._devices]
        total = sums[0]
        for more in sums[1:]:
            total = total + more.to(total.device, non_blocking=True)
        for i, sharding in enumerate(self._devices[0].classes):
            if sharding is not None:
                mesh, dims = sharding
                for dim in dims:
                    torch.distributed.all_reduce(total[i : i + 1], group=mesh.get_group(dim))
        # Where GradScaler has found an infinity the kernel changes nothing, and the scaler lowers its scale.
        if (
            self.nonfinite == "error"
            and not math.isfinite(norm := float(total.sum()))
            and not (found_inf is not None and bool(found_inf))
        ):
            raise RuntimeError(f"AdamW: the sum of squares of all gradients is {norm}, expected a finite number")
        return total


class _Tensors:
    """A parameter, its gradient, and what the update is given of them."""

    def __init__(self, p: Tensor, grad: Tensor | None, entry: Entry) -> None:
        self.param, self.entry = _local(p), entry
        self.grad: Tensor | None = None if grad is None else _local(grad)
        # The update writes a dense copy where the parameter is not dense itself.
        self.is_copied = entry.param is not self.param

    @property
    def laid(self) -> Tensor | None:
        """The gradient in the layout of the entry."""
        return None if self.grad is None else laid_as(self.grad, self.entry.param)


class _Device:
    """The tables of the parameters on one device, and the launches over them."""

    update: ListUpdate
    dtypes: list[torch.dtype]

    def __init__(
        self,
        device: torch.device,
        tensors: list[_Tensors],
        before: _Device | None,
        classes: list[Any],
        optimizer: AdamW,
    ) -> None:
        self.device, self.tensors, self.classes = device, tensors, classes
        dtypes = [t.entry.param.dtype if t.grad is None else t.grad.dtype for t in tensors]
        if before is not None:  # a parameter without a gradient keeps the kind that it had
            last = dict(zip((t.entry.serial for t in before.tensors), before.dtypes, strict=True))
            dtypes = [
                last.get(t.entry.serial, d) if t.grad is None else d for t, d in zip(tensors, dtypes, strict=True)
            ]
        self.dtypes = dtypes
        self.key = (_places(tensors), dtypes, classes, optimizer._constants())
        if before is not None and before.key == self.key:
            self.update = before.update
        else:
            clips, skips, seed = optimizer._constants()
            entries = [t.entry for t in tensors]
            self.update = ListUpdate(entries, dtypes, seed=seed, classes=len(classes), clips=clips, skips=skips)
        self.hyper: Tensor | None = None if before is None else before.hyper
        self.hyper_key: Any = None if before is None else before.hyper_key
        laid = [t.laid for t in tensors]
        self.addresses = self.update.addresses([0 if g is None else g.data_ptr() or _EMPTY for g in laid])
        self.copies = [a for a, t in zip(laid, tensors, strict=True) if a is not t.grad]  # as long as their addresses
        for t in tensors:  # gradients are the user's to free
            t.grad = None
        self.copied = [t for t in tensors if t.is_copied]
        self.own = {t.entry.group for t in tensors}  # groups: nothing here reads the rows of others

    def state_tensors(self) -> Iterable[Tensor]:
        for t in self.tensors:
            e = t.entry
            yield from (x for x in (e.exp_avg, e.exp_avg_sq, e.step, e.max_exp_avg_sq, e.master) if x is not None)

    def refresh(self, groups: list[dict[str, Any]], max_norm: float | None) -> None:
        """Upload the hyperparameters, where they are others."""
        key = (
            max_norm,
            self.own,
            [(_rate(g["lr"]), *g["betas"], g["eps"], g["weight_decay"], g["maximize"]) for g in groups],
        )
        if key != self.hyper_key:
            rows = [_group(group, self.device if i in self.own else None) for i, group in enumerate(groups)]
            self.hyper, self.hyper_key = hyperparameters(rows, max_norm, self.device), key

    def start(self, sums: Tensor | None, scale: Tensor | None, found_inf: Tensor | None) -> None:
        assert self.hyper is not None
        for t in self.copied:
            t.entry.param.copy_(t.param)
        self.update.update(self.addresses, self.hyper, sums, scale, found_inf)
        for t in self.copied:
            t.param.copy_(t.entry.param)

    def memory(self) -> Iterable[Tensor]:
        """What captured launches read and write, but for the user's tensors."""
        yield from (t for t in (*self.update.tables, self.addresses, self.hyper) if t is not None)
        yield from (t for t in self.copies if t is not None)
        yield from (t.entry.param for t in self.copied)


def _places(tensors: list[_Tensors]) -> list[Any]:
    """Where all tensors of the entries are, and what a table says of them."""
    found: list[Any] = []
    for e in (t.entry for t in tensors):
        found += (e.serial, e.group, e.norm_class, e.param.numel(), e.param.dtype, e.exp_avg.dtype)
        memory = (e.param, e.exp_avg, e.exp_avg_sq, e.step, e.max_exp_avg_sq, e.master)
        found += (0 if t is None else t.data_ptr() for t in memory)
    return found


def _is_read_there(lr: Any) -> bool:
    """Whether the kernel reads that learning rate, from a tensor on the device."""
    return isinstance(lr, Tensor) and (lr.device.type != "cpu" or runtime.MODE is not runtime.Mode.GPU)


def _rate(lr: Any) -> Any:
    """What tells whether a learning rate is another one; a tensor on the device may change its value unnoticed."""
    return ("at", lr.data_ptr()) if _is_read_there(lr) else float(lr)


def _group(group: dict[str, Any], device: torch.device | None) -> Group:
    """The hyperparameters of a group; without a device, of one that has no tensors there."""
    lr = group["lr"]
    _check_rate(lr)
    if _is_read_there(lr):
        if device is None:
            lr = 0.0
        elif lr.device != device:
            raise ValueError(f"AdamW: lr is on {lr.device}, expected {device} or the CPU")
    else:
        lr = float(lr)
    beta1, beta2 = group["betas"]
    return Group(lr, beta1, beta2, group["eps"], group["weight_decay"], group["maximize"])


def _check_rate(lr: Any) -> None:
    if isinstance(lr, Tensor):
        if lr.numel() != 1:
            raise ValueError(f"AdamW: lr has shape {tuple(lr.shape)}, expected one number")
        if lr.dtype != torch.float32:
            raise TypeError(f"AdamW: lr has dtype {lr.dtype}, expected a number or a float32 tensor")


def _check_number(name: str, value: Any, expected: str = "a number") -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"AdamW: {name} is {library.named(value)}, expected {expected}")


def _check_bools(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"AdamW: {name} is {library.named(value)}, expected True or False")


def _check_group(group: dict[str, Any]) -> None:
    lr, betas = group["lr"], group["betas"]
    _check_rate(lr)
    # A tensor on a GPU is not read: that would wait for the device.
    values = {name: group[name] for name in ("eps", "weight_decay")}
    if not isinstance(lr, Tensor):
        _check_number("lr", lr, "a number or a tensor of one")
    if not (isinstance(lr, Tensor) and lr.device.type != "cpu"):
        values = {"lr": float(lr), **values}
    for name, number in values.items():
        _check_number(name, number)
        if not 0.0 <= number < math.inf:
            raise ValueError(f"AdamW: {name} is {number}, expected a finite number of 0 or more")
    if not isinstance(betas, (tuple, list)) or len(betas) != 2 or not all(isinstance(b, numbers.Real) for b in betas):
        raise TypeError(f"AdamW: betas is {betas!r}, expected two numbers")
    for i, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"AdamW: betas[{i}] is {beta}, expected at least 0 and below 1")
    _check_bools(**{name: group[name] for name in ("amsgrad", "maximize", "capturable", "differentiable")})
    if group["differentiable"]:
        raise ValueError("AdamW: differentiable is True, expected False (torch.optim.AdamW has it)")


def _one_number(step: Tensor) -> Tensor:
    """The step count without dimensions: checkpoints of others have it in the shape (1,) too."""
    if step.numel() != 1:
        raise ValueError(f"AdamW: a step has shape {tuple(step.shape)}, expected one number")
    return step.reshape(()) if step.dim() else step


def _is_capturing() -> bool:
    # A CPU build of PyTorch has no streams to ask.
    on_gpu = runtime.MODE is runtime.Mode.GPU and torch.cuda.is_initialized()
    return on_gpu and torch.cuda.is_current_stream_capturing()


def _strides(tensors: list[Tensor]) -> Any:
    """True if all are contiguous, else the strides of those that are not."""
    if all(map(Tensor.is_contiguous, tensors)):
        return True
    return [t.is_contiguous() or t.stride() for t in tensors]


def _check_gradient(p: Tensor, grad: Tensor, serial: int) -> None:
    if grad.layout != torch.strided:
        raise ValueError(
            f"AdamW: parameter {serial} has a sparse gradient, expected a dense one (torch.optim.SparseAdam takes it)"
        )
    if grad.dtype not in DTYPES:
        raise TypeError(
            f"AdamW: the gradient of parameter {serial} has dtype {grad.dtype}, expected float32, float16 or bfloat16"
        )
    if grad.shape != p.shape:  # autograd checks it, but `p.data` may be another tensor since
        raise ValueError(
            f"AdamW: the gradient of parameter {serial} has shape {tuple(grad.shape)}, expected {tuple(p.shape)}"
        )
    if grad.device != p.device:
        raise ValueError(f"AdamW: the gradient of parameter {serial} is on {grad.device}, expected {p.device}")
    for t in (p, grad):
        if is_traceable_wrapper_subclass(t) and not _is_distributed(t):
            raise TypeError(f"AdamW: parameter {serial} is a {type(t).__name__}, expected a plain tensor or a DTensor")
    if _is_distributed(p) != _is_distributed(grad):
        raise TypeError(
            f"AdamW: the gradient of parameter {serial} is a {type(grad).__name__} and the parameter a "
            f"{type(p).__name__}, expected both to be DTensor or neither"
        )


# DTensor: what is local, and which ranks hold the rest


def _is_distributed(t: Any) -> bool:
    return hasattr(t, "placements") and hasattr(t, "device_mesh")


def _local(t: Any) -> Any:
    """The tensor, or a DTensor's shard on this rank."""
    if not _is_distributed(t):
        return t
    local = t.to_local()
    return local.wait() if hasattr(local, "wait") else local


def _placed(p: Any, grad: Any) -> Any:
    """The gradient with the placements of its parameter: where they differ, ranks exchange it, as PyTorch's ops do."""
    if not (_is_distributed(p) and _is_distributed(grad)) or grad.placements == p.placements:
        return grad
    return grad.redistribute(p.device_mesh, p.placements)


def _as(like: Tensor, local: Tensor) -> Tensor:
    """A local tensor as what `like` is."""
    if not _is_distributed(like):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        like.device_mesh,  # type: ignore[attr-defined]
        like.placements,  # type: ignore[attr-defined]
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _sharding(p: Any) -> Any:
    """The mesh and its dimensions over which a DTensor's elements are spread; None where this rank has all of them."""
    if not _is_distributed(p):
        return None
    dims = tuple(i for i, placement in enumerate(p.placements) if not placement.is_replicate())
    return (p.device_mesh, dims) if dims else None
