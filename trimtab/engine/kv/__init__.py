"""Where are the keys and values of rows: rings, pages, 8 bits, stored prefixes?"""
