"""Which known failure a pasted error is: signatures, the reader of pasted text, the answer."""
