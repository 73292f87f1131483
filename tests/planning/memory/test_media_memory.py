"""What the plan of a server counts for images and audio, and that the engine decodes within it."""

import io
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

import trimtab
from tests.raised import raised, refused
from trimtab.api import PlanInputs, plan_request
from trimtab.engine.chat.media import picture_bytes, sound_rate
from trimtab.errors import DoesNotFitError, gib
from trimtab.planning.memory.media import LEAST_BUDGET_BYTES, MOST_RATE, PREPARED_PIXEL_BYTES, WEBP_PIXEL_BYTES, sound_bytes
from trimtab.report.render import WIDTH, Lines
from trimtab.request import GenerateRequest, LoadRequest
from trimtab.serve.contract.job import Job
from trimtab.serve.contract.settings import Limits
from trimtab.serve.worker.engine import LoadedEngine
from trimtab.serve.worker.prompt_inputs import decoded_bytes
from trimtab.serve.worker.registry import ServedModel
from trimtab.serve.worker.worker import _media

DEMO = Path(trimtab.__file__).parent / "demo" / "base"
REQUEST = LoadRequest(model=str(DEMO), device="cpu", quant="none", dtype="float32", context_tokens=128)
LIMITS = Limits()
INPUTS = PlanInputs()  # the model is read once


def served(limits=LIMITS, **model):
    """Return what a worker is told of media."""
    return _media(ServedModel(name="demo", request=REQUEST, **model).settings(64, limits))


def test_the_plan_of_a_server_counts_what_the_largest_request_needs():
    alone, plan = (plan_request(REQUEST, later={}, inputs=INPUTS), plan_request(REQUEST, later={}, inputs=INPUTS, media=served()))
    assert "media" not in alone.host and alone.media_reason == "" and "media" not in str(alone)
    assert plan.host["media"] > WEBP_PIXEL_BYTES * LIMITS.request_pixels
    assert plan.host["media_files"] == LIMITS.all_body_bytes * 3 // 4
    counted = plan.host["media"] + plan.host["media_files"]
    assert plan.host_peak_bytes - plan.host["process"] == alone.host_peak_bytes - alone.host["process"] + counted
    for text in (str(plan), Lines(WIDTH).show(plan.document())):
        text = " ".join(text.split())
        assert f"media {gib(plan.host['media'])}" in text
        assert f"{LIMITS.request_pixels} pixels in images=1 and audio_s=30 needs up to {gib(plan.host['media'])}" in text
    less = plan_request(
        REQUEST, later={}, inputs=INPUTS, media=served(replace(LIMITS, request_pixels=10**6, all_body_bytes=4 * 2**20))
    )
    assert (less.host["media"], less.host["media_files"]) == (LEAST_BUDGET_BYTES, 3 * 2**20)


@pytest.mark.parametrize("request_, model", [(replace(REQUEST, images=0, audio_s=0.0), {}), (REQUEST, {"supports": ()})])
def test_a_model_that_takes_text_only_counts_nothing(request_, model):
    plan = plan_request(request_, later={}, inputs=INPUTS, media=served(**model))
    assert "media" not in plan.host and "media_files" not in plan.host and plan.media_reason == ""


