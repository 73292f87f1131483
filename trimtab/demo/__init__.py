"""What can be tried without a download: `trimtab demo` (line.py) on a small model (build.py makes it)."""
