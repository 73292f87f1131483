"""Which release of this package is this?"""

__version__ = "0.2.0"
