"""What is asked of CUDA: compiling, configuring, capturing, describing memory?"""
