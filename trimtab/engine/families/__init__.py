"""Which decoders are known as data, and what is one step of each?"""
