"""How fast is trimtab, compared with the stock stack?"""
