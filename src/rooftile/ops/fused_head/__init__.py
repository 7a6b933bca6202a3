"""Losses over a model's head: its GEMM and the loss by chunks of tokens, without all logits in memory.

    linear_cross_entropy.py    of labels; distributed.py, of DTensor
    linear_jsd.py              of a teacher's head: linear_jsd and linear_kl
    head.py                    the walk over chunks, the gradients, arguments and checks that they share

The kernels between the GEMMs are those of rows: ops/cross_entropy, and linear_jsd.py's own.
"""