def test_a_host_budget_without_room_for_media_is_refused():
    plan = plan_request(REQUEST, later={}, inputs=INPUTS, media=served())
    small = replace(REQUEST, host_memory_bytes=plan.host_peak_bytes - plan.host["media"] // 2)
    plan_request(small, later={}, inputs=INPUTS)
    error = raised(DoesNotFitError, lambda: plan_request(small, later={}, inputs=INPUTS, media=served(), is_advised=False))
    assert error.device == "host"


def job(*parts):
    return Job("a", [{"role": "user", "content": list(parts)}], GenerateRequest())


def image(width, height, kind="PNG"):
    out = io.BytesIO()
    Image.new("RGB", (width, height)).save(out, kind)
    return {"type": "image", "image": out.getvalue()}


def sound(rate, seconds=0.1, channels=1, kind="WAV"):
    out = io.BytesIO()
    soundfile.write(out, np.zeros((int(seconds * rate), channels)), rate, format=kind)
    return {"type": "audio", "audio": out.getvalue()}


def header(width, height, kind):
    """Return an image of which only the header is there."""
    data = bytearray(image(4, 3, kind)["image"])
    if kind == "PNG":
        data[16:24] = struct.pack(">II", width, height)
    else:
        data[12:16], data[24:30] = b"VP8X", (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    return {"type": "image", "image": bytes(data)}


@pytest.mark.parametrize("images, size", [(1, (8_000, 4_000)), (16, (2_000, 1_000))])
def test_no_allowed_request_needs_more_than_the_budget(images, size):
    """The largest requests of each kind: one image of all pixels, many images, the highest rate."""
    request = replace(REQUEST, images=images)
    plan = plan_request(request, later={}, inputs=INPUTS, media=served())
    assert images * size[0] * size[1] == LIMITS.request_pixels
    needed = [
        decoded_bytes(job(*[header(*size, kind)] * images, *extra), model_type="gemma4", audio_s=request.audio_s)
        for kind in ("PNG", "WEBP")
        for extra in ([], [sound(MOST_RATE)], [sound(48_000, channels=2)] * 3)
    ]
    assert max(needed) == plan.host["media"] > LEAST_BUDGET_BYTES and min(needed) > 18 * LIMITS.request_pixels


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP"])
def test_what_media_take_is_counted_without_a_library_that_reads_the_file(kind, monkeypatch):
    """It is counted on the thread that makes tokens: a file may be made so that a library walks through it for minutes."""
    out = io.BytesIO()
    soundfile.write(out, np.zeros(100), 16_000, format="OGG")
    parts = [image(400, 300, kind), {"type": "audio", "audio": out.getvalue()}, sound(48_000)]
    monkeypatch.setattr(Image, "open", None)
    monkeypatch.setattr(soundfile, "SoundFile", None)
    per_pixel = WEBP_PIXEL_BYTES if kind == "WEBP" else PREPARED_PIXEL_BYTES
    assert picture_bytes(parts[0]["image"]) == (per_pixel * 120_000, 120_000)
    assert sound_rate(out.getvalue()) == 16_000
    audio_bytes = sound_bytes(30.0, 48_000)
    assert audio_bytes < decoded_bytes(job(*parts), model_type="gemma4", audio_s=30.0) < audio_bytes + 10**6


def test_the_engine_decodes_within_the_planned_budget():
    request = replace(REQUEST, images=16)
    plan = plan_request(request, later={}, inputs=INPUTS, media=served())
    with trimtab.load(plan) as model:
        assert LoadedEngine(model, rows=1).inputs.media._most_bytes == plan.host["media"]


def test_audio_whose_header_tells_no_length_is_within_the_limit_of_a_request():
    """The plan counts no more than that limit: an ogg is measured while it is decoded."""
    request = replace(REQUEST, audio_s=600.0)
    plan = plan_request(request, later={}, inputs=INPUTS, media=served(replace(LIMITS, request_audio_s=0.5)))
    with trimtab.load(plan) as model:
        engine = LoadedEngine(model, rows=1, audio_s=0.5)
        allowed = job(sound(48_000, 0.4, kind="OGG"))
        assert engine.inputs.media._size(allowed) <= plan.host["media"]
        assert len(engine.inputs.decoded(allowed).prompt[0]["content"][0]["audio"]) == 6_400
        for parts, words in (
            ([sound(48_000, 0.6, kind="OGG")], "lasts 0.6 s, the limit is 0.5 s"),
            ([sound(48_000, 0.3, kind="OGG")] * 2, "has 0.6 seconds, the limit of a request is 0.5"),
        ):
            error = refused(engine.inputs.decoded, job(*parts), match=words)
            assert error.field == f"messages[0].content[{len(parts) - 1}].input_audio"
