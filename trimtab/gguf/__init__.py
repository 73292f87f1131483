"""What does a GGUF file hold, and what is it as a checkpoint? Headers and small tensors only; no weight is unpacked."""
