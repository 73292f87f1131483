"""A worker without a model: it echoes, and hangs, dies or fails where the test wants it to."""

import os

from tests.waiting import hang
from trimtab.serve.contract.job import Event
from trimtab.serve.worker.ipc import Channel, event_to_message, job_from_message

BEAT_S = 0.02


def main(connection, settings):
    channel = Channel(connection)
    fails_after = settings.get("fail_after")
    if settings.get("fail") or (fails_after is not None and os.path.exists(fails_after)):
        channel.send({"say": "fatal", "error": {"class": "CheckpointError", "message": "no model", "fields": {"path": "m"}}})
        os._exit(1)
    if settings.get("die_at_start_after") is not None and os.path.exists(settings["die_at_start_after"]):
        os._exit(3)
    channel.send({"say": "loading", "done": 1, "of": 2})
    channel.send({"say": "phase", "phase": "loading", "far": "1 of 2 GiB"})
    channel.send({"say": "ready", "adapters": sorted(settings.get("adapters", {})), "pid": os.getpid(), "plan": {}})
    try:
        while True:
            if channel.poll(BEAT_S):
                _obey(channel, channel.receive())
            else:
                channel.send({"say": "events", "events": []})
    except EOFError:
        return


def failing(connection, settings):
    main(connection, {**settings, "fail": True})


def _obey(channel, message):
    def emit(*events):
        channel.send({"say": "events", "events": [event_to_message(event) for event in events]})

    if message["do"] == "submit":
        job = job_from_message(message["job"])
        match job.prompt:
            case "echo":
                emit(Event(job.id, "started"), Event(job.id, "text", text=str(os.getpid())))
                emit(Event(job.id, "done", finish="stop"))
            case "speak, then wait":
                emit(Event(job.id, "text", text="so far"))
            case "wait":
                pass
            case "announced":
                channel.send({"say": "busy", "what": "a long piece", "most_s": job.deadline_s})
                hang(job.deadline_s / 2)
                emit(Event(job.id, "done", finish="stop"))
            case "hang":
                hang()
            case "die":
                os._exit(7)
    elif message["do"] == "call":
        if message["what"] == "hang":
            hang()
        if message["what"] == "unload_adapter" and message["name"] == "busy":
            error = {"class": "RequestError", "message": "is in use", "fields": {"field": "lora_name"}}
            channel.send({"say": "reply", "id": message["id"], "error": error})
        elif message["what"] == "bad":
            error = {"class": "RequestError", "message": "no such call", "fields": {"field": "what"}}
            channel.send({"say": "reply", "id": message["id"], "error": error})
        else:
            channel.send({"say": "reply", "id": message["id"], "value": {"what": message["what"]}})
    elif message["do"] == "drain":
        os._exit(0)
