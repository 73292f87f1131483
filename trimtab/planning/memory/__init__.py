"""How many bytes are needed besides the weights?"""
