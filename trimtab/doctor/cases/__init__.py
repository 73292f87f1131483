"""What does the stock stack answer in every placement?"""
