"""Issues: the jinja templates, and the evidence that fills them."""
