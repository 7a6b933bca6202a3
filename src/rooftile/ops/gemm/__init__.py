"""GEMMs of every kind: a mainloop for each regime, prologues and epilogues as parts.

rows of x    mainloop                              weight
one          gemv.py, gemv_persistent.py           dense, int8, fp8, int4
             gemv_imma.py                          int8, int4
few          skinny.py                             dense, fp8
             skinny_dequantize.py                  int8, fp8, int4
many         tiled.py, hopper.py, hopper_fp8.py    dense, fp8
             dequantize.py                         int8, fp8, int4: made dense first

epilogues    epilogue.py for few and many rows, gemv_epilogue.py for one; hopper.py has its own (Gluon)
prologues    parts.py
choice       choose.py: from a problem (config.py) to a configuration; dispatch.py binds its kernel
             choose_dense.py, choose_norm.py, choose_quantized.py, choose_fp8.py: the configurations to choose from
ops          linear.py, lora_linear.py, matmul.py, norm_linear.py, qkv_rope_cache.py, weight_only.py, fp8_linear.py
"""
