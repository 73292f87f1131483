"""The release of this package; imports nothing, so that every room may ask."""

__version__ = "0.1.0"
