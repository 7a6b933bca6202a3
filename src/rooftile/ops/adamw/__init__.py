"""AdamW over one tensor, and over a list of tensors of any shapes in one launch (Loshchilov and Hutter 2019,
https://arxiv.org/abs/1711.05101).

    m = beta1 m + (1 - beta1) g,   v = beta2 v + (1 - beta2) g²
    p = (1 - lr wd) p - lr / (1 - beta1^t) · m / (sqrt(v / (1 - beta2^t)) + eps)

Bytes: p, g, m and v are read, p, m and v written: 28 an element in float32, 14 in 16 bits. All arithmetic is float32,
but for the bias corrections, which are float64.

- `parts`: the mathematics of a chunk of a tensor, which both kernels share;
- `tensor`: the op `adamw_`, one tensor;
- `listed`: the update of a list, and the sum of squares of its gradients.
"""

from rooftile.ops.adamw.listed import Entry, ListUpdate, hyperparameters
from rooftile.ops.adamw.parts import DTYPES, Group, dense, laid_as
from rooftile.ops.adamw.tensor import adamw_

__all__ = ["DTYPES", "Entry", "Group", "ListUpdate", "adamw_", "dense", "hyperparameters", "laid_as"]
