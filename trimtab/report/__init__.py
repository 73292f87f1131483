"""Reports as pictures: shapes and SVG text."""
