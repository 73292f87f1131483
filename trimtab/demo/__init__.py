"""What does the demo contain and show?

    import trimtab.demo

    trimtab.demo.BASE                   the checkpoint, which is called "demo"
    trimtab.demo.ADAPTERS["style"]      an adapter for it, "demo/style"; also "specialist" and "rslora-dora"
    trimtab.demo.IMAGES, .SOUNDS        the images and audio clips of its training

`demo.py` (`trimtab demo`) runs everything from plan to answer on them.
"""

from trimtab.adapter_names import ADAPTERS, BASE, FOLDER

__all__ = ["ADAPTERS", "BASE", "FOLDER", "IMAGES", "SOUNDS"]

IMAGES = tuple(FOLDER / "images" / f"image_{number}.png" for number in range(1, 7))
SOUNDS = tuple(FOLDER / "sounds" / f"audio_{number}.wav" for number in range(1, 7))
