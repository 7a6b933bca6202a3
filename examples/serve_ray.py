"""Replicas of a model behind one address, on any number of machines, by Ray Serve.

    pip install '.[ray]'                                                               # in a clone
    python examples/serve_ray.py path/to/a/checkpoint --replicas 2                     # on this machine
    serve run examples.serve_ray:app path=path/to/a/checkpoint replicas=8              # on a Ray cluster
    TRITON_INTERPRET=1 python examples/serve_ray.py demo --replicas 2 --max-seq-len 64 # on a CPU

Each replica has an `AsyncEngine` and the routes of `rooftile serve`, and with `--tensor-parallel` several GPUs of one
host. Ray sends a request to the replica that has fewer of them, and starts one anew whose engine has failed. Replicas
share nothing: a prefix cache is a replica's own.
"""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from ray import serve

from rooftile import runtime

MAX_WAITING = 256


@serve.ingress()
class Replica:
    """A model, on the GPUs that Ray gives it.

    Args:
        path: of a checkpoint that every machine has, an id on the Hugging Face Hub, or `demo`.
        tensor_parallel: GPUs.
        engine: options of `rooftile.Engine.from_pretrained`.
    """

    def __init__(self, path: str, tensor_parallel: int, engine: dict[str, Any]) -> None:
        import rooftile
        from rooftile.engine import processes
        from rooftile.engine.hub import folder_of

        self.path, self.folder, self.stack = path, folder_of(path), contextlib.ExitStack()
        self.stack.enter_context(processes.started(tensor_parallel, self.folder, engine))
        made = rooftile.AsyncEngine.from_pretrained(
            self.folder, **engine, tensor_parallel=tensor_parallel, max_waiting=MAX_WAITING, progress=False
        )
        self.engine = self.stack.enter_context(made)

    def __serve_build_asgi_app__(self) -> Any:
        from rooftile.serve.app import Options, create_app, folder_options

        options = Options(names=(self.path,), **folder_options(self.folder, None, "auto"))
        return create_app(self.engine, options)

    def check_health(self) -> None:
        if self.engine.failed:
            raise RuntimeError("the engine has failed")

    def __del__(self) -> None:
        self.stack.close()


def app(args: dict[str, Any]) -> serve.Application:
    """The application. `args` has path, and may have replicas, tensor_parallel, and options of the engine."""
    engine = {"max_batch": 32, **args}
    path, replicas = str(engine.pop("path")), int(engine.pop("replicas", 1))
    gpus = tensor_parallel = int(engine.pop("tensor_parallel", 1))
    for name in ("max_batch", "max_seq_len", "pages"):
        if name in engine:  # `serve run` gives texts
            engine[name] = int(engine[name])
    deployment = serve.deployment(
        Replica,
        name="rooftile",
        num_replicas=replicas,
        ray_actor_options={"num_gpus": gpus if runtime.MODE is runtime.Mode.GPU else 0},
        max_ongoing_requests=engine["max_batch"] + MAX_WAITING,  # the engine batches, and lets others wait
        graceful_shutdown_timeout_s=60,
    )
    return deployment.bind(path, tensor_parallel, engine)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="GPUs of a replica")
    parser.add_argument("--max-batch", type=int, default=32, help="sequences of a replica at a time")
    parser.add_argument("--max-seq-len", type=int, help="tokens of a sequence; by default the model's, at most 4096")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = {name: value for name, value in vars(parser.parse_args(given)).items() if value is not None}
    serve.start(http_options={"host": options.pop("host"), "port": options.pop("port")})
    serve.run(app(options), name="rooftile", blocking=True)


if __name__ == "__main__":
    main()
