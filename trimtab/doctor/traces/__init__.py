"""Pasted errors: signatures, the reader of pasted text, the answer."""
