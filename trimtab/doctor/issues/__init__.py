"""Issues that are made of something else than runs of the matrix: templates and what fills them."""
