"""Which adapters are in host memory?"""
