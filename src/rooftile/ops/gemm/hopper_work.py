"""What each program of the Hopper kernel has to do: its units of work.

They are whole tiles, or the `split` parts of every tile, or (stream) first the program's share of the steps of those
tiles that would not fill a wave, then whole tiles. The shares are equal, so one begins and ends within tiles: these
have parts as well, of programs that follow one another.
"""

from __future__ import annotations

from rooftile import runtime  # noqa: F401  # before Triton: runtime fixes the mode of the process

import triton.experimental.gluon.language as gl  # isort: skip
from triton.experimental import gluon  # isort: skip


@gluon.jit
def _streamed(size, T: gl.constexpr):
    """How many tiles programs share the steps of: those that would not fill a wave, and a whole wave with them."""
    tiles = gl.cdiv(size[0], gl.constexpr(T.tile_rows)) * gl.cdiv(size[1], gl.constexpr(T.cols))
    rest = tiles % gl.num_programs(0)
    return tiles, gl.where(rest == 0, 0, gl.minimum(tiles, rest + gl.num_programs(0)))


@gluon.jit
def _share(program, steps):
    """The first step of a program's share of so many."""
    each = steps // gl.num_programs(0)
    return program * each + gl.minimum(program, steps % gl.num_programs(0))


@gluon.jit
def _owner(step, steps):
    """The program in whose share a step is."""
    each = gl.maximum(steps // gl.num_programs(0), 1)
    longer = steps % gl.num_programs(0)
    at = step - longer * (each + 1)
    return gl.where(at < 0, step // (each + 1), longer + at // each)


@gluon.jit
def count_units(size, T: gl.constexpr):
    """How many units of work this program has."""
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    tiles, streamed = _streamed(size, T)
    if T.stream:
        steps = gl.cdiv(size[2], gl.constexpr(T.block_k))
        begin = _share(program, streamed * steps)
        end = _share(program + 1, streamed * steps)
        shares = gl.where(begin < end, (end - 1) // steps - begin // steps + 1, 0)
        return shares + (tiles - streamed) // programs
    else:
        return gl.cdiv(tiles * T.split - program, programs)


@gluon.jit
def unit(i, size, T: gl.constexpr):
    """Of this program's unit i: its tile, its part of the sum as steps of block_k, and who else has parts of it.

    That is how many have, the how manyeth this one is, and the places where the first and the second part are kept;
    the others follow.
    """
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    steps = gl.cdiv(size[2], gl.constexpr(T.block_k))
    if T.stream:
        streamed = _streamed(size, T)[1]
        total = streamed * steps
        begin = _share(program, total)
        end = _share(program + 1, total)
        first = begin // steps
        shares = gl.where(begin < end, (end - 1) // steps - first + 1, 0)
        shared = i < shares
        tile = gl.where(shared, first + i, streamed + program + (i - shares) * programs)
        at = gl.where(shared, tile * steps, 0)
        owner = _owner(at, total)
        parts = gl.where(shared, _owner(at + steps - 1, total) - owner + 1, 1)
        # A program may have the end of one tile and the begin of another to keep: it has two places.
        place = 2 * owner + gl.where(_share(owner, total) < at, 1, 0)
        begin = gl.where(shared, gl.maximum(begin - at, 0), 0)
        end = gl.where(shared, gl.minimum(end - at, steps), steps)
        return tile, begin, end, (parts, gl.where(shared, program - owner, 0), place, 2 * owner + 2)
    else:
        at = program + i * programs
        tile = at // T.split
        part = at % T.split
        at = tile * T.split
        return tile, steps * part // T.split, steps * (part + 1) // T.split, (gl.constexpr(T.split), part, at, at + 1)


@gluon.jit
def corner(tile, size, T: gl.constexpr):
    """A tile's first row and column in the output.

    group_m rows of tiles are walked column by column, so that what programs read at the same time stays in the L2.
    """
    tiles_m = gl.cdiv(size[0], gl.constexpr(T.tile_rows))
    in_group = gl.cdiv(size[1], gl.constexpr(T.cols)) * T.group_m
    first = tile // in_group * T.group_m
    group = gl.minimum(tiles_m - first, T.group_m)
    local = tile % in_group
    return (first + local % group) * T.tile_rows, local // group * T.cols
