"""What stands in for a process of the search; it imports nothing, so that it starts at once."""

import os
import signal
import time


def serve(pipe):
    """Answers "fine" and "twice" with themselves, and does what any other task is the name of."""
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        pipe.send(("trying", f"config of {task}"))
        if task == "hang":
            time.sleep(60)
        elif task == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif task == "exit":
            os._exit(3)
        elif task == "lose the device":
            pipe.send(("dead", "an illegal memory access"))
            os._exit(1)
        elif task == "raise":
            pipe.send(("error", "ValueError: no configuration is right"))
        else:
            pipe.send(("done", (task, os.getpid())))
