"""What is an adapter on a model, and what is PEFT's arithmetic for it?"""
