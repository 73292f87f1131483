"""How many bytes are needed in addition to the weights?"""
