"""How a picture or a sound of the demo world looks and sounds: one seed, one image or waveform."""

from __future__ import annotations

import math
import random
import wave
from pathlib import Path

import numpy as np
from demo_world import COLOURS, PITCHES, Picture, Sound
from PIL import Image, ImageDraw

PIXELS = 128
RATE_HZ = 16_000
SOUND_SAMPLES = 16_000
# (dark, light) of each colour, far apart in hue so that a jitter of 12 cannot cross into another colour.
RGB = {
    "red": ((160, 8, 30), (250, 96, 104)), "green": ((12, 92, 40), (110, 225, 60)),
    "blue": ((16, 26, 118), (64, 156, 250)), "yellow": ((150, 128, 0), (252, 222, 20)),
    "purple": ((92, 18, 104), (200, 130, 235)), "orange": ((168, 72, 4), (252, 160, 60)),
}  # fmt: skip
CENTRES = {
    "top left": (30, 30), "top right": (98, 30), "bottom left": (30, 98), "bottom right": (98, 98), "middle": (64, 64),
}  # fmt: skip
# Ten centres in equal ratios of 1.3: a jitter of 4 % and a glide of 16 % around the centre stay within one class.
LOWEST_HZ, RATIO = 240.0, 1.3
BEEP_S, GAP_S = 0.14, 0.06


def draw(picture: Picture, seed: int) -> Image.Image:
    """Return the 128 x 128 RGB image of a picture; place, size, background and colour vary a little with the seed."""
    rng = random.Random(f"{picture} {seed}")
    ground = rng.randint(205, 250)
    image = Image.new("RGB", (PIXELS, PIXELS), tuple(ground + rng.randint(-6, 5) for _ in range(3)))
    pen = ImageDraw.Draw(image)
    base = RGB[picture.colour][picture.shade]
    colour = tuple(min(255, max(0, channel + rng.randint(-12, 12))) for channel in base)
    centre_x, centre_y = CENTRES[picture.place]
    # One shape is near the centre of its place: on a corner of the grid it would stand between two places. Two or three
    # are on distinct cells of a 2 x 2 grid, wide enough apart not to touch.
    grid = [(-14, -14), (14, -14), (-14, 14), (14, 14)]
    cells = rng.sample(grid, picture.count) if picture.count > 1 else [(rng.randint(-6, 6), rng.randint(-6, 6))]
    for cell_x, cell_y in cells:
        x, y = centre_x + cell_x + rng.randint(-2, 2), centre_y + cell_y + rng.randint(-2, 2)
        _shape(pen, picture.shape, x, y, rng.randint(8, 10), colour, hollow=picture.fill == 1)
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, 3, (PIXELS, PIXELS, 3))
    return Image.fromarray(np.clip(np.asarray(image) + noise, 0, 255).astype(np.uint8))


def _shape(pen: ImageDraw.ImageDraw, shape: str, x: int, y: int, radius: int, colour: tuple[int, ...], *, hollow: bool) -> None:
    points = _outline(shape, x, y, radius)
    if shape == "circle":
        box = (x - radius, y - radius, x + radius, y + radius)
        pen.ellipse(box, **({"outline": colour, "width": 3} if hollow else {"fill": colour}))
    elif hollow:
        pen.line([*points, *points[:2]], fill=colour, width=3, joint="curve")
    else:
        pen.polygon(points, fill=colour)


def _outline(shape: str, x: int, y: int, radius: int) -> list[tuple[float, float]]:
    if shape == "square":
        side = radius * 0.9
        return [(x - side, y - side), (x + side, y - side), (x + side, y + side), (x - side, y + side)]
    if shape == "triangle":
        return [(x, y - radius), (x + radius, y + radius * 0.8), (x - radius, y + radius * 0.8)]
    if shape == "star":
        radii = [radius * 1.15 if i % 2 == 0 else radius * 0.45 for i in range(10)]
        return [(x + r * math.sin(i * math.pi / 5), y - r * math.cos(i * math.pi / 5)) for i, r in enumerate(radii)]
    arm = radius * 0.34
    corners = [(-arm, -radius), (arm, -radius), (arm, -arm), (radius, -arm), (radius, arm), (arm, arm)]
    return [(x + a, y + b) for a, b in corners] + [(x - a, y - b) for a, b in corners]


def centre_hz(sound: Sound) -> float:
    """Return the frequency that the beeps of a sound are centred on, before jitter."""
    return LOWEST_HZ * RATIO ** (2 * list(PITCHES).index(sound.pitch) + sound.half)


def play(sound: Sound, seed: int) -> np.ndarray:
    """Return one second of float32 samples [16000] within -1..1; onset, loudness, pitch and noise vary a little."""
    rng = random.Random(f"{sound} {seed}")
    noise = np.random.default_rng(rng.getrandbits(32)).normal(0, rng.uniform(0.0005, 0.003), SOUND_SAMPLES)
    samples = noise.astype(np.float64)
    middle = centre_hz(sound) * (1 + rng.uniform(-0.04, 0.04))
    first, last = {"rising": (0.86, 1.16), "falling": (1.16, 0.86), "steady": (1.0, 1.0)}[sound.motion]
    loudness = rng.uniform(0.35, 0.7)
    length = int(BEEP_S * RATE_HZ)
    onset = rng.uniform(0.03, 0.98 - sound.count * (BEEP_S + GAP_S))
    envelope = np.minimum(1.0, np.minimum(np.arange(length), np.arange(length)[::-1]) / (0.01 * RATE_HZ))
    for _ in range(sound.count):
        phase = 2 * np.pi * np.cumsum(np.linspace(first, last, length) * middle) / RATE_HZ
        tone = np.sin(phase)
        if sound.timbre == 1:
            tone = 0.5 * tone + 0.35 * np.sin(2 * phase) + 0.25 * np.sin(3 * phase)
        start = int(onset * RATE_HZ)
        samples[start : start + length] += loudness * envelope * tone
        onset += BEEP_S + GAP_S
    return np.clip(samples, -1, 1).astype(np.float32)


def write_wav(path: Path, samples: np.ndarray) -> None:
    """Write samples within -1..1 as 16-bit mono at 16 kHz."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE_HZ)
        file.writeframes((samples * 32767).round().astype("<i2").tobytes())


def read_wav(path: Path) -> np.ndarray:
    """Return the float32 samples of a file that `write_wav` wrote."""
    with wave.open(str(path), "rb") as file:
        return np.frombuffer(file.readframes(file.getnframes()), dtype="<i2").astype(np.float32) / 32767


assert set(RGB) == set(COLOURS)
