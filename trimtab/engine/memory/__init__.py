"""How is device memory besides tensors held: rates, pools, reserve, errors?"""
