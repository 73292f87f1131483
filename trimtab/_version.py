"""The release of this package. Imports nothing, so every room can import it."""

__version__ = "0.2.0"
