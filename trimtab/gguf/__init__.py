"""What does a GGUF file hold, and what is it as a checkpoint?"""
