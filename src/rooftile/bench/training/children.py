"""What a process that does one job prints."""

from __future__ import annotations

import json
import subprocess
from typing import Any


def result_of(process: subprocess.Popen[str], given: str, limit: float) -> dict[str, Any] | str:
    """The JSON in the last line that it prints, once it has read `given`; or, as text, why there is none.

    After `limit` seconds, and on an error here, it is killed.
    """
    with process:
        try:
            out, err = process.communicate(given, timeout=limit)
        except subprocess.TimeoutExpired:
            process.kill()  # and do not read on: processes that it has started may hold the pipes
            return f"not done after {limit} s"
        except BaseException:
            process.kill()
            raise
    lines = out.strip().splitlines()
    if process.returncode or not lines:
        said = err.strip().splitlines()
        return f"exit code {process.returncode}: {said[-1] if said else ''}"[:300]
    found: dict[str, Any] = json.loads(lines[-1])
    return found
