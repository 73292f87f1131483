"""What does the demo contain and show?

    import trimtab.demo

    trimtab.demo.BASE                   the checkpoint
    trimtab.demo.ADAPTERS["style"]      an adapter for it; also "specialist" and "rslora-dora"
    trimtab.demo.IMAGES, .SOUNDS        the images and audio clips of its training

`demo.py` (`trimtab demo`) runs everything from plan to answer on them.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
BASE = FOLDER / "base"
ADAPTERS = {name: FOLDER / "adapters" / name for name in ("rslora-dora", "specialist", "style")}
IMAGES = tuple(FOLDER / "images" / f"image_{number}.png" for number in range(1, 7))
SOUNDS = tuple(FOLDER / "sounds" / f"audio_{number}.wav" for number in range(1, 7))
