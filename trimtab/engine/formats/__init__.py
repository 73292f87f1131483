"""How is a quantized weight stored, unpacked and multiplied by its own library?"""
