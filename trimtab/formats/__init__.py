"""In which formats do publishers store quantized weights, and what does each take?"""
