"""How is device memory other than tensors counted: rates, pools, reserve, errors?"""
