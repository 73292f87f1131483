"""How do bytes get from disk to host to device ahead of use?"""
