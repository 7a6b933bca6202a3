"""A pytest plugin (`-p without_triton`) that hides Triton from the process, as if it were not installed."""

import sys
from importlib.machinery import PathFinder


class _Hidden(PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        return None if fullname.partition(".")[0] == "triton" else super().find_spec(fullname, path, target)


sys.meta_path[sys.meta_path.index(PathFinder)] = _Hidden
assert not any(name.partition(".")[0] == "triton" for name in sys.modules), "loaded too late: Triton is there"
