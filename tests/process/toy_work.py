"""Work for a process of its own that behaves, fails, hangs, eats memory or dies, as asked."""

import importlib.util
import os
import signal
import subprocess
import sys
import threading


def main(request, emit):
    for place in range(request.get("count", 0)):
        emit({"line": place})
    match request["do"]:
        case "tell":
            print("to stdout")
            print("to stderr", file=sys.stderr)
        case "fail":
            raise ZeroDivisionError
        case "hang":
            child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait(60)"])
            emit({"child": child.pid})
            threading.Event().wait(60)
        case "eat":
            held = []
            for _ in range(200):
                held.append(bytearray(os.urandom(1)) * (10 * 2**20))
                threading.Event().wait(0.01)
            threading.Event().wait(5)
        case "stay":
            emit({"pid": os.getpid()})
            threading.Event().wait(60)
        case "signal":
            os.kill(os.getpid(), getattr(signal, request["signal"]))
            threading.Event().wait(5)
        case "exit":
            os._exit(0)
        case "import":
            emit({"imported": importlib.util.find_spec(request["name"]) is not None})
