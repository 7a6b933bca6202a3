"""What calls would be compiled to, without compiling: `python specializations.py` with ROOFTILE_COMPILE_TARGET.

A JSON task a line comes in, as for `rooftile.inspect.worker`, and for each a line goes out with the kernels that it
launches: the direction, what the launcher chose (name, upper-case constants, arguments that are None, warps, stages),
and what Triton specializes on (the types of the arguments, which are divisible by 16, which are 1).
"""

import json
import sys
from typing import Any

import torch

from rooftile import runtime  # before Triton: runtime fixes the mode of the process
from rooftile.inspect import driver, worker
from rooftile.inspect.plan import Task

from triton.runtime.jit import JITFunction  # isort: skip


def main() -> None:
    recorder = worker._Recorder(hashed=False)
    seen: list[tuple[str, list[Any], dict[str, Any]]] = []

    def look(self, key, signature, device, constexprs, options, attrs, warmup):
        names = [parameter.name for parameter in self.params]
        constants = {names[path[0]]: str(value) for path, value in constexprs.items() if len(path) == 1}
        chosen = {name: value for name, value in constants.items() if name.isupper() or value == "None"}
        given = {
            name: (signature[name], constants.get(name), attrs.get((i,)))
            for i, name in enumerate(names)
            if name not in chosen
        }
        seen.append((recorder.direction, [self.__name__, chosen, options.num_warps, options.num_stages], given))
        recorder.used[recorder.direction, self.__name__] = None

    driver.install(runtime.target(torch.device("meta")), lambda compiled, seconds: None)
    JITFunction._do_compile = look  # launches nothing where it returns None
    for line in sys.stdin:
        recorder.used = {}
        seen.clear()
        worker._call(Task.from_json(json.loads(line)), recorder)
        print(json.dumps(seen), flush=True)


if __name__ == "__main__":
    main()
