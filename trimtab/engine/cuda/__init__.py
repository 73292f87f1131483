"""How does the engine use CUDA: compiling, configuring, capturing, describing memory?"""
