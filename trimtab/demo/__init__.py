"""What does the demo bring and show?

    import trimtab.demo

    trimtab.demo.BASE                   the checkpoint
    trimtab.demo.ADAPTERS["style"]      an adapter for it; also "specialist" and "rslora-dora"
    trimtab.demo.IMAGES, .SOUNDS        what it was trained to see and hear

`line.py` (`trimtab demo`) shows the whole line on them.
"""

from pathlib import Path

FOLDER = Path(__file__).parent
BASE = FOLDER / "base"
ADAPTERS = {name: FOLDER / "adapters" / name for name in ("rslora-dora", "specialist", "style")}
IMAGES = tuple(FOLDER / "images" / f"image_{number}.png" for number in range(1, 7))
SOUNDS = tuple(FOLDER / "sounds" / f"audio_{number}.wav" for number in range(1, 7))
