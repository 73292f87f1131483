"""What would the stock stack do with this model?"""
