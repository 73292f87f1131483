"""How fast is trimtab beside the stock stack?"""
