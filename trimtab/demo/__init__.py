"""What does the demo contain and show?"""

from trimtab.adapter_names import ADAPTERS, BASE, FOLDER

__all__ = ["ADAPTERS", "BASE", "FOLDER", "IMAGES", "SOUNDS"]

IMAGES = tuple(FOLDER / "images" / f"image_{number}.png" for number in range(1, 7))
SOUNDS = tuple(FOLDER / "sounds" / f"audio_{number}.wav" for number in range(1, 7))
