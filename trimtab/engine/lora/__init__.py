"""How is an adapter attached to a model, and how is PEFT's arithmetic computed?"""
