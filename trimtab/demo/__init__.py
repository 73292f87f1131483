"""What can be tried without a download: a small trained model, its adapters, pictures and sounds (CARD.md), and the whole
line on them (line.py, `trimtab demo`)."""
