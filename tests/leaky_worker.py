"""A worker without a model that says everything that it knows of its files. It imports no torch: it starts for every test."""

import os

from trimtab.errors import AdapterError, CheckpointError
from trimtab.serve.contract.job import Event
from trimtab.serve.scheduling.scheduler import error_event
from trimtab.serve.worker.ipc import Channel, event_to_message, job_from_message


def main(connection, settings):
    """Say everything that a worker knows of its files, wherever it can be said."""
    channel = Channel(connection)
    model, adapters = settings["request"]["model"], settings["adapters"]
    assert os.path.isabs(model) and all(map(os.path.isabs, adapters.values()))
    if settings["request"]["context_tokens"] == 1:
        error = CheckpointError(f"cannot be read, nor {model}/config.json beside it", path=f"{model}/tokenizer.json")
        channel.send({"say": "fatal", "error": error_event("", error).error})
        os._exit(1)
    plan = settings["a real plan"]
    plan["request"] |= {"model": model, "adapters": adapters, "offload_dir": f"{model}/spill"}
    numbers = {"adapters": sorted(adapters), "resident": sorted(adapters), "memory": {"gpu_bytes": 5}, "rows": 8}
    channel.send({"say": "ready", **numbers, "plan": plan})
    try:
        while True:
            message = channel.receive()
            if message["do"] == "drain":
                return
            if message["do"] == "submit":
                job = job_from_message(message["job"])
                error = CheckpointError(f"is gone, '{model}' has no {model}.", path=f"{model}/a.safetensors")
                events = [error_event(job.id, error)]
                if job.request.max_new_tokens == 2:
                    events.insert(0, Event(job.id, "text", text="so far"))
                channel.send({"say": "events", "events": [event_to_message(event) for event in events]})
            elif message["do"] == "call" and message["what"] == "load_adapter":
                path = message["path"]
                error = AdapterError(path, [f"{path}/adapter_config.json is short", f"{path!r} is no adapter"])
                channel.send({"say": "reply", "id": message["id"], "error": error_event("", error).error})
            elif message["do"] == "call":
                channel.send({"say": "reply", "id": message["id"], "value": numbers})
    except EOFError:
        return
