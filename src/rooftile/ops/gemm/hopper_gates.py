"""The GEMMs before and after the gate of an MLP, h = act(g) * u, in training: kernel "hopper" with a gate's epilogue.

    forward    [g | u] = x @ weight^T + bias       writes h, g and u
    backward   dh = dy @ weight                    reads g and u, writes dg = dh * u * act'(g), du = dh * act(g), and h

So the forward does not read g and u again, and dh is not written at all.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor

from rooftile import launching, library, runtime
from rooftile.ops.gemm import dispatch, hopper
from rooftile.ops.gemm.config import GemmConfig, Operands, Problem

# Microseconds on an H200, in brackets with the gate as a kernel of its own:
#
#                                         forward        backward
#    16384 x 2048 -> 2 x 8192 -> 2048     1676 (1778)     997 (1126)
#     8192 x 4096 -> 2 x 14336 -> 4096    2892 (2954)    1606 (1627)
#     4100 x 1024 -> 2 x 3072 -> 1024       80 (96)        64 (78)
#
# Backward, tiles of 128 x 128 and 256 x 128 took 0.98 to 1.04 and 1.05 to 1.3 times as long, and ping-pong 1.04 to 1.2
# times.
_BACKWARD = GemmConfig("hopper", 128, 192, 64, 8, 1, 8, 4)


def backward_config(p: Problem, target: runtime.Target) -> GemmConfig | None:
    """How the GEMM p of the backward is launched; None where the gate's backward is a kernel of its own."""
    tiles = library.cdiv(p.m, _BACKWARD.block_m) * library.cdiv(p.n, _BACKWARD.block_n)
    if tiles < target.multiprocessors or hopper.can_implement(p, _BACKWARD, target) is not None:
        return None
    return _BACKWARD


def _tiling(o: Operands, c: GemmConfig, reads: int, outputs: int) -> hopper.HopperTiling:
    if isinstance(o.x, FunctionalTensor):
        raise launching.Untraceable("TMA descriptors")
    limit = runtime.target(o.w.device).shared_memory
    layouts = hopper.along_k(o.x), hopper.along_k(o.w)
    return hopper.tiling_of(c, *layouts, o.gated, o.activation, "", "", 2, limit, reads, outputs)


def prepare_forward(o: Operands, c: GemmConfig) -> Callable[..., None]:
    """The launch over x, the weight `(2N, K)`, h `(M, N)`, the bias or None, and gate_up `(M, 2N)`."""
    m, n = o.out.shape
    t = _tiling(o, c, 0, 3)
    half = hopper.described(dispatch.like(o.x, (m, 2 * n))[:, :n], t.out_block)
    start = hopper.bind(hopper.hopper_gemm, o, t, {8: half, 9: half})

    def run(x: Tensor, weight: Tensor, h: Tensor, bias: Tensor | None, gate_up: Tensor) -> None:
        start(x, weight, h, None, None, None, bias, None, gate_up, gate_up.narrow(1, n, n))

    return run


def prepare_backward(o: Operands, needs_h: bool, c: GemmConfig) -> Callable[..., None]:
    """The launch over dy `(M, K)`, the weight `(K, N)`, h `(M, N)` or None, gate_up `(M, 2N)` and its gradient.

    o.w is the weight as `(N, K)`; o.out is the gate's half of gate_up's gradient.
    """
    m, n = o.out.shape
    t = _tiling(o, c, 2, 3 if needs_h else 2)
    half = hopper.described(o.out, t.out_block)
    descriptors = {3: half, 7: half, 8: half}
    if needs_h:
        descriptors[9] = hopper.described(dispatch.like(o.x, (m, n)), t.out_block)
    start = hopper.bind(hopper.hopper_gemm, o, t, descriptors)

    def run(dy: Tensor, weight: Tensor, h: Tensor | None, gate_up: Tensor, grad: Tensor) -> None:
        up, dup = gate_up.narrow(1, n, n), grad.narrow(1, n, n)
        start(dy, weight, grad, gate_up, None, None, None, up, dup, h)

    return run
