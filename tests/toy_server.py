"""A real server whose model is a toy: `python -m tests.toy_server '{"port": 0, "grace_s": 5}'` serves until it is told to end.

Completions of the text "count N" give N pieces, one every twentieth of a second; "wait" gives one piece and never ends;
"fill" gives pieces of 256 KiB until nobody wants them. The worker's process imports this file, and what serves is in another.
"""

import json
import re
import signal
import sys
import time

from trimtab.serve.contract.job import Event
from trimtab.serve.worker.ipc import Channel, event_to_message, job_from_message

PIECE_S = 0.05
BEAT_S = 1.0
# What jobs that are no answers are told.
RESULTS = {
    "embedding": {"embedding": [0.6, 0.8]}, "tokens": {"tokens": [5, 6], "token_strs": ["a", "b"]}, "text": {"prompt": "a b"},
}  # fmt: skip


def worker(connection, settings):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(connection)
    channel.send({"say": "ready", "plan": {}})
    jobs, is_draining, beat = {}, False, time.monotonic()
    try:
        while not (is_draining and not jobs):
            if time.monotonic() - beat > BEAT_S:
                beat = time.monotonic()
                channel.send({"say": "events", "events": []})
            if channel.poll(PIECE_S):
                message = channel.receive()
                if message["do"] == "submit":
                    job = job_from_message(message["job"])
                    if job.kind != "answer":
                        usage = {"prompt_tokens": 2, "completion_tokens": 0}
                        done = Event(job.id, "done", finish="stop", usage=usage, result=RESULTS[job.kind])
                        channel.send({"say": "events", "events": [event_to_message(done)]})
                        continue
                    text = job.prompt["text"] if isinstance(job.prompt, dict) else ""
                    jobs[job.id] = [
                        0,
                        text if text in ("wait", "fill") or re.fullmatch(r"(say|count) [0-9]{1,4}", text) else "say 2",
                    ]
                elif message["do"] == "cancel":
                    jobs.pop(message["id"], None)
                elif message["do"] == "call":
                    channel.send({"say": "reply", "id": message["id"], "value": {"running": len(jobs)}})
                is_draining |= message["do"] == "drain"
                continue
            for job_id in list(jobs):
                events = list(_step(jobs, job_id))
                if events:
                    channel.send({"say": "events", "events": [event_to_message(event) for event in events]})
    except EOFError:
        return


def _step(jobs, job_id):
    state = jobs[job_id]
    state[0] += 1
    count = 0 if state[1] in ("wait", "fill") else int(state[1].split()[1])
    if state[1] == "fill":
        yield Event(job_id, "text", text="x" * 2**18)
    elif state[0] == 1 or state[0] <= count:
        yield Event(job_id, "text", text=f"{state[0]} ")
    elif count:
        del jobs[job_id]
        yield Event(job_id, "done", finish="stop", usage={"prompt_tokens": 1, "completion_tokens": count})


if __name__ == "__main__":
    from tests.toy_serving import main

    main(json.loads(sys.argv[1]))
