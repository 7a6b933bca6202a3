"""Triton's CPU interpreter, made exact, safe and complete.

As it comes, `TRITON_INTERPRET=1` computes with the raw bits of bfloat16 and fp8, truncates where a GPU rounds, lets an
out-of-bounds store corrupt the process silently, and fails on NumPy 2.4 for every loop with a runtime bound. `install`
mends that in place, in the process that it is called in:

- `dtypes`, `arithmetic`, `reductions`: values and roundings as on a GPU;
- `memory`: every access is checked against the storages that the kernel was given;
- `launch`, `syntax`: arguments, loop variables and Boolean operators typed as the compiler types them;
- `libdevice`: the functions of `triton.language.extra.libdevice`;
- `memo`, `plans`: what follows from types alone, worked out once.

Only `rooftile.runtime` imports this package; NumPy and ml_dtypes are needed nowhere else.
"""

from rooftile.errors import to_install

_installed = False


def install() -> None:
    """Corrects Triton's interpreter for this process. A second call does nothing.

    Raises ImportError where NumPy or ml_dtypes is missing, and RuntimeError where Triton was imported before
    TRITON_INTERPRET was set, or its interpreter lacks something that has to be mended.
    """
    global _installed
    if _installed:
        return
    try:
        import ml_dtypes  # noqa: F401
        import numpy  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f"Triton's interpreter needs numpy and ml_dtypes: {to_install('cpu')}", name=error.name
        ) from error
    import triton

    if isinstance(triton.language.sum, triton.JITFunction):
        raise RuntimeError(
            "TRITON_INTERPRET=1 was set after Triton had been imported, by transformers for example: set it in the "
            "environment before Python starts"
        )

    from rooftile.interpreter import arithmetic, dtypes, launch, libdevice, memo, memory, plans, reductions, syntax

    for room in (dtypes, arithmetic, reductions, memory, launch, syntax, libdevice, memo, plans):
        room.install()
    _installed = True
